"""Diagnosis: what is wrong with a target is named, also where the target is no member of the zoo."""

import json
import types

import numpy as np
import pytest

import core_numpy
from conformance.diagnose import main, named_rightly, rows_of, score_zoo
from conformance.guesses import Bench, diagnose, evidence
from conformance.memory import remembering
from conformance.targets.protocol import Target
from conformance.zoo import all_faults

SPREAD = ("causal-end", "window-counts-keys", "heads-tiled", "mask-inverted", "cap-after-bias", "gelu-tanh-always",
          "rotary-other-layout", "alibi-closed-form", "loss-smoothing-others", "layer-norm-n-less-one")  # fmt: skip


def first_guess(module, pattern=None):
    target = Target(module, "outside")
    with remembering():
        return diagnose(target, rows_of(target, "quick", pattern), Bench())


def outside(**functions):
    """A target that is not the zoo's: written another way, in float32 where it may."""
    return types.SimpleNamespace(**functions)


def plain_attention(visible):
    """Attention in few lines, float32 for half types, with a visibility of its own: visible(T, S, q_offset)."""

    def attention(q, k, v, *, causal=False, q_offset=None):
        wide = np.float64 if q.dtype == np.float64 else np.float32
        heads = q.shape[-3] // k.shape[-3] if q.ndim > 2 else 1
        k, v = (np.repeat(x, heads, axis=-3).astype(wide) if x.ndim > 2 else x.astype(wide) for x in (k, v))
        s = np.einsum("...td,...sd->...ts", q.astype(wide), k) * wide(q.shape[-1] ** -0.5)
        if causal:
            s = np.where(visible(s.shape[-2], s.shape[-1], q_offset or 0), s, -np.inf)
        e = np.exp(s - np.maximum(s.max(-1, keepdims=True, initial=-np.inf), -1e30))
        p = e / np.maximum(e.sum(-1, keepdims=True), 1e-30)
        return np.einsum("...ts,...sd->...td", p, v).astype(q.dtype)

    return attention


def test_a_causal_mask_aligned_bottom_right_is_named():
    module = outside(attention=plain_attention(lambda T, S, offset: np.tri(T, S, S - T, dtype=bool)))
    guess = first_guess(module, "attention")[0]
    assert guess.fault.id == "causal-end" and guess.contradicted == ()
    said = f"{guess.fault.diagnosis}. {evidence(guess)}"
    assert said.startswith("your causal mask is aligned bottom-right; the contract is j <= i + q_offset.")
    assert guess.share < 1 < guess.away


def test_an_ignored_offset_is_named():
    module = outside(attention=plain_attention(lambda T, S, offset: np.tri(T, S, dtype=bool)))
    assert first_guess(module, "attention")[0].fault.id == "causal-top-left"


def test_a_right_attention_has_nothing_to_diagnose():
    module = outside(attention=plain_attention(lambda T, S, offset: np.tri(T, S, offset, dtype=bool)))
    assert first_guess(module, "attention") == []


def filled_attention(q, k, v, *, mask=None):
    """Scores of masked pairs get a large negative number; gradients follow, as by autograd."""
    out, _ = _filled(q, k, v, mask)
    return out.astype(q.dtype)


def _filled(q, k, v, mask):
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    s = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    s = s if mask is None else np.where(mask, s, -1e9)
    e = np.exp(s - s.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    return p @ v, p


def filled_attention_vjp(grad, q, k, v, *, mask=None):
    out, p = _filled(q, k, v, mask)
    wide = np.asarray(grad, dtype=np.float64)
    ds = p * (wide @ np.swapaxes(np.asarray(v, dtype=np.float64), -1, -2) - (wide * out).sum(-1, keepdims=True))
    ds = (ds if mask is None else np.where(mask, ds, 0.0)) / np.sqrt(q.shape[-1])
    found = {"q": ds @ k.astype(np.float64), "k": np.swapaxes(ds, -1, -2) @ q.astype(np.float64)}
    found["v"] = np.swapaxes(p, -1, -2) @ wide
    return {name: x.astype(q.dtype) for name, x in found.items()}


def test_a_fault_of_the_result_is_named_where_gradients_follow_it():
    gradients = types.SimpleNamespace(attention_vjp=filled_attention_vjp)
    module = outside(attention=filled_attention, gradients=gradients)
    target = Target(module, "outside")
    with remembering():
        judged = rows_of(target, "quick", "attention-mask-2d") + rows_of(target, "quick", "dead-row")
        guess = diagnose(target, judged, Bench())[0]
    assert guess.fault.id == "dead-row-mean" and "attention-dead-row-gradient" in guess.explained


def test_half_arithmetic_is_named_by_what_it_costs_in_half_types_alone():
    from conformance.targets.peers.roundings import Plain

    module = outside(attention=Plain("all").attention, DTYPES=("float32", "bfloat16", "float16"))
    guess = first_guess(module, "attention-half")[0]
    assert guess.fault.id == "half-arithmetic" and "attention-half-sum" in guess.explained
    assert "times their budgets in a half type alone" in evidence(guess)


def test_a_fault_beside_half_arithmetic_is_named_too():
    """As of a port that takes another library's default GELU: the tanh form, every step in the half type."""

    def gelu(x, *, approximate="none"):
        c, half, one = (x.dtype.type(number) for number in (0.7978845608028654, 0.5, 1.0))
        return half * x * (one + np.tanh(c * (x + x.dtype.type(0.044715) * x * x * x)))

    first, second = first_guess(outside(gelu=gelu), "gelu")
    assert (first.fault.id, second.fault.id) == ("gelu-tanh-always", "half-arithmetic")


def test_a_fault_of_a_model_is_named():
    class Transformer(core_numpy.Transformer):
        def __init__(self, config, **more):
            super().__init__(config, **more)
            self.config = config.replace(logit_scale=None)

    names = ("ModelConfig", "get_params", "set_params", "loss_and_gradients", "key")
    module = outside(Transformer=Transformer, **{name: getattr(core_numpy, name) for name in names})
    assert first_guess(module, "model-relative")[0].fault.id == "model-logit-scale"


def test_a_fault_of_training_is_named():
    class Trainer(core_numpy.Trainer):
        def __init__(self, model, config, **more):
            super().__init__(model, config.replace(clip_norm=None), **more)

    names = ("ModelConfig", "TrainConfig", "Transformer", "get_params", "set_params")
    module = outside(Trainer=Trainer, **{name: getattr(core_numpy, name) for name in names})
    assert first_guess(module, "training-one-step")[0].fault.id == "clip-ignored"


def test_two_faults_of_different_functions_are_both_named():
    def gelu(x, *, approximate="none"):
        wide = x.astype(np.float64)
        y = 0.5 * wide * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (wide + 0.044715 * wide**3)))
        return y.astype(x.dtype)

    def rms_norm(x, weight, *, eps, unit_offset=False):
        return core_numpy.rms_norm(x, weight, eps=eps, unit_offset=False)

    guesses = first_guess(outside(gelu=gelu, rms_norm=rms_norm))
    assert {guess.fault.id for guess in guesses} == {"gelu-tanh-always", "rms-norm-offset-forgotten"}


def test_three_faults_of_one_function_are_all_named():
    """A window that counts keys, lengths and a mask whose polarity is exchanged; none explains half of what fails."""

    def attention(q, k, v, *, mask=None, causal=False, window=None, q_offset=None, kv_lengths=None):
        if q.ndim != 4:
            raise NotImplementedError("one batch axis")
        if window is not None and window[0] is not None:
            window = (max(window[0] - 1, 0), window[1])
        mask = None if mask is None else ~mask
        if kv_lengths is not None:
            mask = core_numpy.combine_masks(mask, ~core_numpy.padding_mask(kv_lengths, k.shape[-2]))
        return core_numpy.attention(q, k, v, causal=causal, window=window, q_offset=q_offset, mask=mask)

    guesses = first_guess(outside(attention=attention), "attention")
    assert sorted(guess.fault.id for guess in guesses) == ["length-inverted", "mask-inverted", "window-counts-keys"]


def test_a_fault_is_named_beside_cases_in_which_the_target_raises():
    def apply_rotary(x, cos, sin, *, layout="half"):
        if cos.ndim != 2 or 2 * cos.shape[-1] != x.shape[-1] or x.dtype != np.float64:
            raise TypeError("float64 and one table of half the columns, please")
        return core_numpy.apply_rotary(x, cos, sin, layout="interleaved")

    guess = first_guess(outside(apply_rotary=apply_rotary), "apply-rotary")[0]
    assert guess.fault.id == "rotary-other-layout"


def test_what_no_fault_explains_is_not_explained():
    assert first_guess(outside(silu=lambda x: np.sqrt(np.abs(x)))) == []


def test_a_sample_of_the_zoo_is_named_rightly():
    found = score_zoo([fault for fault in all_faults() if fault.id in SPREAD])
    assert sorted(named_rightly(found)) == sorted(SPREAD)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nine_in_ten_of_the_zoo_are_named_rightly():
    found = score_zoo()
    right = set(named_rightly(found))
    # Those that only fail to refuse cannot be named; they count.
    assert len(right) >= 0.9 * len(all_faults()), sorted(fault.id for fault, _ in found if fault.id not in right)


def test_the_command_says_what_is_wrong(tmp_path, monkeypatch, capsys):
    (tmp_path / "wrong_norm.py").write_text(
        "import core_numpy\ndef rms_norm(x, weight, *, eps, unit_offset=False):\n"
        "    return core_numpy.rms_norm(x, weight, eps=eps)\n"
    )
    (tmp_path / "right_norm.py").write_text("from core_numpy import rms_norm\n")
    monkeypatch.chdir(tmp_path)
    assert main(["wrong_norm", "--case", "rms_norm"]) == 1
    assert "1. unit_offset is ignored; the contract multiplies by 1 + weight." in capsys.readouterr().out
    assert main(["right_norm", "--case", "rms_norm"]) == 0
    assert "nothing to diagnose" in capsys.readouterr().out
    with pytest.raises(ValueError, match="offers nothing"):
        main(["right_norm", "--case", "softmax"])


def test_a_target_that_hangs_dies_or_stops_the_interpreter_is_diagnosed_on_its_other_cases(
    tmp_path, monkeypatch, capfd
):
    (tmp_path / "unsteady.py").write_text(
        "import os, sys, time\nimport core_numpy\ndef silu(x):\n    time.sleep(1000)\ndef relu(x):\n    os._exit(7)\n"
        "def softmax(x, *, axis=-1):\n    sys.exit(3)\ndef gelu(x, *, approximate='none'):\n"
        "    return core_numpy.gelu(x, approximate='tanh')\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["unsteady", "--case", "lu", "--timeout", "2", "--json", "found.json"]) == 1
    out, error = capfd.readouterr()
    assert "1. approximate" in out or "tanh" in out.splitlines()[0]
    assert "no known fault explains silu, relu" in out
    assert "silu: its process gave no answer within 2 seconds and was ended" in error
    assert "relu: its process died (exit code 7)" in error
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["unexplained"] == ["silu", "relu"] and found["guesses"][0]["fault"] == "gelu-tanh-always"
    assert main(["unsteady", "--case", "softmax-axis"]) == 1
    assert "no known fault explains softmax-axis" in capfd.readouterr().out
