"""Torch attention alone: `kernel="auto"` against the fastest that stock torch offers for the same meaning.

    python -m conformance.race.attention_torch [lengths ...] [--case TEXT] [--json FILE]

Against `F.scaled_dot_product_attention` where it has the arguments, and against the formula written out as a user
would write it, with masks and tables made once, outside of the clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from .alone import HEADS, MODES, OURS, SIZE, Row, command, run, take_turns

WINDOW = 256


@dataclass(frozen=True)
class Case:
    """One meaning: arguments of `attention`, and stock torch's ways to say it, each from (q, k, v) to out.

    make: length -> (arguments, ways). queries: None for as many as keys. decode has no backward pass worth a figure.
    """

    make: Callable[[int], tuple[dict[str, Any], dict[str, Callable[..., Any]]]]
    kv_heads: int = HEADS
    queries: int | None = None
    shortest: int = 1

    @property
    def modes(self) -> tuple[str, ...]:
        return MODES if self.queries is None else MODES[:1]


def _sdpa(**arguments: Any) -> Callable[..., Any]:
    import torch.nn.functional as F

    return partial(F.scaled_dot_product_attention, **arguments)


def _random(*shape: int) -> Any:
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _future(length: int) -> Any:
    """0 up to the query's own place, -inf after it."""
    import torch

    return torch.zeros(length, length).masked_fill_(~torch.ones(length, length, dtype=torch.bool).tril_(), -math.inf)


def _kept(length: int) -> Any:
    """The padding mask of three quarters of the keys."""
    import torch

    return (torch.arange(length) < length * 3 // 4)[None, None, None]


def _lengths(length: int) -> tuple[dict[str, Any], dict[str, Callable[..., Any]]]:
    import torch

    return {"kv_lengths": torch.tensor([length * 3 // 4])}, {"sdpa": _sdpa(attn_mask=_kept(length))}


def _window(length: int) -> tuple[dict[str, Any], dict[str, Callable[..., Any]]]:
    import torch

    at = torch.arange(length)
    band = (at <= at[:, None]) & (at >= at[:, None] - WINDOW)
    return {"window": (WINDOW, 0)}, {"sdpa": _sdpa(attn_mask=band)}


def _bias(length: int) -> tuple[dict[str, Any], dict[str, Callable[..., Any]]]:
    bias = _random(1, HEADS, length, length)
    return {"bias": bias}, {"sdpa": _sdpa(attn_mask=bias)}


def _learned(length: int) -> tuple[dict[str, Any], dict[str, Callable[..., Any]]]:
    import torch

    bias = _random(1, HEADS, length, length).requires_grad_()

    def written(q: Any, k: Any, v: Any) -> Any:
        return torch.softmax(torch.baddbmm(bias[0], q[0], k[0].mT, alpha=1 / math.sqrt(SIZE)), -1) @ v

    return {"bias": bias}, {"sdpa": _sdpa(attn_mask=bias), "written": written}


def _capped(length: int) -> tuple[dict[str, Any], dict[str, Callable[..., Any]]]:
    import torch

    future = _future(length)

    def written(q: Any, k: Any, v: Any) -> Any:
        scores = 30.0 * torch.tanh((q @ k.mT) / math.sqrt(SIZE) / 30.0)
        return torch.softmax(scores + future, -1) @ v

    return {"causal": True, "softcap": 30.0}, {"written": written}


def _sinks(length: int) -> tuple[dict[str, Any], dict[str, Callable[..., Any]]]:
    import torch
    import torch.nn.functional as F

    future, sinks = _future(length), _random(HEADS)

    def sdpa(q: Any, k: Any, v: Any) -> Any:
        # A key of zeros whose bias is the sink and whose value is zero: stock torch's fused way to say a sink.
        extra = F.pad(future[None, None].expand(1, HEADS, -1, -1), (0, 1))
        extra[..., -1] = sinks[:, None]
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=extra)

    def written(q: Any, k: Any, v: Any) -> Any:
        scores = (q @ k.mT) / math.sqrt(SIZE) + future
        scores = torch.cat([scores, sinks[:, None, None].expand(1, HEADS, length, 1)], -1)
        return torch.softmax(scores, -1)[..., :-1] @ v

    return {"causal": True, "sinks": sinks}, {"sdpa": sdpa, "written": written}


CASES = {
    "full": Case(lambda n: ({}, {"sdpa": _sdpa()})),
    "causal": Case(lambda n: ({"causal": True}, {"sdpa": _sdpa(is_causal=True)})),
    "causal, grouped 8:2": Case(lambda n: ({"causal": True}, {"sdpa": _sdpa(is_causal=True, enable_gqa=True)}), 2),
    "padding mask": Case(lambda n: ({"mask": _kept(n)}, {"sdpa": _sdpa(attn_mask=_kept(n))})),
    "kv_lengths": Case(_lengths),
    "bias": Case(_bias),
    "learned bias": Case(_learned),
    f"window {WINDOW}": Case(_window),
    "soft cap, causal": Case(_capped),
    "sinks, causal": Case(_sinks),
    "decode": Case(lambda n: ({}, {"sdpa": _sdpa()}), queries=1, shortest=256),
    "decode, grouped 8:2": Case(lambda n: ({}, {"sdpa": _sdpa(enable_gqa=True)}), 2, queries=1, shortest=256),
}


def chosen(lengths: list[int], texts: list[str] | None) -> list[tuple[str, int, str]]:
    """(case, length, mode) of what is asked."""
    return [
        (name, length, mode)
        for length in lengths
        for name, case in CASES.items()
        if length >= case.shortest and (not texts or any(text in name for text in texts))
        for mode in case.modes
    ]


def measure(name: str, length: int, mode: str, seconds: float) -> Row:
    """Time one case, after the results have been seen to agree."""
    import torch

    from backend_torch import attention

    case = CASES[name]
    arguments, stock = case.make(length)
    generator = torch.Generator().manual_seed(1)
    queries = case.queries or length
    q, upstream = (torch.randn(1, HEADS, queries, SIZE, generator=generator) for _ in range(2))
    k, v = (torch.randn(1, case.kv_heads, length, SIZE, generator=generator) for _ in range(2))
    ours: Callable[..., Any] = attention
    ways = {OURS: partial(ours, **arguments)} | stock
    with torch.no_grad():
        expected = ways[OURS](q, k, v)
        for way, compute in stock.items():
            off = (compute(q, k, v) - expected).abs().max().item()
            if not off <= 1e-4:
                raise ValueError(f"{name}: {way} is off by {off:.2g}, so it is not the same work")
    leaves = [x.requires_grad_(mode == "both") for x in (q, k, v)]
    learned = [x for x in arguments.values() if isinstance(x, torch.Tensor) and x.requires_grad]

    def turn(way: Callable[..., Any]) -> None:
        if mode == "forward":
            with torch.no_grad():
                way(*leaves)
            return
        for x in (*leaves, *learned):
            x.grad = None
        way(*leaves).backward(upstream)

    medians, turns = take_turns({way: partial(turn, compute) for way, compute in ways.items()}, seconds)
    return Row(name, length, mode, medians, turns)


def rows(asked: Any) -> Iterator[Row]:
    """Measurements, as they are made."""
    import torch

    torch.set_num_threads(asked.threads)
    for name, length, mode in chosen(asked.lengths, asked.case):
        yield measure(name, length, mode, asked.seconds)


def main(arguments: list[str] | None = None) -> int:
    """Print the table of ratios."""
    asked = command(__doc__, "attention_torch", CASES, arguments)
    return run(rows(asked), len(chosen(asked.lengths, asked.case)), asked, "torch")


if __name__ == "__main__":
    raise SystemExit(main())
