"""The formula with torch's shortest operations, for eager calls on a CPU whose every query sees some key.

Scale, bias and mask join the product of queries and keys, and torch's own softmax has one fused pass either way, where
general rows need selections in between. Differentiable any number of times, as the formula is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .visibility import Visibility, band_term, hull, last_sees_all, seen, tame, visible

# Up to so many elements a bias is looked through whole, which is one short operation.
GLANCE = 1 << 18


def quick(call: Any, acc: torch.dtype, value: bool) -> tuple[Tensor, Tensor, Tensor] | None:
    """(scores, weights, values) in the accumulation dtype, or None where some row may be dead.

    With S' = S, or S + 1 where the last column is the sink, whose value is zero: scores and weights (N, H, T, S'),
    values (N, G, S', Dv). Without values the keys stand for them.
    """
    q, k, plan = call.q, call.k, call.plan
    v = call.v if value else k
    (N, H, T, D), (G, S) = q.shape, k.shape[1:3]
    alive, term = _term(call.see, k, T, S, acc)
    if not alive:
        return None
    # Whether no key is hidden from everybody: between its ends a band leaves none out.
    everything = call.see.mask is None and not call.see.ragged and hull(call.see, T, S) == (0, S)
    if call.see.bias is not None:
        bias = call.see.bias.to(acc)
        term = bias if term is None else bias.where(term > -torch.inf, -torch.inf)
        shown = term.detach()
        if shown.numel() <= GLANCE and shown.amin().item() > -torch.inf:
            everything = True
        else:
            everything = False
            if not shown.amax(-1).amin().item() > -torch.inf:
                return None
    if term is not None and not everything and not last_sees_all(term) and not tame(k, v):
        some = seen(term.detach(), G)
        k, v = (k, v) if some is None else (k.where(some, 0.0), v.where(some, 0.0))
    if q.dtype != acc:
        q, k, v = q.to(acc), k.to(acc), v.to(acc)
    rows, keys = q.reshape(N * G, H // G * T, D), k.reshape(N * G, S, D).mT
    if plan.softcap is not None:
        bent = torch.tanh(product(rows, keys, plan.scale / plan.softcap)).view(N, H, T, S)
        s = bent * plan.softcap if term is None else torch.add(term, bent, alpha=plan.softcap)
    elif term is None:
        s = product(rows, keys, plan.scale).view(N, H, T, S)
    elif N == 1 and H == G:  # as many rows of the term as of scores, or one for all: no copy
        whole = term.expand(N, H, T, S).view(H, T, S)
        s = torch.baddbmm(whole, rows, keys, alpha=plan.scale).view(N, H, T, S)
    else:
        s = product(rows, keys, plan.scale).view(N, H, T, S) + term
    if call.sinks is not None:
        s = torch.cat([s, call.sinks.to(acc)[:, None, None].expand(N, H, T, 1)], -1)
        v = F.pad(v, (0, 0, 0, 1))
    return s, torch.softmax(s, -1), v


def product(rows: Tensor, columns: Tensor, scale: float) -> Tensor:
    """scale * rows @ columns over one batch axis, in one pass."""
    return torch.baddbmm(rows.new_empty(1), rows, columns, beta=0.0, alpha=scale)


def _term(see: Visibility, k: Tensor, T: int, S: int, acc: torch.dtype) -> tuple[bool, Tensor | None]:
    """(whether every row is alive, 0 or -inf to add to the scores) of all but the bias."""
    if see.mask is None and not see.ragged:
        return _meets(see, T, S), band_term(see, T, S, acc) if see.banded else None
    shown = visible(replace(see, bias=None), k.device, (0, k.shape[0]), (0, T), (0, S))
    return bool(shown.any(-1).all()), k.new_zeros((), dtype=acc).where(shown, -torch.inf)


def _meets(see: Visibility, T: int, S: int) -> bool:
    """Whether the band, its offset an int, shows every query some of S keys."""
    if not isinstance(see.offset, int):
        return False
    return (see.left is None or T - 1 + see.offset - see.left < S) and (
        see.right is None or see.offset + see.right >= 0
    )
