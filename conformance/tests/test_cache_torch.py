"""What a decoding step of torch does by shorter ways is what it does otherwise."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import backend_torch as B  # noqa: E402
from backend_torch import block as block_file  # noqa: E402
from backend_torch.turning import Tables, turned  # noqa: E402

BASE = {"vocab": 17, "width": 24, "heads": 6, "kv_heads": 2, "layers": 2, "max_length": 16, "positions": "rotary"}
# Name: the configuration, and whether its steps take the short way.
CASES = {
    "grouped": ({}, True),
    "ring": ({"window": (3, 0)}, True),
    "bias": ({"attention_bias": True, "head_dim": 6}, True),
    "partial": ({"rotary_dim": 2}, False),
    "interleaved": ({"rotary_layout": "interleaved"}, False),
    "normalised": ({"qk_norm": True}, False),
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_steps_with_a_cache_are_the_full_pass(name, dtype, monkeypatch):
    fields, short = CASES[name]
    taken = []
    monkeypatch.setattr(block_file, "turned", lambda *given: taken.append(1) or turned(*given))
    model = B.Transformer(B.ModelConfig(**BASE, **fields), seed=3, dtype=dtype).eval()
    tokens = torch.randint(0, 17, (3, 9), generator=torch.Generator().manual_seed(0))
    tolerance = {"float32": 1e-5, "float64": 1e-13, "bfloat16": 3e-2}[dtype]
    with torch.no_grad():
        want = model(tokens)
        cache = B.KVCache(model.config, 3, 12, dtype=dtype)
        got = [model(tokens[:, :4], cache=cache)]
        assert taken == []
        got += [model(tokens[:, n : n + 1], cache=cache) for n in range(4, 9)]
    assert (torch.cat(got, 1) - want).abs().max() < tolerance * want.abs().max()
    # Half types compute in float32, for which the tables of the short way would have to be rounded.
    assert len(taken) == (5 * 2 if short and dtype != "bfloat16" else 0)


def test_gradients_go_through_a_step_as_through_the_formula():
    q, k = torch.randn(2, 1, 24, dtype=torch.float64), torch.randn(2, 1, 8, dtype=torch.float64)
    cos, sin = B.rotary_tables(torch.tensor([5]), B.rotary_frequencies(4)[0])
    weight = torch.randn(2, 8, 1, 4, dtype=torch.float64)
    found = []
    for rotate in (
        lambda q, k: torch.cat(turned(q, k, Tables.of(cos, sin)), 1),
        lambda q, k: B.apply_rotary(torch.cat([q, k], -1).unflatten(2, (-1, 4)).transpose(1, 2), cos, sin),
    ):
        leaves = [x.clone().requires_grad_() for x in (q, k)]
        y = rotate(*leaves)
        (y * weight).sum().backward()
        found.append([y.detach(), *(x.grad for x in leaves)])
    for got, want in zip(*found, strict=True):
        assert (got - want).abs().max() < 1e-14 * want.abs().max() and want.abs().max() > 0.1
