"""Attention in torch: refusals, the choice of a kernel, arrays."""

from __future__ import annotations

import inspect
import re
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from backend_torch.arrays import describe, from_numpy, to_numpy, values, wait  # noqa: E402
from backend_torch.attention import (  # noqa: E402
    attention,
    attention_with_lse,
    available_kernels,
    explain_kernel,
)
from conformance.tests import refusals_attention as refusals  # noqa: E402
from conformance.tests.torch_attention import as_tensors, qkv  # noqa: E402

# The keyword arguments of `attention` in their order.
DEFAULTS = {name: p.default for name, p in inspect.signature(attention).parameters.items() if name not in "qkv"}

# --- refusals ---


@pytest.mark.parametrize(
    ("arguments", "exception", "phrase"), [r[1:] for r in refusals.ROWS], ids=[r[0] for r in refusals.ROWS]
)
def test_what_the_contract_refuses_is_refused_with_its_sentence(arguments, exception, phrase):
    keywords = as_tensors(arguments())
    with pytest.raises(exception, match=re.escape(phrase)):
        attention(keywords.pop("q"), keywords.pop("k"), keywords.pop("v"), **keywords)


# --- kernels ---


def test_a_kernel_that_cannot_serve_says_why():
    q, k, v = qkv()
    for keywords, phrase in (
        ({"softcap": 1.0}, "soft cap"),
        ({"sinks": torch.zeros(4)}, "sinks"),
        ({"dropout_rate": 0.1, "dropout_key": torch.tensor([0, 1])}, "dropout"),
    ):
        with pytest.raises(ValueError, match=f"kernel='sdpa' cannot serve.*{phrase}"):
            attention(q, k, v, **keywords, kernel="sdpa")
    bias = torch.zeros(5, 7, requires_grad=True)
    with pytest.raises(ValueError, match=r"kernel='sdpa' cannot serve.*gradient for a bias"):
        attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), bias=bias, kernel="sdpa")
    with pytest.raises(ValueError, match=r"kernel='flex' cannot serve.*CUDA"):
        attention(q, k, v, kernel="flex")
    with pytest.raises(ValueError, match="kernel must be one of"):
        attention(q, k, v, kernel="fast")


def test_explanation_has_one_sentence_per_kernel_and_one_choice():
    q, k, v = qkv()
    text = explain_kernel(q, k, v, softcap=1.0)
    assert len(text.splitlines()) == len(available_kernels())
    assert text.count("is chosen") == 1
    assert "sdpa cannot serve: torch's fused kernels have no soft cap." in text


def test_the_choice_skips_what_a_narrow_band_leaves_out():
    q, k, v = qkv(B=1, T=2048, S=2048, D=2, Dv=2)
    assert "sdpa is chosen" in explain_kernel(q, k, v, causal=True)
    assert "blockwise is chosen" in explain_kernel(q, k, v, window=(256, 0))
    assert "sdpa is chosen" in explain_kernel(q, k, v, kv_lengths=torch.tensor([5]))  # one length: cut off
    q, k, v = qkv(B=2, T=2048, S=2048, D=2, Dv=2)
    assert "blockwise is chosen" in explain_kernel(q, k, v, kv_lengths=torch.tensor([5, 9]))


def test_a_learned_bias_takes_the_formula_where_scores_are_few_and_ours_where_they_would_fill_memory():
    for length, chosen in ((64, "dense"), (2048, "blockwise")):
        q, k, v = qkv(B=1, T=length, S=length, D=2, Dv=2)
        bias = torch.zeros(length, length, requires_grad=True)
        assert f"{chosen} is chosen" in explain_kernel(q, k, v, bias=bias)


def test_flex_conditions_mean_what_the_formula_means():
    from torch.nn.attention.flex_attention import flex_attention

    from backend_torch.attention import _asked
    from backend_torch.flex import flex

    torch._dynamo.reset()
    q, k, v = (x.detach() for x in qkv(D=16, Dv=16, dtype=torch.float32))
    ids = torch.tensor([[0, 0, 1, 1, -1, 2, 2], [0, 1, 1, 1, 1, 1, -1]])
    for keywords in (
        {"causal": True, "q_offset": 2, "softcap": 2.0, "sinks": torch.linspace(-1, 1, 4)},
        {"window": (2, 1), "q_offset": torch.tensor([0, 3])},
        {"kv_lengths": torch.tensor([3, 7])},
        {"q_segments": ids[:, 1:6], "kv_segments": ids},
    ):
        options = tuple((DEFAULTS | keywords).values())
        call, _ = _asked(q, k, v, True, options)
        with warnings.catch_warnings():  # not compiled, FlexAttention runs as written, and warns once that it is slow
            warnings.filterwarnings("ignore", message=".*flex_attention.*")
            out, lse = flex(call, flex_attention)
        expected = attention_with_lse(q, k, v, **keywords, kernel="dense")
        torch.testing.assert_close(out, expected[0])
        torch.testing.assert_close(lse, expected[1])


# --- arrays ---


def test_arrays_pass_bit_for_bit_and_are_copies():
    import ml_dtypes

    for x in (np.arange(6.0).reshape(2, 3).T, np.array([1, -1], np.int32), np.array(2.5, np.float16), np.array([True])):
        back = to_numpy(from_numpy(x))
        assert back.dtype == x.dtype
        np.testing.assert_array_equal(back, x)
    brain = np.array([1, 1.0078125, 3.39e38, -0.0, np.nan], dtype=ml_dtypes.bfloat16)
    tensor = from_numpy(brain)
    assert tensor.dtype == torch.bfloat16
    np.testing.assert_array_equal(to_numpy(tensor).view(np.int16), brain.view(np.int16))
    source = np.zeros(2)
    copy = from_numpy(source, dtype="float32")
    copy += 1
    assert not source.any()
    assert copy.dtype == torch.float32


def test_values_are_read_where_reading_costs_nothing():
    assert values(torch.tensor([1, 2])).tolist() == [1, 2]
    assert values(torch.tensor([0.5], dtype=torch.bfloat16, requires_grad=True)).tolist() == [0.5]
    assert values(torch.zeros(2, device="meta")) is None
    # Memory that is read is not pinned: `fully_shard` gives that of a parameter back, under whatever view it is seen.
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        x = torch.ones(4, dtype=dtype)
        assert values(x[1:]).tolist() == [1.0] * 3 and x.untyped_storage().resizable()
    seen = []
    torch.func.vmap(lambda x: seen.append(values(x)) or x)(torch.zeros(2, 3))
    assert seen == [None]
    assert describe()["framework"] == "torch"
    assert wait({"a": [torch.zeros(1)]})["a"][0] == 0
