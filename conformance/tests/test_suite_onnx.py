"""The standard's own node cases: all of them, in each package; and that a target which is wrong fails some."""

import importlib
import json
import sys
import types

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

import core_numpy  # noqa: E402
from conformance import __main__ as command_line  # noqa: E402
from conformance.compare import Tally  # noqa: E402
from conformance.runner import ABSENT, FAILED, PASSED  # noqa: E402
from conformance.suites import onnx_attention, onnx_nodes, onnx_operators  # noqa: E402
from conformance.targets import load, wrap  # noqa: E402

# Of onnx 1.23.2; later ones may have more.
COUNTS = {
    "Attention": 93,
    "RotaryEmbedding": 8,
    "LayerNormalization": 19,
    "RMSNormalization": 19,
    "Gelu": 4,
    "Softmax": 7,
}
RNG = np.random.default_rng(3)
ATTRIBUTES = {"is_causal": 0, "softcap": 0.0, "qk_matmul_output_mode": 0}


def judged(target, level="quick", pattern=None):
    return [result for case in onnx_nodes.cases(level, pattern) for result in case.judge(target, level)]


def failing(**functions):
    """The ids of the cases that fail on core_numpy with these functions in the place of its own."""
    names = {name: getattr(core_numpy, name) for name in ("attention", "attention_weights", "attention_with_lse",
             "apply_rotary", "layer_norm", "rms_norm", "gelu", "softmax")}  # fmt: skip
    module = types.SimpleNamespace(**(names | functions))
    return {
        result.case.removeprefix("onnx/test_") for result in judged(wrap(module, "faulty")) if result.status == FAILED
    }


def call(function, given):
    return load("core_numpy").call(function, given)


def test_no_case_of_a_translated_operator_is_left_out():
    known = onnx_nodes.cases()
    collected = importlib.import_module("onnx.backend.test.case.node")._NodeTestCases
    tests = [test for test in collected if not test.name.endswith("expanded") and "_expanded_" not in test.name]
    operators = [test.model.graph.node[0].op_type for test in tests]
    for operator, least in COUNTS.items():
        mine = [case for case in known if case.node.operator == operator]
        assert len(mine) == operators.count(operator) >= least
        assert len({case.id for case in mine}) == len(mine)


@pytest.mark.parametrize("name", ["core_numpy", "backend_torch", pytest.param("backend_jax", marks=pytest.mark.slow)])
def test_every_case_passes_with_the_targets_own_choice_of_kernel(name):
    pytest.importorskip({"backend_torch": "torch", "backend_jax": "jax"}.get(name, "numpy"))
    results = judged(load(name))
    assert [(r.case, r.detail) for r in results if r.status != PASSED] == []
    assert len(results) >= sum(COUNTS.values())
    assert all(r.comparisons >= 1 for r in results)


@pytest.mark.parametrize("name", ["core_numpy", "backend_torch", pytest.param("backend_jax", marks=pytest.mark.slow)])
def test_every_kernel_that_can_serve_a_case_passes_it(name):
    pytest.importorskip({"backend_torch": "torch", "backend_jax": "jax"}.get(name, "numpy"))
    target = load(name)
    results = judged(target, "full", "attention")
    assert [(r.case, r.kernel, r.detail) for r in results if r.status == FAILED] == []
    assert {r.kernel for r in results if r.status == PASSED} == set(target.kernels())


def test_a_float32_case_says_how_far_it_is_from_the_reference_within_its_wide_tolerance():
    (result,) = judged(load("core_numpy"), pattern="test_attention_4d_gqa_softcap")
    assert result.dtype == "float32" and result.rules == ("onnx.Attention-23",)
    assert float(result.where.split("largest error of all: ")[1].split()[0]) < 1e-6


def changed(**change):
    """core_numpy.attention with keyword arguments replaced: what a name maps to is the value or a function of it."""

    def attention(q, k, v, **given):
        for name, new in change.items():
            if name in given:
                given[name] = new(given[name], q, k) if callable(new) else new
        return core_numpy.attention(q, k, v, **given)

    return attention


@pytest.mark.parametrize(
    ("fault", "caught"),
    [
        (changed(causal=False), "attention_4d_causal"),
        (changed(q_offset=0), "attention_4d_causal_with_past_and_present"),
        (changed(q_offset=lambda x, q, k: x + 1), "attention_local_window_ext_cache_rank2_mask"),
        (changed(kv_lengths=lambda x, q, k: x + 1), "attention_4d_padded_kv_bf16"),
        (changed(window=lambda x, q, k: (x[0] + 1, x[1])), "attention_local_window"),
        (changed(window=lambda x, q, k: x[::-1]), "attention_bidirectional_window"),
        (changed(softcap=None), "attention_3d_softcap"),
        (changed(scale=None), "attention_4d_scaled"),
        (changed(mask=lambda x, q, k: ~x), "attention_4d_attn_mask_bool"),
        (changed(bias=lambda x, q, k: x.astype(np.float64) * 1.01), "attention_4d_attn_mask"),
    ],
)
def test_a_wrong_attention_fails_the_case_that_is_there_for_it(fault, caught):
    wrong = failing(attention=fault)
    assert caught in wrong
    assert len(wrong) < COUNTS["Attention"]


def test_heads_read_in_another_order_fail_the_grouped_cases():
    def tiled(q, k, v, **given):
        group = q.shape[1] // k.shape[1]
        return core_numpy.attention(q, *(np.tile(x, (1, group, 1, 1)) for x in (k, v)), **given)

    wrong = failing(attention=tiled)
    assert {"attention_4d_gqa", "attention_3d_gqa_with_past_and_present"} <= wrong
    assert all("gqa" in name for name in wrong)


def layer_norm_without_bias(x, weight, bias, *, eps):
    return core_numpy.layer_norm(x, weight, None, eps=eps)


def rms_norm_of_one_eps(x, weight, *, eps):
    return core_numpy.rms_norm(x, weight, eps=1e-5)


def rotary_of_one_layout(x, cos, sin, *, layout):
    return core_numpy.apply_rotary(x, cos, sin)


def rotary_backwards(x, cos, sin, *, layout):
    return core_numpy.apply_rotary(x, cos, -sin, layout=layout)


def gelu_by_tanh(x, *, approximate):
    return core_numpy.gelu(x, approximate="tanh")


def softmax_of_the_last_axis(x, *, axis):
    return core_numpy.softmax(x)


def weights_without_restrictions(q, k, **given):
    return core_numpy.attention_weights(q, k)


def lse_without_restrictions(q, k, v, **given):
    return core_numpy.attention_with_lse(q, k, v)


@pytest.mark.parametrize(
    ("name", "wrong", "caught"),
    [
        ("layer_norm", layer_norm_without_bias, "layer_normalization_2d_axis1"),
        ("rms_norm", rms_norm_of_one_eps, "rms_normalization_3d_axis2_epsilon"),
        ("apply_rotary", rotary_of_one_layout, "rotary_embedding_interleaved"),
        ("apply_rotary", rotary_backwards, "rotary_embedding"),
        ("gelu", gelu_by_tanh, "gelu_default_2"),
        ("softmax", softmax_of_the_last_axis, "softmax_axis_0"),
        ("attention_weights", weights_without_restrictions, "attention_4d_with_qk_matmul_softmax"),
        ("attention_with_lse", lse_without_restrictions, "attention_4d_with_qk_matmul_bias"),
    ],
)
def test_other_wrong_functions_fail_theirs(name, wrong, caught):
    assert caught in failing(**{name: wrong})


def test_the_statistics_of_a_layer_norm_are_those_that_the_target_took():
    def unbiased(x, weight, bias, *, eps):  # divides by n - 1; without weights it stands alone
        if weight is not None:
            return core_numpy.layer_norm(x, weight, bias, eps=eps)
        x = x.astype(np.float64)
        return ((x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True, ddof=1) + eps)).astype(np.float32)

    results = judged(wrap(types.SimpleNamespace(layer_norm=unbiased), "faulty"), pattern="layer_norm")
    assert {r.status for r in results} == {FAILED} and all("InvStdDev" in r.where for r in results)


def test_a_target_with_attention_alone_is_not_offered_the_rest():
    module = types.SimpleNamespace(attention=core_numpy.attention)
    results = judged(wrap(module, "small"))
    absent = {r.case for r in results if r.status == ABSENT}
    assert not any(r.status == FAILED for r in results)
    assert absent == {
        r.case for r in results if r.function != "attention" or "qk_matmul" in r.case or "gqa_rank4" in r.case
    }


def test_a_dtype_that_a_target_lacks_is_not_offered():
    module = types.SimpleNamespace(attention=core_numpy.attention, DTYPES=("float32",))
    statuses = {r.case: r.status for r in judged(wrap(module, "small"), pattern="attention_4d_causal")}
    assert statuses["onnx/test_attention_4d_causal_bf16"] == ABSENT
    assert statuses["onnx/test_attention_4d_causal"] == PASSED


def test_heads_come_apart_and_together_again():
    x = np.arange(12.0).reshape(1, 2, 6)  # T 2, two heads of 3
    apart = onnx_attention.heads_apart(x, 2)
    assert apart[0, 1].tolist() == [[3, 4, 5], [9, 10, 11]]
    assert onnx_attention.heads_together(apart).tolist() == x.tolist()


def test_restrictions_in_the_words_of_attention():
    inputs = {"attn_mask": np.array([True, False, True]), "nonpad_kv_seqlen": np.array([5, 4])}
    limits = onnx_attention.restrictions({**ATTRIBUTES, "is_causal": 1, "left_window_size": 0}, inputs, T=2, S=5)
    assert limits["mask"].tolist() == [[True, False, True, False, False]]  # ends early: False; rank 1: for every row
    assert limits["q_offset"].tolist() == [3, 2] and limits["kv_lengths"].tolist() == [5, 4]
    assert limits["window"] == (0, None) and limits["causal"] is True
    past = onnx_attention.restrictions({**ATTRIBUTES, "is_causal": 1}, {"past_key": np.zeros((1, 1, 3, 2))}, T=2, S=5)
    assert past == {"causal": True, "q_offset": 3}
    bias = onnx_attention.restrictions(ATTRIBUTES, {"attn_mask": np.zeros((3, 2, 4), np.float32)}, T=2, S=5)["bias"]
    assert bias.shape == (1, 3, 2, 5) and bias.dtype == np.float32  # rank 3 is heads, not batch
    assert np.isneginf(bias[..., 4]).all() and not bias[..., :4].any()


@pytest.mark.parametrize("capped", [False, True])
def test_scores_read_key_by_key_are_those_of_the_formula(capped):
    q, k = RNG.standard_normal((2, 4, 3, 5)), RNG.standard_normal((2, 2, 6, 5))
    bias, mask = RNG.standard_normal((1, 4, 3, 6)), RNG.random((3, 6)) < 0.7
    limits = {"bias": bias, "mask": mask, "causal": True, "window": (3, None), "q_offset": np.array([2, -1], np.int32),
              "kv_lengths": np.array([6, 2], np.int32)}  # fmt: skip
    how = {"scale": 0.7} | ({"softcap": 1.5} if capped else {})
    want = 0.7 * np.einsum("bhtd,bhsd->bhts", q, np.repeat(k, 2, axis=1))
    want = 1.5 * np.tanh(want / 1.5) if capped else want
    np.testing.assert_allclose(onnx_attention.scores(q, k, {}, how, call), want, rtol=1e-13)
    at = np.array([2, -1])[:, None, None, None] + np.arange(3)[:, None]
    j = np.arange(6)
    seen = mask & (j <= at) & (at - j <= 3) & (j < np.array([6, 2])[:, None, None, None])
    masked = np.where(seen, want + bias, -np.inf)
    got = onnx_attention.scores(q, k, limits, how, call)
    assert np.isneginf(got).any() and np.isfinite(got).any()
    np.testing.assert_allclose(got, masked, rtol=1e-13)


def test_an_output_that_is_off_by_more_than_onnx_allows_fails():
    case = next(case for case in onnx_nodes.cases() if case.id == "onnx/test_gelu_default_1")
    for factor, right in ((1.0009, True), (1.0011, False)):
        tally = Tally()
        onnx_nodes._compare(tally, case, {"Y": (case.wanted["Y"] * np.float32(factor))})
        assert (tally.share <= 1.0) is right


def test_collecting_the_cases_leaves_numpys_generator_alone():
    np.random.seed(11)
    want = np.random.rand()
    np.random.seed(11)
    onnx_nodes._load.__wrapped__()
    assert np.random.rand() == want


def test_the_command_runs_the_suite(tmp_path, capsys):
    path = tmp_path / "result.json"
    assert command_line.main(["run", "core_numpy", "--suite", "onnx", "--case", "attention", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["suite"] == "onnx"
    assert document["targets"]["core_numpy"]["counts"]["passed"] >= COUNTS["Attention"]
    assert f"{document['targets']['core_numpy']['counts']['passed']} passed, 0 failed" in capsys.readouterr().out


def test_without_onnx_the_command_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.delitem(sys.modules, "conformance.suites.onnx_nodes")
    assert command_line.main(["run", "core_numpy", "--suite", "onnx"]) == 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "attention-conformance[peers]" in said


def test_an_unknown_suite_is_a_wrong_command_line(capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main(["run", "--suite", "onyx"])
    assert ended.value.code == 2 and "onnx" in capsys.readouterr().err


def test_every_operator_has_a_translation_that_names_a_public_function():
    assert list(onnx_operators.OPERATORS) == list(COUNTS)
    assert all(callable(getattr(core_numpy, operator.function)) for operator in onnx_operators.OPERATORS.values())
