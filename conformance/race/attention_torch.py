"""Torch attention alone: `kernel="auto"` against the fastest that stock torch offers for the same meaning.

Run as `python -m conformance.race.attention_torch [length] [rounds]`. Contestants of a case take turns, so a machine's
moods meet all of them; the figure is the ratio of medians. Results are compared before the clock runs.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Q = (1, 8, 64)  # batch, heads, head size


@dataclass(frozen=True)
class Case:
    """One meaning: our call, and stock torch's ways to say it, each from (q, k, v) to out."""

    name: str
    kv_heads: int
    ours: Callable[..., Any]
    stock: dict[str, Callable[..., Any]]


def cases(length: int) -> list[Case]:
    """The cases at one length; scores are written out where stock torch has no other way."""
    import torch
    import torch.nn.functional as F

    from backend_torch.attention import attention

    _, H, D = Q
    generator = torch.Generator().manual_seed(0)
    sdpa = F.scaled_dot_product_attention
    at = torch.arange(length)
    padding = (at < length * 3 // 4)[None, None, None]
    lengths = torch.tensor([length * 3 // 4])
    band = (at <= at[:, None]) & (at >= at[:, None] - 256)
    bias = torch.randn(1, H, length, length, generator=generator)
    learned = bias.clone().requires_grad_()
    sinks = torch.randn(H, generator=generator)
    future = torch.zeros(length, length).masked_fill_(at > at[:, None], -math.inf)

    def capped(q, k, v):
        scores = 30.0 * torch.tanh((q @ k.mT) / math.sqrt(D) / 30.0)
        return torch.softmax(scores + future, -1) @ v

    def sunk(q, k, v):
        # A key of zeros whose bias is the sink and whose value is zero: stock torch's fused way to say a sink.
        extra = F.pad(future[None, None].expand(1, H, -1, -1), (0, 1))
        extra[..., -1] = sinks[:, None]
        return sdpa(q, F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), attn_mask=extra)

    def written_bias(q, k, v):
        return torch.softmax(torch.baddbmm(learned[0], q[0], k[0].mT, alpha=1 / math.sqrt(D)), -1) @ v

    return [
        Case("full", H, lambda q, k, v: attention(q, k, v), {"sdpa": sdpa}),
        Case(
            "causal",
            H,
            lambda q, k, v: attention(q, k, v, causal=True),
            {"sdpa": lambda q, k, v: sdpa(q, k, v, is_causal=True)},
        ),
        Case(
            "grouped causal",
            2,
            lambda q, k, v: attention(q, k, v, causal=True),
            {"sdpa": lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True)},
        ),
        Case(
            "padding mask",
            H,
            lambda q, k, v: attention(q, k, v, mask=padding),
            {"sdpa": lambda q, k, v: sdpa(q, k, v, attn_mask=padding)},
        ),
        Case(
            "key lengths",
            H,
            lambda q, k, v: attention(q, k, v, kv_lengths=lengths),
            {"sdpa": lambda q, k, v: sdpa(q, k, v, attn_mask=padding)},
        ),
        Case(
            "bias",
            H,
            lambda q, k, v: attention(q, k, v, bias=bias),
            {"sdpa": lambda q, k, v: sdpa(q, k, v, attn_mask=bias)},
        ),
        Case(
            "learned bias",
            H,
            lambda q, k, v: attention(q, k, v, bias=learned),
            {"sdpa": lambda q, k, v: sdpa(q, k, v, attn_mask=learned), "written out": written_bias},
        ),
        Case(
            "window 256",
            H,
            lambda q, k, v: attention(q, k, v, window=(256, 0)),
            {"sdpa": lambda q, k, v: sdpa(q, k, v, attn_mask=band)},
        ),
        Case(
            "soft cap causal", H, lambda q, k, v: attention(q, k, v, causal=True, softcap=30.0), {"written out": capped}
        ),
        Case("sinks causal", H, lambda q, k, v: attention(q, k, v, causal=True, sinks=sinks), {"sdpa": sunk}),
    ]


def measure(length: int, rounds: int) -> Iterator[tuple[str, str, dict[str, float]]]:
    """(case, "forward" or "both", contestant -> median seconds), after the results have been seen to agree."""
    import torch

    B, H, D = Q
    generator = torch.Generator().manual_seed(1)
    for case in cases(length):
        q, upstream = (torch.randn(B, H, length, D, generator=generator) for _ in range(2))
        k, v = (torch.randn(B, case.kv_heads, length, D, generator=generator) for _ in range(2))
        ways = {"ours": case.ours} | case.stock
        for name, way in ways.items():
            off = (way(q, k, v) - case.ours(q, k, v)).abs().max().item()
            if not off <= 1e-4:
                raise ValueError(f"{case.name}: {name} is off by {off:.2g}, so it is not the same work")
        for mode in ("forward", "both"):
            leaves = [x.requires_grad_(mode == "both") for x in (q, k, v)]

            def run(way, leaves=leaves, mode=mode, upstream=upstream):
                if mode == "forward":
                    with torch.no_grad():
                        way(*leaves)
                    return
                for x in leaves:
                    x.grad = None
                way(*leaves).backward(upstream)

            times: dict[str, list[float]] = {name: [] for name in ways}
            for turn in range(rounds + 1):
                for name, way in ways.items():
                    start = time.perf_counter()
                    run(way)
                    if turn:  # the first is the warm-up
                        times[name].append(time.perf_counter() - start)
            yield case.name, mode, {name: statistics.median(x) for name, x in times.items()}


def main(arguments: list[str] | None = None) -> int:
    """Print a table: our median, each stock way's, and the ratio of ours to the best of them."""
    words = sys.argv[1:] if arguments is None else arguments
    length, rounds = (int(words[0]) if words else 2048), (int(words[1]) if len(words) > 1 else 7)
    print(f"length {length}, batch, heads, size {Q}, float32, median of {rounds} turns")
    for name, mode, medians in measure(length, rounds):
        best = min(value for way, value in medians.items() if way != "ours")
        spelled = "  ".join(f"{way} {value * 1e3:8.2f} ms" for way, value in medians.items())
        print(f"{name:16s} {mode:8s} ratio {medians['ours'] / best:5.2f}   {spelled}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
