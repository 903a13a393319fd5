"""Self-attention whose queries and keys are spread over processes: each has some pieces of every row.

Keys and values go round, and each process adds what its queries find in them:

    out, lse = merge(attention_with_lse(q_a, k_b, v_b) for every piece b)
    d out_b = w_b d out,   d lse_b = w_b (d out . out_b - d out . out),   w_b = exp(lse_b - lse)

The backward pass lets the keys go round once more and computes each block again, so that no process ever holds more
than two processes' keys. Where causality or a window hides one process's keys from another, nothing is sent: with a
window only neighbours talk. Source: Liu et al. 2023 (arXiv:2310.01889); pieces c and 2 C - 1 - c of Striped and
zigzag rings, so that causal work is even.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core_numpy.contract.parallel import context_pieces, pieces_of

from .attention import attention_with_lse, merge_attention
from .dense import accumulation
from .encodings import alibi_bias, relative_bias
from .place import Part, placed


@dataclass(frozen=True)
class Ring:
    """The processes that share a row's positions. lengths (B,) and segments (B, T) are those of the whole rows."""

    group: Any
    place: int
    count: int
    length: int
    causal: bool
    lengths: Tensor | None = None
    segments: Tensor | None = None

    @property
    def size(self) -> int:
        """Positions of one piece."""
        return self.length // context_pieces(self.count, self.causal)

    def starts(self, place: int) -> list[int]:
        """Where the pieces of one process begin."""
        return [piece * self.size for piece in pieces_of(place, self.count, self.causal)]

    def positions(self, device: Any = None) -> Tensor:
        """The positions that are here, in the order in which they are kept."""
        return torch.cat([torch.arange(start, start + self.size, device=device) for start in self.starts(self.place)])

    def sees(self, query: int, key: int, window: tuple[int | None, int | None] | None) -> bool:
        """Whether a query of the piece that begins at `query` may attend to a key of the one that begins at `key`."""
        left, right = window or (None, None)
        if self.causal:
            right = 0 if right is None else min(right, 0)
        last = self.size - 1
        return (right is None or key <= query + last + right) and (left is None or key + last >= query - left)

    def needs(self, place: int, other: int, window: tuple[int | None, int | None] | None) -> bool:
        """Whether queries of one process may attend to keys of another."""
        return any(self.sees(q, k, window) for q in self.starts(place) for k in self.starts(other))


def ring_attention(here: Part, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    """Attention of the queries here to the keys of all processes: (B, H, T here, Dv). options: those of `attention`."""
    sinks, table = options.pop("sinks"), None if here.distance is None else here.distance[1]
    return _Ring.apply(here, options, q, k, v, sinks, table)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, here: Part, options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, sinks: Any, table: Any
    ) -> Tensor:
        ring, acc = here.ring, accumulation(q.dtype)
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for other, keys, values in _visits(ring, options["window"], k, v):
            for a, b in _pairs(ring, other, options["window"]):
                cut = _cut(ring, a, b, q, keys, values)
                out, lse = _block(here, options, a, other, b, *cut, sinks, table)
                new = (out.to(acc), lse)
                found[a] = new if a not in found else merge_attention(*zip(found[a], new, strict=True))
        out = torch.cat([found[a][0] for a in range(len(ring.starts(ring.place)))], 2)
        lse = torch.cat([found[a][1] for a in range(len(ring.starts(ring.place)))], 2)
        ctx.save_for_backward(q, k, v, sinks, table, out, lse)
        ctx.here, ctx.options = here, options
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, sinks, table, out, lse = ctx.saved_tensors
        ring, acc, window = ctx.here.ring, out.dtype, ctx.options["window"]
        grad = grad.to(acc)
        delta = torch.linalg.vecdot(grad, out)
        lse = lse.where(lse > -torch.inf, 0.0)
        totals = {name: torch.zeros_like(x, dtype=acc) for name, x in _named(q, k, v, sinks, table).items()}
        for other, keys, values in _visits(ring, window, k, v):
            sent = {"k": totals["k"], "v": totals["v"]}
            if other != ring.place:
                sent = {name: torch.zeros_like(x, dtype=acc).contiguous() for name, x in (("k", keys), ("v", values))}
            for a, b in _pairs(ring, other, window):
                here, there = _slice(ring, a), _slice(ring, b)
                into = totals | sent
                into |= {"q": totals["q"][:, :, here], "k": sent["k"][:, :, there], "v": sent["v"][:, :, there]}
                with torch.enable_grad():
                    # Leaves are the pieces: gradients of whole arrays would be zeros elsewhere, of each pair.
                    own = (*_cut(ring, a, b, q, keys, values), sinks, table)
                    leaves = [None if x is None else x.detach().requires_grad_() for x in own]
                    part, log = _block(ctx.here, ctx.options, a, other, b, *leaves)
                share = torch.exp(log.detach() - lse[:, :, here])
                g = grad[:, :, here] * share[..., None]
                g_lse = torch.linalg.vecdot(g, part.detach().to(acc)) - share * delta[:, :, here]
                given = _named(*leaves)
                found = torch.autograd.grad(
                    (part, log), list(given.values()), (g.to(part.dtype), g_lse), allow_unused=True
                )
                for name, x in zip(given, found, strict=True):
                    if x is not None:
                        into[name].add_(x)
                del part, log, share, g, g_lse, found, leaves, given
            if other != ring.place:
                _give_back(ring, window, other, sent, totals)
        return (
            None,
            None,
            *(
                None if x is None else totals[name].to(x.dtype)
                for name, x in (("q", q), ("k", k), ("v", v), ("sinks", sinks), ("table", table))
            ),
        )


def _named(*tensors: Tensor | None) -> dict[str, Tensor]:
    pairs = zip(("q", "k", "v", "sinks", "table"), tensors, strict=True)
    return {name: x for name, x in pairs if x is not None}


def _slice(ring: Ring, piece: int) -> slice:
    return slice(piece * ring.size, (piece + 1) * ring.size)


def _cut(ring: Ring, a: int, b: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The queries of piece a, and the keys and values of piece b."""
    return q[:, :, _slice(ring, a)], k[:, :, _slice(ring, b)], v[:, :, _slice(ring, b)]


def _pairs(ring: Ring, other: int, window: Any) -> list[tuple[int, int]]:
    """Pieces (a here, b there) with something to see; a piece of one's own always, so that each query has a part."""
    mine, theirs = ring.starts(ring.place), ring.starts(other)
    return [(a, b) for a, q in enumerate(mine) for b, k in enumerate(theirs) if q == k or ring.sees(q, k, window)]


def _block(
    here: Part, options: dict[str, Any], a: int, other: int, b: int, q: Any, k: Any, v: Any, sinks: Any, table: Any
) -> tuple[Tensor, Tensor]:
    """Out and lse of the queries q, piece a here, and the keys k and values v, piece b of process `other`."""
    ring = here.ring
    first, key = ring.starts(ring.place)[a], ring.starts(other)[b]
    segments, lengths = ring.segments, ring.lengths
    with placed(replace(here, corner=(first, key), whole=(ring.length, ring.length))):
        return attention_with_lse(
            q, k, v,
            **options | {
                "q_offset": first - key,
                "kv_lengths": None if lengths is None else (lengths - key).clamp(0, ring.size),
                "q_segments": None if segments is None else segments[:, first : first + ring.size],
                "kv_segments": None if segments is None else segments[:, key : key + ring.size],
                "bias": _distances(here, first, key, ring.size, table, q),
                # With one part of the keys only: the query's own.
                "sinks": sinks if first == key else None,
            },
        )  # fmt: skip


def _distances(here: Part, first: int, key: int, size: int, table: Tensor | None, q: Tensor) -> Tensor | None:
    """What ALiBi or a relative bias adds for queries from `first` and keys from `key` on: (1, H, size, size)."""
    if here.distance is None:
        return None
    config = here.distance[0]
    if table is None:
        offset = torch.full((1,), first - key, device=q.device)
        wide = "float64" if q.dtype == torch.float64 else "float32"
        bias = alibi_bias(config.heads, size, q_offset=offset, dtype=wide)
    else:
        bias = relative_bias(
            table, size, buckets=config.relative_buckets, max_distance=config.relative_max_distance,
            bidirectional=not config.is_causal, q_offset=first - key,
        )[None]  # fmt: skip
    return bias if here.heads is None else bias[:, here.head : here.head + q.shape[1]]


def _visits(ring: Ring, window: Any, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(process, its keys, its values), own first; the next ones travel while these are worked on.

    Keys that nobody here needs are not sent: they come as they are here, and `_pairs` finds nothing in them.
    """
    coming = _exchange(ring, window, 1, k, v)
    yield ring.place, k, v
    for step in range(1, ring.count):
        (keys, values), works = coming
        for work in works:
            work.wait()
        coming = _exchange(ring, window, step + 1, k, v)
        yield (ring.place - step) % ring.count, keys, values


def _exchange(ring: Ring, window: Any, step: int, k: Tensor, v: Tensor) -> tuple[tuple[Tensor, Tensor], list[Any]]:
    """Begin to send the keys here `step` places on, and to take those from as many places back."""
    to, other = (ring.place + step) % ring.count, (ring.place - step) % ring.count
    operations, coming = [], (k, v)
    if step < ring.count:
        if ring.needs(to, ring.place, window):
            operations += [_operation(ring, dist.isend, x.contiguous(), to) for x in (k, v)]
        if ring.needs(ring.place, other, window):
            coming = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))  # type: ignore[assignment]
            operations += [_operation(ring, dist.irecv, x, other) for x in coming]
    return coming, dist.batch_isend_irecv(operations) if operations else []


def _give_back(ring: Ring, window: Any, other: int, sent: dict[str, Tensor], totals: dict[str, Tensor]) -> None:
    """Send the gradients of `other`'s keys to it, and add those that come for the keys here."""
    to, operations, coming = (2 * ring.place - other) % ring.count, [], {}
    if ring.needs(ring.place, other, window):
        operations += [_operation(ring, dist.isend, x, other) for x in sent.values()]
    if ring.needs(to, ring.place, window):
        coming = {name: torch.empty_like(totals[name]).contiguous() for name in sent}
        operations += [_operation(ring, dist.irecv, x, to) for x in coming.values()]
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    for name, x in coming.items():
        totals[name] += x


def _operation(ring: Ring, kind: Any, x: Tensor, place: int) -> dist.P2POp:
    return dist.P2POp(kind, x, dist.get_global_rank(ring.group, place), ring.group)
