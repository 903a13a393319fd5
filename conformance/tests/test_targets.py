"""Targets of any kind: how a name becomes one, and what is said of one that is wrong."""

import importlib.metadata
import json
import os
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from conformance import workers
from conformance.__main__ import main
from conformance.rows import load_cases
from conformance.runner import ABSENT, FAILED, PASSED, run_case
from conformance.targets import Target, load
from conformance.workers import judge_targets

RIGHT = """
import numpy as np
DTYPES = ("float64", "float32")
def attention(q, k, v, *, scale=None):
    s = (q.shape[-1] ** -0.5 if scale is None else scale) * (q.astype(float) @ np.swapaxes(k, -1, -2).astype(float))
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return (p @ v.astype(float)).astype(q.dtype)
"""
SOFTMAX = "import numpy as np\ndef softmax(x, *, axis=-1):\n    e = np.exp(x - x.max(axis, keepdims=True))\n"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module and gives its name; forgotten after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def write(text, name="wrong_target"):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        sys.modules.pop(name, None)
        return name

    yield write
    for name in ("wrong_target", "other_target"):
        sys.modules.pop(name, None)


def judge(name, case_id="attention-square"):
    (case,) = [case for case in load_cases() if case.id == case_id]
    return list(run_case(case, load(name)))


def details(results):
    return {result.detail for result in results if result.status == FAILED}


# --- what a name may be


def test_a_module_with_attention_alone_is_a_target_and_lacks_the_rest(module):
    name = module(RIGHT)
    results = judge(name, "attention-scale-one")
    assert [(r.dtype, r.status) for r in results] == [
        ("float64", PASSED), ("float32", PASSED), ("bfloat16", ABSENT), ("float16", ABSENT)
    ]  # fmt: skip
    assert {r.detail for r in results if r.status == ABSENT} == {"no bfloat16", "no float16"}
    assert {r.detail for r in judge(name, "attention-blocks-exact")} == {"attention has no argument causal"}
    assert {r.detail for r in judge(name, "gelu")} == {"no function gelu", "no bfloat16", "no float16"}
    assert {r.status for r in judge(name, "refuse-heads")} == {ABSENT}


def test_without_gradients_the_result_is_judged_and_the_rest_named(module):
    results = judge(module(RIGHT))[:2]
    assert {(r.status, r.detail) for r in results} == {(PASSED, "gradients not offered: no gradients.attention_vjp")}
    wrong = judge(module(RIGHT.replace("-0.5", "-0.4")))[:2]
    assert {r.status for r in wrong} == {FAILED} and "error budget" in wrong[0].detail


def test_without_gradients_masked_nans_are_judged_too(module):
    """The case compares bits before and after, results and gradients; what has no gradients has its results judged."""
    masked = RIGHT.replace("scale=None):", "scale=None, mask=None):").replace(
        "    p = ", "    s = np.where(True if mask is None else mask, s, -np.inf)\n    p = "
    )
    shielded = masked.replace("    s = (q", "    v = np.where(np.isnan(v), 0, v)\n    s = (q")
    in_place = masked.replace("    s = (q", "    v[np.isnan(v)] = 0\n    s = (q")
    results = judge(module(shielded), "attention-masked-nan-mask")
    assert {(r.status, r.detail) for r in results} == {(PASSED, "gradients not offered: no gradients.attention_vjp")}
    wrong = judge(module(masked), "attention-masked-nan-mask")
    assert {r.status for r in wrong} == {FAILED} and "out with v at nan must be exactly" in wrong[0].detail
    assert details(judge(module(in_place), "attention-masked-nan-mask")) == {"attention wrote into its argument v"}


@pytest.mark.parametrize(
    "name", ["wrong_target:attention", "wrong_target.attention", "wrong_target:kit", "wrong_target:Kit"]
)
def test_an_object_or_one_function_is_a_target(module, name):
    module(RIGHT + "class Kit:\n    DTYPES = DTYPES\n    attention = staticmethod(attention)\nkit = Kit()\n")
    assert {r.status for r in judge(name, "attention-scale-one")} == {PASSED, ABSENT}
    assert load(name).name == name


def test_an_object_with_the_adapter_protocol_is_used_as_it_is(module):
    module("from conformance.targets import Target\nclass Mine(Target):\n    def __init__(self):\n"
           "        super().__init__(None, 'x')\n    def offers(self, function):\n        return False\n")  # fmt: skip
    target = load("wrong_target:Mine")
    assert isinstance(target, Target) and target.name == "wrong_target:Mine"
    assert {r.detail for r in judge("wrong_target:Mine", "gelu")} == {"no function gelu"}


def test_an_entry_point_is_a_target(module, monkeypatch):
    point = importlib.metadata.EntryPoint("short-name", module(RIGHT), "conformance.targets")
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda *, group, name: [point] if (group, name) == ("conformance.targets", "short-name") else [],
    )
    target = load("short-name")
    assert target.name == "short-name" and target.offers("attention")


@pytest.mark.parametrize("error", ["NotOffered", "NotImplementedError"])
def test_a_target_says_which_combination_it_does_not_serve(module, error):
    name = module("from conformance.targets import NotOffered\ndef gelu(x, *, approximate='none'):\n"
                  f"    raise {error}('only on Mondays')\n")  # fmt: skip
    assert {(r.status, r.detail) for r in judge(name, "gelu")} == {(ABSENT, "only on Mondays")}


PROGRAM = """
import json, sys
import numpy as np
from safetensors.numpy import load_file, save_file
source, target = sys.argv[1:]
asked = json.load(open(source.replace(".safetensors", ".json")))
if asked["function"] != "rms_norm" or asked["dtype"] not in ("float64", "float32"):
    print(f"no {asked['function']} in {asked['dtype']}", file=sys.stderr)
    sys.exit(3)
x = load_file(source)
assert asked["positional"] == ["x", "weight"] and asked["results"] == ["out"]
w = x["x"].astype(np.float64)
r = 1 / np.sqrt((w * w).mean(-1, keepdims=True) + asked["arguments"]["eps"])
n = w * r
out = {"out": (n * x["weight"]).astype(x["x"].dtype)}
if asked["gradients"]:
    dy = x["cotangent.out"].astype(np.float64)
    g = dy * x["weight"]
    out["gradient.x"] = (r * (g - n * (g * n).mean(-1, keepdims=True))).astype(x["x"].dtype)
    out["gradient.weight"] = (dy * n).sum(tuple(range(n.ndim - 1))).astype(x["x"].dtype)
save_file(out, target)
"""


def test_a_program_is_a_target(tmp_path):
    (tmp_path / "norm.py").write_text(PROGRAM)
    name = f"command:{sys.executable} {tmp_path / 'norm.py'} {{inputs}} {{outputs}}"
    results = judge(name, "rms-norm")
    assert [(r.dtype, r.status, r.detail) for r in results] == [
        ("float64", PASSED, ""), ("float32", PASSED, ""),
        ("bfloat16", ABSENT, "no rms_norm in bfloat16"), ("float16", ABSENT, "no rms_norm in float16"),
    ]  # fmt: skip
    assert results[0].comparisons == 3  # out and two gradients
    assert {r.detail for r in judge(name, "causal-mask")} == {"no causal_mask in float32"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import sys; print('no segment 7', file=sys.stderr); sys.exit(9)", "ended with 9: no segment 7"),
        ("import os; os.kill(os.getpid(), 11)", "the program was ended by SIGSEGV: it said nothing"),
        ("import sys; sys.exit(134)", "the program was ended by SIGABRT"),  # as a shell in between says it
        ("import sys; sys.exit(130)", "the program ended with 130"),
        ("pass", "the program wrote no {outputs} file"),
        ("import sys; open(sys.argv[2], 'w').write('nonsense')", "not a sound safetensors file"),
        ("import sys, numpy as np\nfrom safetensors.numpy import save_file\nsave_file({'y': np.ones(2)}, sys.argv[2])",
         "the program's answer lacks out"),
    ],
)  # fmt: skip
def test_a_program_that_goes_wrong_is_quoted(tmp_path, text, said):
    (tmp_path / "wrong.py").write_text(text)
    results = judge(f"command:{sys.executable} {tmp_path / 'wrong.py'} {{inputs}} {{outputs}}", "softmax")
    assert all(said in detail for detail in details(results)) and {r.status for r in results} == {FAILED}


# --- what cannot be used at all: one line, exit status 3


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        (None, "no_such_module_here", "No module named 'no_such_module_here'"),
        ("import no_such_thing\n", "wrong_target", "No module named 'no_such_thing'"),
        ("def attention(:\n", "wrong_target", "SyntaxError"),
        ("raise RuntimeError('no licence')\n", "wrong_target", "RuntimeError: no licence"),
        ("raise SystemExit(4)\n", "wrong_target", "SystemExit: 4"),
        ("x = 1\n", "wrong_target", "has none of the public names"),
        ("x = 1\n", "wrong_target:attention", "wrong_target has no attention"),
        (
            "FRAMEWORK = 'theano'\nattention = print\n",
            "wrong_target",
            "must be 'numpy', 'torch' or 'jax'; got 'theano'",
        ),
        (
            "DTYPES = ('float64', 'fp32')\nattention = print\n",
            "wrong_target",
            "DTYPES of target 'wrong_target' must be a",
        ),
        ("DTYPES = 'float32'\nattention = print\n", "wrong_target", "got 'float32'"),
        ("DTYPES = 32\nattention = print\n", "wrong_target", "float64, float32, bfloat16, float16; got 32"),
        (None, "command:no_such_program_here {inputs} {outputs}", "there is no program no_such_program_here"),
        (None, "command:cat {inputs}", "must have {outputs} among its arguments"),
        (None, "no_such_module_here", "looked in the current folder too: for a module elsewhere, set PYTHONPATH"),
        (None, "no_such_package.kernel", "No module named 'no_such_package'; looked in the current folder too"),
        (None, "no_such_module_here:attention", "looked in the current folder too"),
        ("x = 1\n", "wrong_target.py", "is a file's name: give the module's name, wrong_target"),
        (None, "./wrong_target", "is a file's name: give the module's name, wrong_target"),
        (None, "src/wrong_target.py:kit", "give the module's name, wrong_target:kit, in src (cd there, or set PYTHON"),
        (None, ".wrong_target", "is a file's name: give a module's name"),
        (None, ":attention", "must be module:object"),
    ],
)
def test_a_target_that_cannot_be_loaded_is_named_in_one_sentence(module, text, name, said):
    if text:
        module(text)
    with pytest.raises(ImportError) as caught:
        load(name)
    assert repr(name) in str(caught.value) and said in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_import_of_a_target_is_not_looked_for_in_the_folder(module):
    with pytest.raises(ImportError) as caught:
        load(module("import no_such_thing\n"))
    assert "current folder" not in str(caught.value)


def test_a_program_that_is_not_executable_is_told_how(tmp_path, monkeypatch):
    (tmp_path / "kernel").write_text("#!/bin/sh\n")
    with pytest.raises(ImportError, match=r"kernel is not executable \(chmod \+x .*kernel\)"):
        load(f"command:{tmp_path / 'kernel'} {{inputs}} {{outputs}}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ImportError, match=r"a program in the current folder is \./kernel"):
        load("command:kernel {inputs} {outputs}")


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_device_that_is_not_there_is_said_once(module, framework, monkeypatch):
    pytest.importorskip(framework)
    monkeypatch.setenv("CONFORMANCE_DEVICE", "quantum")
    name = module(f"FRAMEWORK = '{framework}'\ndef silu(x):\n    return x\n")
    with pytest.raises(ImportError) as caught:
        load(name)
    assert str(caught.value).startswith(f"target {name!r} cannot run on device 'quantum': ")
    assert "\n" not in str(caught.value)


def test_the_device_that_is_asked_for_is_used(module, tmp_path, capfd):
    pytest.importorskip("torch")
    import json

    name = module("import torch\nFRAMEWORK = 'torch'\ndef silu(x):\n    return torch.nn.functional.silu(x)\n")
    assert main(["run", name, "--case", "silu", "--device", "cpu:0", "--json", str(tmp_path / "run.json")]) == 0
    (facts,) = json.loads((tmp_path / "run.json").read_text())["environment"]["targets"].values()
    assert facts["device"] == "cpu:0" and "CONFORMANCE_DEVICE" not in os.environ


def test_a_missing_target_ends_the_command_with_3_and_one_line(capfd):
    assert main(["run", "no_such_module_here", "--case", "softmax"]) == 3
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "no_such_module_here" in error


@pytest.mark.parametrize("text", ["raise OSError('no\\nlicence')\n", "import os\nos._exit(7)\n", None])
def test_a_target_that_cannot_be_used_is_named_and_the_others_are_judged(module, tmp_path, capfd, text):
    import json
    from xml.etree import ElementTree

    module(RIGHT, "other_target")
    name = module(text) if text else "no_such_module_here"
    files = ["--json", str(tmp_path / "run.json"), "--junit", str(tmp_path / "run.xml")]
    assert main(["run", name, "other_target", "--case", "attention-scale-one", "--jobs", "2", *files]) == 3
    out, error = capfd.readouterr()
    first, last = error.strip().splitlines()
    assert name in first and first.endswith("; the other targets go on")
    assert last == f"conformance run: {name}: not judged"
    assert "2 passed, 0 failed" in out
    document = json.loads((tmp_path / "run.json").read_text())
    assert list(document["targets"]) == ["other_target"] and list(document["unusable"]) == [name]
    broken, judged = sorted(ElementTree.parse(tmp_path / "run.xml").getroot(), key=lambda suite: suite.get("tests"))
    assert broken.get("errors") == "1" and document["unusable"][name] in broken.find("testcase/error").get("message")
    assert judged.get("tests") == "4"


def test_of_several_targets_none_of_which_can_be_used_the_first_is_said_last(module, capfd):
    assert main(["run", "no_such_module_here", "nor_this_one", "--case", "softmax"]) == 3
    assert capfd.readouterr().err.strip().splitlines()[-1].startswith("conformance run: target 'no_such_module_here'")


def test_attention_alone_is_judged_where_a_case_asks_for_the_log_sum_exp_too(module):
    (first, *_) = judge(module(RIGHT), "attention-scale")
    assert (first.status, first.function, first.comparisons) == (PASSED, "attention", 1)
    assert first.detail.startswith("lse not offered: no function attention_with_lse; gradients not offered")
    wrong = RIGHT.replace("scale is None else scale", "True else scale")
    (first, *_) = judge(module(wrong, "other_target"), "attention-scale")
    assert first.status == FAILED


# --- what it returns


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("    return (e / e.sum(axis, keepdims=True))[..., :1]", "out must have shape"),
        ("    return (e / e.sum(axis, keepdims=True)).astype(np.float16)", "out must have dtype float64; got float16"),
        ("    return np.full_like(e, np.nan)", "got nan"),
        ("    return (e / e.sum(axis, keepdims=True)).tolist()", "softmax must return one array; got a list"),
        ("    return (e / e.sum(axis, keepdims=True),)", "softmax must return one array; got a tuple"),
        ("    return 'soft'", "a result must be a NumPy array; got builtins.str"),
        ("    return None", "a result must be a NumPy array; got builtins.NoneType"),
        ("    x[...] = 0\n    return e / e.sum(axis, keepdims=True)", "softmax wrote into its argument x"),
        ("    raise RuntimeError('no more memory')", "RuntimeError: no more memory"),
        ("    raise SystemExit(0)", "SystemExit: 0"),
        ("    raise type('PanicException', (BaseException,), {})('index 4')", "PanicException: index 4"),
        ("    return np.ma.masked_array(np.zeros(3), True).dtype", "a result must be a NumPy array; got numpy.dtype"),
        ("    return e.astype(complex)", "out must have dtype float64; got complex128"),
        ("    return e.astype(object)", "out must have dtype float64; got object"),
    ],
)
def test_what_a_target_does_wrong_is_said_plainly(module, ending, said):
    (first, *_) = judge(module(SOFTMAX + ending + "\n"), "softmax")
    assert first.status == FAILED and said in first.detail


def test_what_a_torch_target_does_wrong_is_said_plainly(module):
    pytest.importorskip("torch")
    text = "import torch\nFRAMEWORK = 'torch'\ndef softmax(x, *, axis=-1):\n    out = torch.softmax(x, axis)\n"
    (first, *_) = judge(module(text + "    return out.tolist()\n"), "softmax")
    assert "must return one array; got a list" in first.detail
    (first, *_) = judge(module(text + "    x.zero_()\n    return out\n", "other_target"), "softmax")
    assert first.detail == "softmax wrote into its argument x"


# --- how fast they compile


def test_the_quick_level_compiles_with_flags_that_the_installed_xla_knows(monkeypatch):
    """XLA ends the process for a flag that it does not know."""
    pytest.importorskip("jax")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=here")
    settings = workers.quick_settings()
    if workers._known_to_xla(workers.EMITTERS):
        assert settings["XLA_FLAGS"] == f"--xla_dump_to=here --{workers.EMITTERS}=false"
    monkeypatch.setenv("XLA_FLAGS", f"--{workers.EMITTERS}=true")
    assert workers.quick_settings() == workers.QUICK  # what the caller says stays
    monkeypatch.setattr(workers, "EMITTERS", "xla_no_such_flag")
    monkeypatch.delenv("XLA_FLAGS")
    assert workers.quick_settings() == workers.QUICK


# --- what hangs or dies


def _zombie(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return False


def test_a_target_that_hangs_or_dies_loses_that_case_and_no_other(module, tmp_path):
    name = module("""
        import os, subprocess, time
        import numpy as np
        def softmax(x, *, axis=-1):
            if axis != -1:
                child = subprocess.Popen(["sleep", "600"])
                open("child", "w").write(str(child.pid))
                time.sleep(600)
            e = np.exp(x - x.max(axis, keepdims=True))
            return e / e.sum(axis, keepdims=True)
        def causal_mask(T, S=None, *, q_offset=None):
            os._exit(5) if q_offset is not None else None
            return np.tril(np.ones((T, T), bool))
    """)
    results, facts = judge_targets([name], "quick", "softmax", lambda text: None, 1, timeout=2.0)[name]
    assert facts["framework"] == "numpy"
    lost = [r for r in results if r.kernel == "any"]
    assert lost and all("gave no answer within 2 seconds and was ended" in r.detail for r in lost)
    assert any(r.status != FAILED for r in results)
    child = int((tmp_path / "child").read_text())
    with pytest.raises(ProcessLookupError):  # what it started is ended with it; an unreaped one may be there a moment
        for _ in range(100):
            os.kill(child, 0)
            if _zombie(child):
                raise ProcessLookupError
            time.sleep(0.05)
    results, _ = judge_targets([name], "quick", "causal-mask", lambda text: None, 1, timeout=2.0)[name]
    assert {r.detail for r in results if r.status == FAILED} == {"its process died (exit code 5)"}
    assert any(r.status == PASSED for r in results)


def test_an_interrupt_that_a_target_raises_ends_no_run(module, capfd):
    name = module("""
        from core_numpy import silu
        def relu(x):
            raise KeyboardInterrupt
    """)
    assert main(["run", name, "--case", "lu", "--jobs", "1"]) == 1
    out = capfd.readouterr().out
    assert f"FAILED {name} relu (any, any): KeyboardInterrupt, raised by the target" in out
    assert "4 passed, 1 failed" in out


def test_a_function_that_always_dies_is_not_asked_for_ever(module):
    name = module("import os\ndef softmax(x, *, axis=-1):\n    os.abort()\n")
    results, _ = judge_targets([name], "quick", "softmax", lambda text: None, 1)[name]
    last = "was not asked: 3 cases of softmax were lost before"
    assert [r.detail for r in results[:3]] == ["its process died (SIGABRT)"] * 3
    assert {r.detail for r in results[3:]} == {last}


def test_a_run_that_judged_nothing_is_not_a_success(module, capfd):
    name = module(RIGHT)
    assert main(["run", name, "--case", "causal-mask"]) == 1
    assert f"{name} offers nothing that these cases ask for" in capfd.readouterr().err
    assert main(["run", name, "--case", "attention-scale-one"]) == 0


def test_what_a_target_prints_stays_out_of_the_document(module, capfd):
    name = module("print('hello')\n" + RIGHT)
    assert main(["run", name, "--case", "attention-scale-one", "--json", "-"]) == 0
    assert json.loads(capfd.readouterr().out)["targets"][name]["counts"][PASSED] == 2


def test_a_strided_copy_is_judged_too(module):
    # Reads the memory as if it were contiguous: right on a fresh array, wrong on a strided one.
    name = module("""
        import numpy as np
        def silu(x):
            flat = np.ndarray(x.shape, x.dtype, x if x.base is None else x.base)
            return (flat / (1 + np.exp(-flat))).astype(x.dtype)
    """)
    by_dtype = {r.dtype: r for r in judge(name, "silu")}
    assert by_dtype["float32"].status == FAILED and "strided" in by_dtype["float32"].detail
    assert np.isfinite(by_dtype["float32"].share)
