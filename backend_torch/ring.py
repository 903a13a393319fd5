"""Self-attention whose queries and keys are spread over processes: each has some pieces of every row.

Keys and values go round, and each process adds what its queries find in them:

    out, lse = merge(attention_with_lse(q_a, k_b, v_b) for every part b of the keys)
    d out_b = w_b d out,   d lse_b = w_b (d out . out_b - d out . out),   w_b = exp(lse_b - lse)

The backward pass lets the keys go round once more and computes each block again. Both go share by share, so that a
process holds little more than its own queries, keys and gradients, however long the row. Where causality or a window
hides one process's keys from another, nothing is sent: with a window only neighbours talk. Source: Liu et al. 2023
(arXiv:2310.01889); pieces c and 2 C - 1 - c of Striped and zigzag rings, so that causal work is even.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core_numpy.contract.parallel import context_pieces, pieces_of

from .attention import attention_with_lse, merge_attention
from .dense import accumulation
from .encodings import alibi_bias, relative_bias
from .place import Part, placed

# Keys travel in so many shares, of so many positions of each piece at least: five shares of keys and values are the
# most that a process holds for others (one that comes, one at work, one that goes, their gradients going and coming).
SHARES, LEAST = 8, 2048


@dataclass(frozen=True)
class Span:
    """Positions that follow one another: the first one's number, where it is kept, and how many they are."""

    first: int
    kept: int
    size: int

    @property
    def here(self) -> slice:
        return slice(self.kept, self.kept + self.size)


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

    @property
    def shares(self) -> list[tuple[int, int]]:
        """Where in a piece each share begins and ends. A share is of all pieces, so that causal work on it is even."""
        count = max(1, min(SHARES, self.size // LEAST))
        return list(pairwise(self.size * i // count for i in range(count + 1)))

    def starts(self, place: int) -> list[int]:
        """Where the pieces of one process begin."""
        return [piece * self.size for piece in pieces_of(place, self.count, self.causal)]

    def spans(self, place: int, share: int) -> list[Span]:
        """One share of each piece of a process."""
        first, end = self.shares[share]
        return [Span(start + first, i * self.size + first, end - first) for i, start in enumerate(self.starts(place))]

    def positions(self, device: Any = None) -> Tensor:
        """The positions that are here, in the order in which they are kept."""
        return torch.cat([torch.arange(start, start + self.size, device=device) for start in self.starts(self.place)])

    def sees(self, query: Span, key: Span, window: tuple[int | None, int | None] | None) -> bool:
        """Whether a query of one span may attend to a key of another."""
        left, right = window or (None, None)
        if self.causal:
            right = 0 if right is None else min(right, 0)
        return (right is None or key.first < query.first + query.size + right) and (
            left is None or key.first + key.size > query.first - left
        )

    def needs(self, place: int, other: int, window: tuple[int | None, int | None] | None) -> bool:
        """Whether queries of one process may attend to keys of another."""
        mine, theirs = ([Span(start, 0, self.size) for start in self.starts(at)] for at in (place, other))
        return any(self.sees(q, k, window) for q in mine for k in theirs)

    def pairs(
        self, other: int, share: int, window: tuple[int | None, int | None] | None
    ) -> list[tuple[Span, int, Span]]:
        """(queries here, number of the piece there, keys of that piece's share) with something to see."""
        mine = [span for at in range(len(self.shares)) for span in self.spans(self.place, at)]
        theirs = enumerate(self.spans(other, share))
        return [(q, b, k) for b, k in theirs for q in mine if self.sees(q, k, window)]


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
        out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=acc)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=acc)
        begun = set()
        for other, share, keys, values in _visits(ring, options["window"], k, v):
            for a, b, there in ring.pairs(other, share, options["window"]):
                part, log = _block(
                    here, options, a, there, q[:, :, a.here], keys[:, :, b], values[:, :, b], sinks, table
                )
                if a in begun:
                    part, log = merge_attention((out[:, :, a.here], part.to(acc)), (lse[:, :, a.here], log))
                out[:, :, a.here], lse[:, :, a.here] = part, log
                begun.add(a)
                del part, log
        ctx.save_for_backward(q, k, v, sinks, table, out, lse)
        ctx.here, ctx.options = here, options
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, sinks, table, out, lse = ctx.saved_tensors
        ring, acc, window = ctx.here.ring, out.dtype, ctx.options["window"]
        grad = grad.to(acc)
        # As kept: d out . out, and lse with any finite number where there is no key.
        rows = (grad, torch.linalg.vecdot(grad, out), lse.where(lse > -torch.inf, 0.0))
        totals = {name: torch.zeros_like(x, dtype=acc) for name, x in _named(q, k, v, sinks, table).items()}
        for other, share, keys, values in _visits(ring, window, k, v):
            own = other == ring.place
            sent = {
                name: _share(ring, totals[name], share) if own else torch.zeros(x.shape, dtype=acc, device=x.device)
                for name, x in (("k", keys), ("v", values))
            }
            for a, b, there in ring.pairs(other, share, window):
                into = totals | {"q": totals["q"][:, :, a.here], **{name: x[:, :, b] for name, x in sent.items()}}
                block = (q[:, :, a.here], keys[:, :, b], values[:, :, b], sinks, table)
                _add_gradients(ctx.here, ctx.options, a, there, block, [x[:, :, a.here] for x in rows], into)
            if not own:
                _give_back(ring, window, other, share, sent, totals)
        return (
            None,
            None,
            *(
                None if x is None else totals[name].to(x.dtype)
                for name, x in (("q", q), ("k", k), ("v", v), ("sinks", sinks), ("table", table))
            ),
        )


def _add_gradients(
    here: Part, options: dict[str, Any], a: Span, there: Span, block: tuple[Any, ...], rows: list[Tensor],
    into: dict[str, Tensor],
) -> None:  # fmt: skip
    """Compute one block again, and add what it gives to the gradients of what it is computed from."""
    grad, delta, lse = rows
    with torch.enable_grad():
        # Leaves are the spans: gradients of whole arrays would be zeros elsewhere, of each pair.
        leaves = [None if x is None else x.detach().requires_grad_() for x in block]
        part, log = _block(here, options, a, there, *leaves)
    share = torch.exp(log.detach() - lse)
    g = grad * share[..., None]
    g_lse = torch.linalg.vecdot(g, part.detach().to(grad.dtype)) - share * delta
    given = _named(*leaves)
    found = torch.autograd.grad((part, log), list(given.values()), (g.to(part.dtype), g_lse), allow_unused=True)
    for name, x in zip(given, found, strict=True):
        if x is not None:
            into[name].add_(x)


def _named(*tensors: Tensor | None) -> dict[str, Tensor]:
    pairs = zip(("q", "k", "v", "sinks", "table"), tensors, strict=True)
    return {name: x for name, x in pairs if x is not None}


def _share(ring: Ring, x: Tensor, share: int) -> Tensor:
    """A view of one share of keys kept here: (B, G, pieces, positions, D) of x (B, G, T here, D)."""
    first, end = ring.shares[share]
    return x.unflatten(2, (-1, ring.size))[:, :, :, first:end]


def _block(
    here: Part, options: dict[str, Any], a: Span, b: Span, q: Any, k: Any, v: Any, sinks: Any, table: Any
) -> tuple[Tensor, Tensor]:
    """Out and lse of the queries q, those of span a, and the keys k and values v, those of span b."""
    ring = here.ring
    segments, lengths = ring.segments, ring.lengths
    with placed(replace(here, corner=(a.first, b.first), whole=(ring.length, ring.length))):
        return attention_with_lse(
            q, k, v,
            **options | {
                "q_offset": a.first - b.first,
                "kv_lengths": None if lengths is None else (lengths - b.first).clamp(0, b.size),
                "q_segments": None if segments is None else segments[:, a.first : a.first + a.size],
                "kv_segments": None if segments is None else segments[:, b.first : b.first + b.size],
                "bias": _distances(here, a, b, table, q),
                # With one part of the keys only: the query's own.
                "sinks": sinks if a.first == b.first else None,
            },
        )  # fmt: skip


def _distances(here: Part, a: Span, b: Span, table: Tensor | None, q: Tensor) -> Tensor | None:
    """What ALiBi or a relative bias adds for queries of span a and keys of span b: (1, H, queries, keys)."""
    if here.distance is None:
        return None
    config, away = here.distance[0], a.first - b.first
    if table is None:
        offset = torch.full((1,), away, device=q.device)
        wide = "float64" if q.dtype == torch.float64 else "float32"
        bias = alibi_bias(config.heads, a.size, b.size, q_offset=offset, dtype=wide)
    else:
        bias = relative_bias(
            table, a.size, b.size, buckets=config.relative_buckets, max_distance=config.relative_max_distance,
            bidirectional=not config.is_causal, q_offset=away,
        )[None]  # fmt: skip
    return bias if here.heads is None else bias[:, here.head : here.head + q.shape[1]]


def _visits(ring: Ring, window: Any, k: Tensor, v: Tensor) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """(process, share, its keys, its values), own first; the next ones travel while these are worked on.

    Keys and values are (B, G, pieces, positions of the share, D). Those that nobody here needs are not sent: they come
    as they are here, and `pairs` finds nothing in them.
    """
    shares = range(len(ring.shares))
    turns = [(step, share) for step in range(1, ring.count) for share in shares]
    coming = _exchange(ring, window, *turns[0], k, v)
    for share in shares:
        yield ring.place, share, _share(ring, k, share), _share(ring, v, share)
    for (step, share), following in zip(turns, [*turns[1:], None], strict=True):
        (keys, values), works = coming
        for work in works:
            work.wait()
        if following is not None:
            coming = _exchange(ring, window, *following, k, v)
        yield (ring.place - step) % ring.count, share, keys, values


def _exchange(
    ring: Ring, window: Any, step: int, share: int, k: Tensor, v: Tensor
) -> tuple[tuple[Tensor, Tensor], list[Any]]:
    """Begin to send a share of the keys here `step` places on, and to take one from as many places back."""
    to, other = (ring.place + step) % ring.count, (ring.place - step) % ring.count
    own = _share(ring, k, share), _share(ring, v, share)
    operations, coming = [], own
    if ring.needs(to, ring.place, window):
        operations += [_operation(ring, dist.isend, x.contiguous(), to) for x in own]
    if ring.needs(ring.place, other, window):
        coming = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in own)  # type: ignore[assignment]
        operations += [_operation(ring, dist.irecv, x, other) for x in coming]
    return coming, dist.batch_isend_irecv(operations) if operations else []


def _give_back(
    ring: Ring, window: Any, other: int, share: int, sent: dict[str, Tensor], totals: dict[str, Tensor]
) -> None:
    """Send the gradients of a share of `other`'s keys to it, and add those that come for the keys here."""
    to, operations, coming = (2 * ring.place - other) % ring.count, [], {}
    if ring.needs(ring.place, other, window):
        operations += [_operation(ring, dist.isend, x, other) for x in sent.values()]
    if ring.needs(to, ring.place, window):
        coming = {name: torch.empty_like(x) for name, x in sent.items()}
        operations += [_operation(ring, dist.irecv, x, to) for x in coming.values()]
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    for name, x in coming.items():
        _share(ring, totals[name], share).add_(x)


def _operation(ring: Ring, kind: Any, x: Tensor, place: int) -> dist.P2POp:
    return dist.P2POp(kind, x, dist.get_global_rank(ring.group, place), ring.group)
