"""Test vectors: whole, deterministic, enough for a reader who has nothing else, and judged strictly."""

import hashlib
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import core_numpy
from conformance import vectors
from conformance.__main__ import main
from conformance.runner import ABSENT, FAILED, PASSED
from core_numpy import gradients


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("vectors") / "v"
    vectors.write(path, "quick")
    return path


def save(got, path):
    """The library writes the memory as it lies; the format is row-major."""
    save_file({name: np.require(x, requirements="C") for name, x in got.items()}, path)


def answer(request, arrays):
    """What a program that knows docs/vectors.md alone would do, with the reference's arithmetic in the run's dtype."""
    given = dict(request["arguments"])
    for name in request["inputs"]:
        listed = [key for key in arrays if key.startswith(f"{name}.")]
        given[name] = [arrays[f"{name}.{i}"] for i in range(len(listed))] if listed else arrays[name]
    if given.get("window") is not None:
        given["window"] = tuple(given["window"])
    if given.get("scaling") is not None:
        given["scaling"] = core_numpy.RotaryScaling.from_dict(given["scaling"])
    if "shape" in given:
        given["shape"] = tuple(given["shape"])
    if request["function"] == "Transformer":
        return of_model(request, given, arrays)
    positional = [given.pop(name) for name in request["positional"]]
    with np.errstate(all="ignore"):
        got = getattr(core_numpy, request["function"])(*positional, **given)
        values = got if isinstance(got, tuple) else (got,)
        out = {name: np.asarray(x) for name, x in zip(request["results"], values, strict=True)}
        if request["gradients"]:
            upstream = [arrays[f"cotangent.{name}"] for name in request["results"]]
            grads = getattr(gradients, f"{request['function']}_vjp")(*upstream, *positional, **given)
            if not isinstance(grads, dict):
                names = [
                    name for name in request["positional"] if name not in ("ids", "targets", "cos", "sin", "T", "S")
                ]
                names = [name for name in names if name not in ("rate", "key")]
                grads = dict(zip(names, grads if isinstance(grads, tuple) else (grads,), strict=True))
            out |= {f"gradient.{name}": np.asarray(grads[name]) for name in request["gradients"]}
    return out


def of_model(request, given, arrays):
    model = core_numpy.Transformer(
        core_numpy.ModelConfig.from_dict(given.pop("config")), seed=0, dtype=request["dtype"]
    )
    core_numpy.set_params(model, {n.removeprefix("params."): x for n, x in arrays.items() if n.startswith("params.")})
    call = ("kv_lengths", "segments", "positions", "context", "context_lengths", "mask")
    options = {name: given[name] for name in call if name in given}
    out = {"output": np.asarray(model(given["tokens"], **options))}
    if request["gradients"]:
        renamed = {"kv_lengths": "lengths"}
        batch = {renamed.get(name, name): x for name, x in options.items()} | {
            n: given[n] for n in ("tokens", "targets")
        }
        more = {n: given[n] for n in ("label_smoothing", "z_loss", "dropout_key") if n in given}
        loss, grads = core_numpy.loss_and_gradients(model, batch, **more)
        out |= {"loss": np.asarray(loss), **{f"gradient.{name}": np.asarray(x) for name, x in grads.items()}}
    return out


@pytest.fixture(scope="module")
def answers(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("answers")
    for file in sorted((folder / "inputs").glob("*.json")):
        request = json.loads(file.read_text())
        save(answer(request, load_file(file.with_suffix(".safetensors"))), path / f"{request['id']}.safetensors")
    return path


def digest(path):
    parts = [(str(f.relative_to(path)), f.read_bytes()) for f in sorted(path.rglob("*")) if f.is_file()]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def test_who_has_the_folder_and_its_page_alone_can_answer_everything(folder, answers):
    results, strangers = vectors.check(folder, answers)
    assert [(r.case, r.detail) for r in results if r.status != PASSED] == [] and strangers == []
    assert len(results) > 400 and {r.function for r in results} > {
        "attention",
        "Transformer",
        "dropout",
        "merge_attention",
    }
    assert sum(r.comparisons for r in results) > 2 * len(results)
    assert 0.01 < max(r.share for r in results) < 1


def test_the_bytes_are_the_same_each_time_and_few(folder, tmp_path):
    for name in ("one", "two"):
        vectors.write(tmp_path / name, "quick", "attention-s")
    assert digest(tmp_path / "one") == digest(tmp_path / "two")
    for file in (tmp_path / "one").glob("*/*"):
        assert file.read_bytes() == (folder / file.parent.name / file.name).read_bytes(), file.name
    assert sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) < 50e6


def test_every_vector_fits_the_schema_and_its_own_files(folder):
    schema = json.loads((folder / "schema.json").read_text())
    manifest = vectors.read_manifest(folder)
    ids = [entry["id"] for entry in manifest["vectors"]]
    assert len(ids) == len(set(ids)) == len(list((folder / "inputs").glob("*.json")))
    for entry in manifest["vectors"]:
        request = json.loads((folder / "inputs" / f"{entry['id']}.json").read_text())
        assert set(schema["required"]) <= set(request) == set(schema["properties"])
        assert request["function"] in schema["properties"]["function"]["enum"] and request["id"] == entry["id"]
        expected = load_file(folder / "expected" / f"{entry['id']}.safetensors")
        asked = {*request["results"], *(f"gradient.{name}" for name in request["gradients"])}
        assert {name for name in expected if not name.startswith("bound.")} == asked
        for name in [name for name in expected if name.startswith("bound.")]:
            bound = expected[name]
            assert bound.dtype == np.float64 and np.isfinite(bound).all() and (bound >= 0).all(), (entry["id"], name)
            assert bound.shape == expected[name.removeprefix("bound.")].shape


def test_nan_where_it_must_not_matter_is_in_the_inputs_and_not_in_the_answer(folder):
    inputs = load_file(folder / "inputs" / "attention-masked-nan-dead-key-moved-3.float32.safetensors")
    expected = load_file(folder / "expected" / "attention-masked-nan-dead-key-moved-3.float32.safetensors")
    assert np.isnan(inputs["v"]).sum() == 2 * 2 * 8 and all(np.isfinite(x).all() for x in expected.values())


def one(folder, tmp_path, change, vector="attention-causal.float32"):
    """The result of one vector whose right answer was changed."""
    file = folder / "inputs" / f"{vector}.json"
    got = answer(json.loads(file.read_text()), load_file(file.with_suffix(".safetensors")))
    got = change(got) or got
    save(got, tmp_path / f"{vector}.safetensors")
    ((result,), _) = vectors.check(folder, tmp_path, vector)
    return result


def nudge(name, index, by):
    def change(got):
        got[name] = got[name].copy()
        got[name][index] += by

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (nudge("out", (0, 1, 8, 3), 1e-5), "out[0, 1, 8, 3] is off by"),
        (nudge("lse", (1, 0, 2), 1e-4), "lse[1, 0, 2] is off by"),
        (nudge("gradient.k", (1, 1, 0, 0), 1e-3), "gradient.k[1, 1, 0, 0] is off by"),
        (nudge("out", (0, 0, 0, 0), np.nan), "out must be"),
        (lambda got: {**got, "out": got["out"].astype(np.float64)}, "out must have dtype float32; got float64"),
        (lambda got: {**got, "out": got["out"][..., :4]}, "out must have shape (2, 2, 9, 8); got (2, 2, 9, 4)"),
        (lambda got: {"out": got["out"]}, "the answer lacks lse"),
    ],
)
def test_a_wrong_answer_is_named(folder, tmp_path, change, said):
    result = one(folder, tmp_path, change)
    assert result.status == FAILED and said in result.detail


def test_one_wrong_element_of_an_exact_table_fails(folder, tmp_path):
    def change(got):
        got["mask"][1, 0] = not got["mask"][1, 0]

    assert "must be exactly" in one(folder, tmp_path, change, "causal-mask.float32").detail


def test_what_is_left_out_is_not_offered(folder, tmp_path):
    result = one(folder, tmp_path, lambda got: {"out": got["out"], "lse": got["lse"]})
    assert result.status == PASSED and result.detail == "not offered: gradient.q, gradient.k, gradient.v"
    results, _ = vectors.check(folder, tmp_path, "attention-causal.float")
    assert {r.dtype: r.status for r in results} == {"float64": ABSENT, "float32": PASSED, "float16": ABSENT}


def test_an_unreadable_answer_fails_and_the_others_go_on(folder, tmp_path):
    one(folder, tmp_path, lambda got: None)
    (tmp_path / "attention-causal.float64.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0nonsense")
    results, _ = vectors.check(folder, tmp_path, "attention-causal.float")
    assert {r.dtype: r.status for r in results} == {"float64": FAILED, "float32": PASSED, "float16": ABSENT}
    assert "not a sound safetensors file" in results[0].detail


# --- the command line, and broken folders


def small(path):
    vectors.write(path, "quick", "softmax")
    return path


def test_the_commands_end_with_what_they_found(tmp_path, capsys):
    path, given = tmp_path / "v", tmp_path / "answers"
    assert main(["vectors", "write", str(path), "--case", "softmax"]) == 0
    assert "vectors, 0.0 MB, in" in capsys.readouterr().out
    given.mkdir()
    for file in (path / "inputs").glob("*.json"):
        request = json.loads(file.read_text())
        save(answer(request, load_file(file.with_suffix(".safetensors"))), given / f"{request['id']}.safetensors")
    assert main(["vectors", "check", str(path), str(given), "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["targets"]["answers"]["counts"][PASSED] == len(list((path / "inputs").glob("*.json")))
    save_file({"out": np.zeros(3)}, given / "softmax.float64.safetensors")
    assert main(["vectors", "check", str(path), str(given)]) == 1
    assert "out must have shape" in capsys.readouterr().out
    save_file({"out": np.zeros(3)}, given / "sofmax.float32.safetensors")
    assert main(["vectors", "check", str(path), str(given)]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith(
        "1 file answers no vector: sofmax.float32.safetensors (did you mean softmax.float32.safetensors?)"
    )
    (given / "softmax.bfloat16.npz").write_bytes(b"")
    (given / "log.txt").write_text("a program may write beside its answers what it likes")
    assert main(["vectors", "check", str(path), str(given)]) == 1
    assert "2 files answer no vector: sofmax.float32.safetensors (did you mean" in capsys.readouterr().err


def test_misnamed_answers_are_named_where_there_is_no_other(tmp_path, capsys):
    path, given = small(tmp_path / "v"), tmp_path / "answers"
    given.mkdir()
    save_file({"out": np.zeros(3)}, given / "softmaks.float32.safetensors")
    assert main(["vectors", "check", str(path), str(given)]) == 2
    assert "; 1 file answers no vector: softmaks.float32.safetensors (did you mean" in capsys.readouterr().err
    assert main(["vectors", "check", str(path), str(given), "--case", "softmx"]) == 2
    assert "no vector of" in (said := capsys.readouterr().err) and "did you mean softmax?" in said


def broken(kind, path):
    if kind == "missing input":
        (path / "inputs" / "softmax.float32.safetensors").unlink()
    elif kind == "changed expectation":
        file = path / "expected" / "softmax.float64.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\7")
    elif kind == "no manifest":
        (path / "vectors.json").unlink()
    elif kind == "other schema":
        (path / "vectors.json").write_text('{"schema": 7, "vectors": []}')
    elif kind == "no list":
        (path / "vectors.json").write_text('{"schema": 1, "level": "quick", "vectors": [{"id": "x"}]}')
    else:
        (path / "vectors.json").write_text("{")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("no manifest", "it has no vectors.json"),
        ("other schema", "has schema 7; this version reads schema 1"),
        ("no list", "is not a manifest of vectors: KeyError"),
        ("no JSON", "is damaged: it is no JSON"),
    ],
)
def test_a_broken_folder_is_said_plainly(tmp_path, capsys, kind, said):
    path = small(tmp_path / "v")
    (tmp_path / "a").mkdir()
    save_file({"out": np.zeros(3)}, tmp_path / "a" / "softmax.float64.safetensors")
    broken(kind, path)
    assert main(["vectors", "check", str(path), str(tmp_path / "a")]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("kind", "vector", "said"),
    [
        ("missing input", "softmax.float32", "inputs/softmax.float32.safetensors is missing"),
        ("changed expectation", "softmax.float64", "expected/softmax.float64.safetensors is not what was written"),
    ],
)
def test_a_broken_vector_is_said_plainly_and_the_others_are_judged(tmp_path, capsys, kind, vector, said):
    path, given = small(tmp_path / "v"), tmp_path / "answers"
    given.mkdir()
    for file in (path / "inputs").glob("*.json"):
        request = json.loads(file.read_text())
        save(answer(request, load_file(file.with_suffix(".safetensors"))), given / f"{request['id']}.safetensors")
    broken(kind, path)
    assert main(["vectors", "check", str(path), str(given), "--json", str(tmp_path / "found.json")]) == 2
    error = capsys.readouterr().err
    assert said in error and "(1 broken; the others were judged)" in error and error.count("\n") == 1
    calls = json.loads((tmp_path / "found.json").read_text())["targets"]["answers"]["cases"]
    assert {call["id"] for call in calls if call["status"] == FAILED} == {vector} and len(calls) > 5
    assert all(call["status"] == PASSED for call in calls if call["id"] != vector)


def test_folders_that_cannot_be_used_are_refused(tmp_path, folder, capsys):
    assert main(["vectors", "write", str(folder)]) == 2
    assert main(["vectors", "write", str(tmp_path / "n"), "--case", "no-such-case"]) == 2
    assert main(["vectors", "check", str(folder), str(tmp_path / "none")]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["vectors", "check", str(folder), str(tmp_path / "empty")]) == 2
    said = capsys.readouterr().err
    for phrase in (
        "exists and is not an empty folder",
        "no-such-case",
        "is not a folder of answers",
        "holds no answer",
    ):
        assert phrase in said


def test_a_folder_without_a_vector_has_no_answers_to_check(tmp_path):
    (tmp_path / "vectors.json").write_text(json.dumps({"schema": vectors.SCHEMA, "level": "quick", "vectors": []}))
    with pytest.raises(ValueError, match="holds no vectors"):
        vectors.check(tmp_path, tmp_path)
