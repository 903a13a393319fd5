"""What comes out of a race: sweeps with their powers and crossings, pages, files that are compared, interruptions."""

import importlib.util
import json
import math

import pytest

from conformance import race
from conformance.race import charts, command, documents, judging, lane, racing, sweep
from conformance.race.pictures import draw
from conformance.race.profile import group, hlo_sources
from conformance.race.table import as_text
from conformance.race.task import Task
from conformance.report.html import render

STEADY = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98]


def row(median: float, **more) -> dict:
    return {"status": "raced", "rounds": [median * x for x in STEADY], "losses": [5.5, 5.4], "first_step_seconds": 1.0,
            "note": "", "group": "torch eager", "ours": False, "loss_distance": 0.0, **more}  # fmt: skip


def raced(task: Task, **medians: float) -> dict:
    """A race as `racing.race` gives it, from medians."""
    rows = {name.replace("_", "-"): row(median) for name, median in medians.items()}
    judging.judge(rows, dict.fromkeys(rows, 1e-5))
    return {"task": task.to_dict(), "contestants": rows, **judging.conclude(rows, task, 1e11)}


def document(races: list[dict], **more) -> dict:
    place = {"processor": "p", "threads": 2, "matmul_gflops": 100.0, "gbytes": 10.0, "versions": {"torch": "2"}}
    return {"schema": racing.SCHEMA, "environment": place, "races": races, "interrupted": False, **more}


# --- sweeps


def swept(axis: str = "length", values=(64, 128, 256, 512)) -> dict:
    races = []
    for x in values:
        base = sweep.task_at(Task("tiny"), axis, x)
        # One grows as the square and starts below, the other as x: they meet at 256.
        races += [{**raced(base, torch=1e-6 * x**2), "at": x},
                  {**raced(base.replace(architecture="lstm"), torch_lstm=2.56e-4 * x), "at": x}]  # fmt: skip
    made = document(races)
    return {**made, "sweep": {"axis": axis, "values": list(values), **sweep.analysis(axis, races)}}


def test_powers_and_crossings_are_those_on_paper():
    found = swept(values=(32, 64, 128, 512, 1024))["sweep"]
    fits = found["fits"]
    assert fits["torch"]["exponent"] == pytest.approx(2.0) and fits["torch-lstm"]["exponent"] == pytest.approx(1.0)
    assert fits["torch"]["low"] <= 2.0 <= fits["torch"]["high"] and fits["torch"]["last"] == pytest.approx(2.0)
    assert fits["torch-lstm"]["flops"] == pytest.approx(1.0)
    (crossing,) = found["crossings"]
    assert (crossing["a"], crossing["b"]) == ("torch", "torch-lstm") and crossing["at"] == pytest.approx(256.0)
    assert sweep.sentences(found) == ["torch is faster than torch-lstm up to length 256, and slower above"]


def test_the_power_of_the_last_two_values_is_apart_from_that_of_all():
    points = [[1, 1.0, 1], [2, 2.0, 2], [4, 8.0, 4]]  # first as x, then as its square
    found = sweep.fit(points, [[y * x for x in STEADY] for _, y, _ in points])
    assert found["last"] == pytest.approx(2.0) and found["exponent"] == pytest.approx(1.5)
    assert found["low"] < 1.5 < found["high"] < 1.6


def test_a_crossing_inside_the_noise_is_none():
    noisy = [1.0, 2.0, 0.5, 1.5, 0.7, 1.2]
    curves = {"a": [[1, 1.0, 1], [2, 1.1, 2]], "b": [[1, 1.1, 1], [2, 1.0, 2]]}
    samples = {"a": [noisy, [1.1 * x for x in noisy]], "b": [[1.1 * x for x in noisy], noisy]}
    assert sweep.crossings(curves, samples) == []
    quiet = {name: [[y * x for x in STEADY] for _, y, _ in points] for name, points in curves.items()}
    assert sweep.crossings(curves, quiet)[0]["at"] == pytest.approx(math.sqrt(2.0))


def test_an_attention_model_that_never_meets_a_recurrent_one_is_said_so():
    found = swept(values=(32, 64, 128))["sweep"]
    assert [crossing["at"] for crossing in found["crossings"]] == [None]
    assert "torch is faster than torch-lstm at every length from 32 to 128" in sweep.sentences(found)[0]


def test_the_values_of_a_sweep_are_around_the_size_or_those_given():
    base = Task("tiny")
    assert sweep.values_of("length", base, None) == [32, 64, 128, 256]
    assert sweep.values_of("layers", base, None) == [1, 2, 4, 8]
    assert sweep.values_of("batch", base, "8, 2,8") == [2, 8]
    assert sweep.values_of("precision", base, None) == ["float32", "bfloat16"]
    assert sweep.values_of("remat", base, "on,off") == [True, False]
    assert sweep.values_of("threads", base, None)[0] == 1
    wider = sweep.task_at(base, "width", 128)
    assert wider.shape.heads == 8 and wider.model.key_size == base.model.key_size


@pytest.mark.parametrize(
    ("axis", "values", "phrase"),
    [
        ("length", "64,-1", "must be positive integers"),
        ("length", "", "must be positive integers"),
        ("length", "64,1.5", "must be positive integers"),
        ("precision", "float7", "must be of float32, bfloat16"),
        ("remat", "maybe", "must be of off, on"),
        ("width", "100", "multiples of the head size"),
        ("depth", None, "sweep must be one of length"),
    ],
)
def test_values_that_an_axis_does_not_have_are_refused_before_anybody_starts(axis, values, phrase, monkeypatch):
    monkeypatch.setattr(lane, "Process", None)
    with pytest.raises(ValueError, match=phrase):
        sweep.sweep(axis, Task("tiny"), ["numpy"], values=values, rounds=1, seconds=0.01, threads=1, timeout=60,
                    say=print)  # fmt: skip


def test_a_short_sweep_of_the_reference_has_a_point_for_each_value(tmp_path, capsys):
    files = {name: str(tmp_path / f"sweep.{name}") for name in ("json", "png", "html")}
    arguments = ["--sweep", "batch", "--values", "1,2", "--with", "numpy", "--rounds", "2", "--seconds", "0.01",
                 "--threads", "1"]  # fmt: skip
    assert race.main([*arguments, *(word for name, path in files.items() for word in (f"--{name}", path))]) == 0
    found = json.loads((tmp_path / "sweep.json").read_text())
    assert [point[0] for point in found["sweep"]["curves"]["numpy"]] == [1, 2]
    assert found["sweep"]["fits"]["numpy"]["flops"] == pytest.approx(1.0)
    assert "time grows as batch to the power" in capsys.readouterr().out
    assert (tmp_path / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    page = (tmp_path / "sweep.html").read_text()
    assert "Time against batch" in page and "batch 2: " in page


# --- pages


def test_the_page_shows_each_race_with_its_losses_and_the_roof():
    made = document([raced(Task("tiny"), torch=1e-2, hf_gpt2=2e-2)])
    page = render(race=made)
    assert page.count("<figure>") == 2 and "Losses of the updates" in page and "Roofline: 100 GFLOP/s" in page
    assert "torch wins" in page
    text = as_text(made)
    assert "p, 2 threads" in text and "hf-gpt2" in text and "1.96-" not in text.splitlines()[0]


def test_the_dots_of_a_roofline_lie_under_the_roof_where_the_figures_do():
    task = Task("small")
    found = raced(task, torch=task.flops / 50e9)  # half of 100 GFLOP/s
    assert found["contestants"]["torch"]["gflops"] == pytest.approx(50.0)
    ((_, _), (caption, svg)) = charts.race_charts(found, {"matmul_gflops": 100.0, "gbytes": 10.0})
    assert f"{task.flops / task.bytes_moved:.0f} FLOPs for each byte" in caption
    assert "torch: " in svg and ", 50<" in svg and ", 100<" in svg


def test_names_in_charts_are_text_and_not_markup():
    svg = charts.plot([charts.Series("<b>&", [(1.0, 2.0), (2.0, 3.0)])], "x<", "y")
    assert "<b>" not in svg and "&lt;b&gt;&amp;" in svg and "x&lt;" in svg
    assert charts.plot([], "x", "y") == ""


@pytest.mark.parametrize(
    ("low", "high", "log"), [(1, 1, False), (1, 1, True), (0.003, 0.0031, False), (16, 70000, True)]
)
def test_an_axis_has_ticks_inside_it(low, high, log):
    scale = charts.Scale([low, high], 0.0, 100.0, log)
    assert 2 <= len(scale.ticks()) <= 12 or low == high
    assert all(-1e-6 <= scale(tick) <= 100.000001 for tick in scale.ticks())


def test_a_sweep_is_drawn_also_over_words(tmp_path):
    races = [{**raced(Task("tiny", precision=name), torch=1e-2), "at": name} for name in ("float32", "bfloat16")]
    made = document(races)
    made["sweep"] = {"axis": "precision", "values": ["float32", "bfloat16"], **sweep.analysis("precision", races)}
    assert made["sweep"]["fits"] == {} and charts.sweep_charts(made["sweep"]) == []
    draw(made, tmp_path / "words.png")
    draw(swept(), tmp_path / "numbers.png")
    assert all((tmp_path / f"{name}.png").stat().st_size > 0 for name in ("words", "numbers"))
    assert "precision bfloat16: tiny" in as_text(made)


# --- figures beside the verdict


def test_ours_is_compared_with_the_best_peer_of_its_class():
    rows = {
        "torch": row(0.9, ours=True),
        "slow": row(2.0),
        "good": row(1.0),
        "compiled": row(0.5, group="torch compiled"),
    }
    notes = judging.conclude(rows, Task("tiny"), 1e11)["notes"]
    assert rows["torch"]["best_peer"]["name"] == "good" and rows["torch"]["best_peer"]["ratio"] == pytest.approx(0.9)
    assert notes[0].startswith("torch takes 0.900 of the time of good, the best peer in torch eager")


def test_a_difference_smaller_than_the_machines_unrest_is_warned_of():
    noisy = [1.0, 1.4, 0.8, 1.2, 0.9, 1.3]
    rows = {"a": row(1.0, rounds=noisy), "b": row(1.0, rounds=[1.02 * x for x in noisy])}
    (note,) = judging.conclude(rows, Task("tiny"), 1e11)["notes"]
    assert note.startswith("noise: ") and "2.0% separate the two" in note
    rows = {"a": row(1.0), "b": row(2.0)}
    assert judging.conclude(rows, Task("tiny"), 1e11)["notes"] == []


def test_who_decodes_other_tokens_is_disqualified():
    rows = {"numpy": row(1.0, decoded=[[1, 2, 3, 4, 5]] * 2), "same": row(1.0, decoded=[[1, 2, 3, 4, 5]] * 2),
            "wrong": row(1.0, decoded=[[1, 2, 3, 4, 5], [1, 9, 9, 9, 9]])}  # fmt: skip
    judging.judge(rows, dict.fromkeys(rows, 1e-5))
    assert [found["status"] for found in rows.values()] == ["raced", "raced", "disqualified"]
    assert "only 60% of the tokens" in rows["wrong"]["reason"]


def test_losses_are_judged_by_a_reference_that_did_not_race():
    rows = {"torch": row(1.0, losses=[5.5, 5.3]), "jax": row(1.0)}
    judging.judge(rows, dict.fromkeys(rows, 1e-5), {"losses": [5.5, 5.4]})
    assert rows["torch"]["status"] == "disqualified" and "differ from numpy's" in rows["torch"]["reason"]
    assert rows["jax"]["status"] == "raced" and rows["jax"]["loss_reference"] == "numpy"


# --- files


def test_two_results_are_compared_by_their_common_contestants(tmp_path, capsys):
    before = document([raced(Task("tiny"), torch=1e-2, jax=1e-2, gone=1.0)])
    after = document([raced(Task("tiny"), torch=2e-2, jax=1.001e-2)])
    after["environment"] = {**after["environment"], "matmul_gflops": 50.0, "versions": {"torch": "3"}}
    found = documents.compare(before, after)
    ratios = {found_row["contestant"]: found_row for found_row in found["rows"]}
    assert ratios["torch"]["ratio"] == pytest.approx(2.0) and ratios["torch"]["low"] > 1.9
    assert ratios["torch"]["against_machine"] == pytest.approx(1.0)  # the machine was half as fast
    assert found["changed"] == {"version of torch": ["2", "3"]} and found["only"] == ["tiny: gone only in the first"]
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for path, made in zip(paths, (before, after), strict=True):
        command.write(path, made)
    assert race.main(["compare", *paths, "--json", str(tmp_path / "c.json")]) == 0
    said = capsys.readouterr().out
    assert "version of torch: 2 -> 3" in said and "slower" in said and "within the noise" in said
    assert json.loads((tmp_path / "c.json").read_text())["rows"]


def test_a_document_holds_no_number_that_json_lacks(tmp_path, capsys):
    made = document([raced(Task("tiny"), torch=1e-2)])
    made["races"][0]["contestants"]["torch"] |= {"losses": [5.5, math.nan], "loss_distance": math.inf}
    command.write("-", made)
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["races"][0]["contestants"]["torch"]["losses"] == [5.5, None]
    assert found["races"][0]["contestants"]["torch"]["loss_distance"] is None
    path = tmp_path / "race.json"
    command.write(str(path), made)
    assert documents.read(str(path))["races"][0]["contestants"]["torch"]["rounds"]


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        (None, "cannot be read"),
        ("{", "is damaged: it is no JSON"),
        ("[" * 100000, "is damaged: it is no JSON"),
        ("[]", "expected a JSON object; got list"),
        ("{}", "is no result of a race"),
        ('{"schema": 1, "environment": {}, "races": []}', "another version of the race .schema 1; this one reads 2"),
        ('{"schema": 2, "environment": {}, "races": [{}]}', "is damaged: a race without task"),
        (
            '{"schema": 2, "environment": {}, "races": '
            '[{"task": {}, "verdict": "", "contestants": {"x": {"rounds": [0]}}}]}',
            "the rounds of x are not positive",
        ),
    ],
)  # fmt: skip
def test_a_file_that_is_no_result_is_refused(text, phrase, tmp_path, capsys):
    path = tmp_path / "race.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=phrase):
        documents.read(str(path))
    assert race.main(["compare", str(path), str(path)]) == 2
    assert capsys.readouterr().err.startswith("conformance race: ")
    with pytest.raises(ValueError, match=phrase):
        race.main(["compare", str(path), str(path), "--debug"])


# --- interruptions, devices, the command


def test_an_interrupted_race_keeps_what_it_measured_and_starts_no_other(tmp_path, monkeypatch, capsys):
    turns = []

    def turn(self):
        turns.append(self.contestant.name)
        if len(turns) == 3:
            raise KeyboardInterrupt
        self.row["rounds"].append(0.1)

    monkeypatch.setattr(lane.Lane, "turn", turn)
    path = tmp_path / "race.json"
    arguments = ["--with", "numpy", "--size", "tiny", "--size", "long", "--seconds", "0.01", "--threads", "1"]
    assert race.main([*arguments, "--json", str(path)]) == 130
    found = json.loads(path.read_text())
    assert found["interrupted"] is True and len(found["races"]) == 1
    assert found["races"][0]["contestants"]["numpy"]["rounds"] == [0.1, 0.1]
    assert "interrupted" in capsys.readouterr().out


@pytest.mark.parametrize(("framework", "device", "phrase"), [
    ("numpy", "cuda", "NumPy has no device 'cuda'"),
    ("torch", "tpu", "no device 'tpu'; use cpu or cuda"),
    ("ghost", "cpu", "ghost is not installed"),
])  # fmt: skip
def test_a_device_that_a_framework_lacks_is_named(framework, device, phrase):
    if importlib.util.find_spec(framework) is None and framework != "ghost":
        pytest.skip(f"{framework} is not installed")
    assert phrase in lane.device_facts(framework, Task(device=device), 1, 60)["error"]


def test_a_race_on_a_device_that_nobody_has_is_refused(capsys):
    assert race.main(["--with", "numpy", "--device", "cuda", "--threads", "1"]) == 2
    said = capsys.readouterr().err
    assert "no chosen contestant can run on device 'cuda': " in said and "NumPy has no device" in said


@pytest.mark.parametrize(
    ("words", "phrase"),
    [
        (["--with", "nobody"], "unknown contestant 'nobody'"),
        (["--values", "1,2"], "--values are those of --sweep"),
        (["--sweep", "length", "--size", "tiny", "--size", "small"], "one --size"),
        (["--timeout", "0"], "--timeout must be a positive"),
        (["--sweep", "length", "--threads", "0"], "threads must be at least 1"),
    ],
)
def test_wrong_words_of_the_command_are_refused(words, phrase, monkeypatch, capsys):
    monkeypatch.setattr(lane, "Process", None)
    assert race.main(words) == 2
    assert phrase in capsys.readouterr().err


# --- profiles


def test_operations_are_told_apart_by_name():
    assert group("torch", "aten::addmm") == "matrix products"
    assert group("torch", "aten::_scaled_dot_product_flash_attention_for_cpu") == "attention kernel"
    assert group("jax", "ynn_fusion.3") == "matrix products" and group("jax", "tanh_fusion") == "activations"
    assert group("jax", "while_body") == "other"
    assert group("jax", "ynn_fusion", "jvp(f)/reduce_sum") == "reductions"
    assert group("jax", "ynn_fusion", "jvp(f)/dot_general") == "matrix products"


def test_an_operation_of_xla_is_traced_to_its_line_of_jax(tmp_path):
    assert hlo_sources("") == {}
    small = tmp_path / "module_1.after_optimizations.txt"
    small.write_text('  %x.1 = f32[] add(), metadata={op_name="jit(g)/other"}\n')
    large = tmp_path / "module_2.after_optimizations.txt"
    large.write_text(
        '  ROOT %dot.4 = f32[2]{0} dot(%a, %b), metadata={op_type="d" op_name="jit(f)/transpose(jvp())/dot_general"}\n'
        "  %bare = f32[] add()\n" * 3
    )
    assert hlo_sources(str(tmp_path)) == {"dot.4": "transpose(jvp())/dot_general"}


def test_a_profile_of_the_reference_adds_up(tmp_path, capsys):
    path = tmp_path / "profile.json"
    assert race.main(["--profile", "--with", "numpy", "--threads", "1", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["profiles"]["numpy"]["rows"]
    assert sum(found["share"] for found in rows) == pytest.approx(1.0)
    assert any("attention" in found["op"] for found in rows)
    assert "numpy: " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch", "jax"])
def test_a_profile_of_a_backend_is_mostly_products(name, tmp_path):
    pytest.importorskip(name)
    path = tmp_path / "profile.json"
    assert race.main(["--profile", "--with", name, "--threads", "1", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["profiles"][name]["rows"]
    products = sum(found["share"] for found in rows if found["group"] == "matrix products")
    assert 0.2 < products < 0.95 and sum(found["share"] for found in rows) == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("measure", ["backward", "forward", "decode"])
def test_every_measure_has_its_race(measure, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    path = tmp_path / "race.json"
    arguments = ["--with", "numpy,torch,hf-gpt2", "--measure", measure, "--rounds", "2", "--seconds", "0.01"]
    assert race.main([*arguments, "--threads", "1", "--json", str(path)]) == 0
    (found,) = json.loads(path.read_text())["races"]
    assert [len(one["rounds"]) for one in found["contestants"].values()] == [2, 2, 2]
    if measure == "decode":
        assert all(one["decoded_share"] >= 0.9 for one in found["contestants"].values())
