"""Attention piece by piece in linear memory, with its own backward pass; one opaque operation to torch.

As a registered operation it goes through torch.compile, torch.export and torch.func as one node: the pieces are
found when it runs, so lengths may change without compiling again and values of lengths and segments are at hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .dense import accumulation
from .pieces import Piece, pieces
from .tiles import Problem, flash_backward, flash_forward, own_backward, own_forward, says_enough, tile
from .visibility import Visibility, part

# Scores alive at a time in the own path, in elements; 2^20 are 4 MiB in float32. Measured on one core with a soft cap,
# forward and backward, T 1024 and 2048: 2^19 to 2^23 are within a tenth of each other, 2^16 takes up to 1.6 times.
ALIVE = 1 << 20
# Rows of a masked piece for the fused kernel: its mask is rows times keys, and a band is as much wider than its window.
ROWS = 256


@torch.library.custom_op("backend_torch::blockwise", mutates_args=())
def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, offsets: Tensor | None,
    lengths: Tensor | None, q_segments: Tensor | None, kv_segments: Tensor | None, sinks: Tensor | None,
    key: Tensor | None, left: int | None, right: int | None, offset: int, scale: float, softcap: float | None,
    rate: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out (N, H, T, Dv) and lse (N, H, T)."""
    out, lse = run_forward(
        q, k, v, mask, bias, offsets, lengths, q_segments, kv_segments, sinks, key, left, right, offset, scale, softcap,
        rate,
    )  # fmt: skip
    return out.contiguous(), lse.contiguous()


def run_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """`forward` without its way through torch; the results may be strided."""
    p = _problem(*arguments)
    flash = _fusible(p)
    out, lse = _all_pieces(p, flash)
    if p.sinks is not None:
        sink = p.sinks.to(lse.dtype)[:, None]
        if flash and not says_enough(_finite(lse)):
            flash = False  # a sink beside such scores needs their sum
            out, lse = _all_pieces(p, flash)
        _join_sinks(out, lse, sink, flash)
    return out, lse


def _all_pieces(p: Problem, flash: bool) -> tuple[Tensor, Tensor]:
    """out and lse, in which sinks of the fused kernel are yet to join."""
    q, v = p.q, p.v
    masks: dict[tuple[int, ...], Tensor] = {}
    out, lse = None, None
    for piece in _pieces(p, flash):
        t = tile(p, piece, masks, flash)
        values, logs = flash_forward(p, t) if flash else own_forward(p, t)
        if _covers(p, piece) and values.dtype == q.dtype:
            out, lse = values, logs
            break
        if out is None or lse is None:
            out, lse = _nothing(q, v)
        part(out, piece.n, (0, out.shape[1]), piece.q).copy_(values)
        part(lse, piece.n, (0, out.shape[1]), piece.q).copy_(logs)
    return (out, lse) if out is not None and lse is not None else _nothing(q, v)


def _finite(lse: Tensor) -> Tensor:
    """A row without keys: any finite lse gives exp(-inf - lse) = 0."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _nothing(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse of queries that see no key."""
    shape = q.shape[:3]
    return q.new_zeros((*shape, v.shape[3])), q.new_full(shape, -torch.inf, dtype=accumulation(q.dtype))


def _join_sinks(out: Tensor, lse: Tensor, sink: Tensor, flash: bool) -> None:
    """The fused kernel knows no sinks: its denominator grows by exp(sink). Rows in no piece have the sink alone."""
    if not flash:
        lse.copy_(lse.where(lse > -torch.inf, sink))
        return
    joint = torch.logaddexp(lse, sink)
    out *= torch.exp(lse - joint.masked_fill(joint == -torch.inf, 0.0))[..., None]
    lse.copy_(joint)


@torch.library.custom_op("backend_torch::blockwise_backward", mutates_args=())
def backward(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, to_bias: bool,
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, offsets: Tensor | None,
    lengths: Tensor | None, q_segments: Tensor | None, kv_segments: Tensor | None, sinks: Tensor | None,
    key: Tensor | None, left: int | None, right: int | None, offset: int, scale: float, softcap: float | None,
    rate: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, bias and sinks; of bias and sinks an empty tensor where there is none to give."""
    dq, dk, dv, dbias, dsinks = run_backward(
        grad, grad_lse, out, lse, to_bias,
        q, k, v, mask, bias, offsets, lengths, q_segments, kv_segments, sinks, key, left, right, offset, scale, softcap,
        rate,
    )  # fmt: skip
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), dbias, dsinks


def run_backward(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, to_bias: bool, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`backward` without its way through torch; the results may be strided."""
    p = _problem(*arguments)
    q, k, v, bias, sinks, acc = p.q, p.k, p.v, p.see.bias, p.sinks, lse.dtype
    finite = _finite(lse)
    enough = lse.device.type == "cpu" and says_enough(finite)  # elsewhere a look would wait for the device
    # The fused backward pass knows neither the derivative of lse nor of the bias.
    flash = _fusible(p) and grad_lse is None and not to_bias and enough
    delta = lse.new_empty(0)
    if not flash or sinks is not None:
        delta = torch.linalg.vecdot(grad.to(acc), out.to(acc))
        delta = delta if grad_lse is None else delta - grad_lse
    grads: tuple[Tensor, ...] | None = None
    dbias = torch.zeros_like(bias, dtype=acc) if to_bias and bias is not None else q.new_empty(0)
    heads = (0, q.shape[1])
    share = None if sinks is None else torch.exp(sinks.to(acc)[:, None] - finite)
    masks: dict[tuple[int, ...], Tensor] = {}
    for piece in _pieces(p, flash):
        t = tile(p, piece, masks, flash)
        g, l = (part(x, piece.n, heads, piece.q) for x in (grad, finite))
        if flash:
            parts, term = flash_backward(p, t, g, part(out, piece.n, heads, piece.q), l), None
        else:
            parts, term, sunk = own_backward(p, t, g, part(delta, piece.n, heads, piece.q), l if enough else None)
            if share is not None and sunk is not None:
                part(share, piece.n, heads, piece.q).copy_(sunk)
        if to_bias and term is not None:
            target = part(dbias, piece.n, (0, dbias.shape[1]), piece.q, piece.k)
            target += term.sum([a for a in range(4) if dbias.shape[a] == 1], keepdim=True) if 1 in dbias.shape else term
        if _covers(p, piece):
            grads = parts
            break
        if grads is None:
            grads = tuple(x.new_zeros(x.shape, dtype=acc) for x in (q, k, v))
        part(grads[0], piece.n, heads, piece.q).copy_(parts[0])
        for whole, piece_grad in zip(grads[1:], parts[1:], strict=True):
            part(whole, piece.n, (0, whole.shape[1]), piece.k).add_(piece_grad)
    if grads is None:
        grads = tuple(torch.zeros_like(x) for x in (q, k, v))
    dsinks = q.new_empty(0)
    if sinks is not None and share is not None:
        dsinks = -(share * delta).sum((0, 2)).to(sinks.dtype)
    if to_bias and bias is not None:
        dbias = dbias.to(bias.dtype)
    dq, dk, dv = (g.to(x.dtype) for g, x in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv, dbias, dsinks


def _problem(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, offsets: Tensor | None,
    lengths: Tensor | None, q_segments: Tensor | None, kv_segments: Tensor | None, sinks: Tensor | None,
    key: Tensor | None, left: int | None, right: int | None, offset: int, scale: float, softcap: float | None,
    rate: float,
) -> Problem:  # fmt: skip
    see = Visibility(left, right, offset if offsets is None else offsets, lengths, q_segments, kv_segments, mask, bias)
    # The fused kernel wants features next to each other.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return Problem(q, k, v, see, scale, softcap, sinks, key, rate)


def _fusible(p: Problem) -> bool:
    """Whether torch's fused CPU kernel can say a piece. Its half-precision results would be rounded twice by sinks."""
    halves = p.q.dtype in (torch.float16, torch.bfloat16)
    return (
        p.q.device.type == "cpu"
        and p.softcap is None
        and p.rate == 0.0
        and p.q.shape[-1] == p.v.shape[-1]
        and not (halves and p.sinks is not None)
    )


def _covers(p: Problem, piece: Piece) -> bool:
    """Whether one piece is the whole call."""
    N, T, S = p.q.shape[0], p.q.shape[2], p.k.shape[2]
    return piece.n == (0, N) and piece.q == (0, T) and piece.k == (0, S)


def _pieces(p: Problem, flash: bool) -> Iterator[Piece]:
    """The pieces, small enough in queries and batch elements that their scores (or masks) stay in cache."""
    (N, H, T, _), S = p.q.shape, p.k.shape[2]
    alone = p.see.mask is None and not (p.see.banded or p.see.ragged)
    if flash and alone and p.see.bias is not None and p.see.bias.dtype == accumulation(p.q.dtype):
        yield Piece((0, N), (0, T), (0, S), "mask")  # the kernel takes the bias as it is: nothing is made for it
        return
    left, right = p.see.left, p.see.right
    band = S if left is None or right is None else left + right
    if flash:
        rows = max(64, min(ROWS, band // 4))
        rows -= rows % 32
    else:
        rows = max(16, min(ROWS, band // 2, ALIVE // (H * min(S, band + 64)))) if band else 64
    for piece in pieces(p.see, N, T, S, rows, whole=flash and p.scale > 0):
        if flash and (piece.kind == "full" or (piece.kind == "diagonal" and p.scale > 0)):
            yield piece
            continue
        scores = H * (piece.q[1] - piece.q[0]) * (piece.k[1] - piece.k[0])
        step = max(1, ALIVE // scores)
        for n in range(piece.n[0], piece.n[1], step):
            yield Piece((n, min(n + step, piece.n[1])), piece.q, piece.k, piece.kind)
