"""One piece of attention, forward and backward: torch's fused CPU kernel where it can say it, else three products."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .dense import accumulation, grouped, kept
from .pieces import Piece
from .place import weight_index
from .visibility import Visibility, part, seen, visible

FLASH = torch._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# A backward pass makes weights as exp(s - lse). In float32 an lse of this size is right to 2e-4, and one of 1e9 has no
# digits left for the sum: where all scores of a row are far off, weights of 1 / S would come back as 1.
ENOUGH = float(1 << 12)


@dataclass(frozen=True)
class Problem:
    """A whole call, (N, heads, length, size), and its numbers."""

    q: Tensor
    k: Tensor
    v: Tensor
    see: Visibility
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    key: Tensor | None = None
    rate: float = 0.0

    def cut(self, p: Piece) -> tuple[Tensor, Tensor, Tensor]:
        rows, keys = (self.q.shape[1],), p.k
        q = part(self.q, p.n, (0, *rows), p.q)
        k, v = (part(x, p.n, (0, x.shape[1]), keys) for x in (self.k, self.v))
        return q, k, v


@dataclass(frozen=True)
class Tile:
    """The inputs of one piece; mask is None where all is visible, but for what a bias of -inf masks."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    piece: Piece


def tile(p: Problem, piece: Piece, masks: dict[tuple[int, ...], Tensor], flash: bool) -> Tile:
    """Cut a piece out, with its mask, and with the keys that none of its queries may see taken out of k and v.

    flash: for the fused kernel, which has a flag for a diagonal.
    """
    q, k, v = p.cut(piece)
    if piece.kind == "full" or (flash and _flagged(p, piece)):
        return Tile(q, k, v, None, piece)
    see, (i0, i1), (j0, j1) = replace(p.see, bias=None), piece.q, piece.k
    bias = bias_of(p, piece)
    plain = see.mask is None and bias is None and not see.ragged
    if plain and isinstance(see.offset, int):  # inner pieces of a band share one mask, and have no unseen keys
        name = (i1 - i0, j1 - j0, i0 + see.offset - j0)
        if name not in masks:
            masks.clear()  # pieces come in order; those of a one-sided band share none, and all together are quadratic
            masks[name] = visible(see, q.device, piece.n, piece.q, piece.k)
        return Tile(q, k, v, masks[name], piece)
    mask = visible(see, q.device, piece.n, piece.q, piece.k)
    term = mask if bias is None else bias if mask is None else bias.where(mask, -torch.inf)
    alive = seen(term, k.shape[1])
    if alive is not None:
        k, v = k.where(alive, 0.0), v.where(alive, 0.0)
    return Tile(q, k, v, mask, piece)


def bias_of(p: Problem, piece: Piece) -> Tensor | None:
    bias = p.see.bias
    return None if bias is None else part(bias, piece.n, (0, bias.shape[1]), piece.q, piece.k)


def additive(p: Problem, t: Tile) -> Tensor | None:
    """Mask and bias as one term for the fused kernel, (n or 1, H or 1, i, j) in the accumulation dtype."""
    acc, term = accumulation(t.q.dtype), bias_of(p, t.piece)
    if term is not None:
        term = term.to(acc)
        term = term if t.mask is None else term.where(t.mask, -torch.inf)
    elif t.mask is not None:
        term = torch.zeros(t.mask.shape, dtype=acc).masked_fill_(~t.mask, -torch.inf)
    return None if term is None else term.expand(*term.shape[:2], t.q.shape[2], t.k.shape[2])


def _flagged(p: Problem, piece: Piece) -> bool:
    """Whether the kernel's causal flag says it. The kernel scales its fill of -inf too: NaN for scale 0, inf below."""
    return piece.kind == "diagonal" and p.scale > 0


def flash_forward(p: Problem, t: Tile) -> tuple[Tensor, Tensor]:
    """(out, lse) of a piece by the fused kernel, which reports lse 0 for a row without keys: -inf here."""
    if _flagged(p, t.piece):
        return FLASH(t.q, t.k, t.v, 0.0, True, scale=p.scale)
    term = additive(p, t)
    out, lse = FLASH(t.q, t.k, t.v, 0.0, False, attn_mask=term, scale=p.scale)
    if term is not None and bool((lse == 0).any()):
        lse = lse.where(term.amax(-1) > -torch.inf, -torch.inf)
    return out, lse


def flash_backward(p: Problem, t: Tile, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a piece's q, k, v; lse is that of the whole row, finite."""
    causal = _flagged(p, t.piece)
    term = None if causal else additive(p, t)
    return FLASH_BACKWARD(grad, t.q, t.k, t.v, out, lse, 0.0, causal, attn_mask=term, scale=p.scale)


def says_enough(lse: Tensor) -> bool:
    """Whether weights can be made from these; read on the host. -inf, a row without keys, counts as far off."""
    least, most = torch.aminmax(lse)
    return least.item() > -ENOUGH and most.item() < ENOUGH


def scores(p: Problem, t: Tile) -> tuple[Tensor, Tensor | None]:
    """Masked scores (n, H, i, j) in the accumulation dtype, and tanh(s / softcap) where there is a cap."""
    acc = accumulation(t.q.dtype)
    (n, H, i, _), G, j = t.q.shape, t.k.shape[1], t.k.shape[2]
    s = _product(grouped(t.q.to(acc), G), t.k.to(acc).mT, p.scale).view(n, H, i, j)
    bent = None
    if p.softcap is not None:
        bent = s.div_(p.softcap).tanh_()
        s = bent * p.softcap
    bias = bias_of(p, t.piece)
    if bias is not None:
        s += bias
    if t.mask is not None:
        s.masked_fill_(~t.mask, -torch.inf)
    return s, bent


def _product(a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """scale * a @ b over (n, heads, ...), the scale inside the product."""
    n, heads = a.shape[:2]
    a, b = a.reshape(n * heads, *a.shape[2:]), b.reshape(n * heads, *b.shape[2:])
    c = torch.bmm(a, b) if scale == 1.0 else torch.baddbmm(a.new_empty(1), a, b, beta=0.0, alpha=scale)
    return c.view(n, heads, *c.shape[1:])


def dropped(p: Problem, t: Tile) -> Tensor:
    """The dropout factor of each weight of a piece, by the weight's place in the whole call."""
    H, T, S = p.q.shape[1], p.q.shape[2], p.k.shape[2]
    n, i, j = (torch.arange(*r, device=t.q.device) for r in (t.piece.n, t.piece.q, t.piece.k))
    assert p.key is not None
    return kept(p.key, weight_index(p.key, n, H, i, j, T, S), p.rate, accumulation(t.q.dtype))


def own_forward(p: Problem, t: Tile) -> tuple[Tensor, Tensor]:
    """(out, lse) of a piece that holds all the keys of its queries; both in the accumulation dtype."""
    s, _ = scores(p, t)
    top, total, _ = _powers(p, s)
    if p.rate > 0:
        s *= dropped(p, t)
    G = t.k.shape[1]
    out = _product(grouped(s, G), t.v.to(s.dtype)).view(*s.shape[:3], -1)
    out /= total.masked_fill(total == 0, 1.0)
    return out, (total.log() + top).squeeze(-1)


def _powers(p: Problem, s: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """m, sum exp(s - m) and the sink's part of it, a column each; exp(s - m) takes the place of s."""
    top = s.amax(-1, keepdim=True)
    sink = None
    if p.sinks is not None:
        sink = p.sinks.to(s.dtype)[:, None, None]
        top = torch.maximum(top, sink)
    top.masked_fill_(top == -torch.inf, 0.0)
    s.sub_(top).exp_()
    total = s.sum(-1, keepdim=True)
    if sink is not None:
        sink = torch.exp(sink - top)
        total += sink
    return top, total, sink


def own_backward(
    p: Problem, t: Tile, grad: Tensor, delta: Tensor, lse: Tensor | None
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None, Tensor | None]:
    """Gradients of a piece's q, k, v and of its scores after the cap, in the accumulation dtype; the sink's weights.

    P = exp(s - lse);  dP = F * (dO @ v.T);  dS = P * (dP - delta);  delta = sum(dO * O) - d lse;  dv = (P * F).T @ dO
    with F the dropout factor. lse is finite here: rows without keys have P = exp(-inf) = 0. None, where it does not
    say enough (see `ENOUGH`), asks for the sums to be made again; only then the sink's weights are given.
    """
    s, bent = scores(p, t)
    G, acc = t.k.shape[1], s.dtype
    q, grad = grouped(t.q.to(acc), G), grouped(grad.to(acc), G)
    sunk = None
    if lse is not None:
        weights = s.sub_(lse[..., None]).exp_()
    else:
        _, total, sunk = _powers(p, s)
        weights = s.div_(total.masked_fill_(total == 0, 1.0))
        sunk = None if sunk is None else (sunk / total).squeeze(-1)
    step = _product(grad, t.v.to(acc).mT).view_as(weights)
    used = weights
    if p.rate > 0:
        factor = dropped(p, t)
        step *= factor
        used = weights * factor
    dv = _product(grouped(used, G).mT, grad)
    step.sub_(delta[..., None]).mul_(weights)
    term = step if p.see.bias is not None else None
    if bent is not None:
        step = step * (1.0 - bent.square()) if term is not None else step.mul_(bent.square_().neg_().add_(1.0))
    rows = grouped(step, G)
    dq = _product(rows, t.k.to(acc), p.scale).view(*step.shape[:3], -1)
    return (dq, _product(rows.mT, q, p.scale), dv), term, sunk
