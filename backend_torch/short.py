"""The shortest way of a call like an earlier one: what its values still decide is looked at, then one kernel is called.

With few positions every microsecond shows. `short` makes, of a call that went the long way, a function of the arrays
of later calls of its form (`known`), which gives None where their values ask for the long way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .few import few, future
from .fused import is_flag, mark, recorded, side_by_side
from .kernels import Call, joins, keeps
from .sinks import with_sinks
from .visibility import readable

# (q, k, v, mask, bias, kv_lengths, sinks), as the caller gave them, -> out in the caller's shape, or None.
Short = Callable[..., Tensor | None]

# Up to so many elements the checks look for NaN in a bias, so that it is looked through whole; and up to so many one
# look at all of it takes less than one at its last row and one at the output.
CHECKED, GLANCE = 1 << 12, 1 << 15
_SDPA = F.scaled_dot_product_attention
_graded = torch.is_grad_enabled
_allowed = torch._C._get_flash_sdp_enabled


def short(call: Call, chosen: str, asked: str) -> Short | None:
    """The short way of calls of the form of `call`, or None; the kernel `chosen` serves it where `asked` was."""
    see, plan = call.see, call.plan
    if len(plan.batch) != 1 or plan.Dv != plan.D or call.wide or call.empty or call.wants_lse:
        return None
    if see.q_segments is not None or isinstance(see.offset, Tensor):
        return None
    bare = replace(see, mask=None, bias=None, lengths=None)
    if see.banded and not (is_flag(bare, plan.scale) and plan.T >= plan.S):
        return None
    given = {name for name in ("mask", "bias", "lengths") if getattr(see, name) is not None}
    if chosen == "sdpa" and not given:
        return _plain(call)
    if not readable(call.q):
        return None
    if chosen == "blockwise" and joins(call):
        return _sinks(call)
    if chosen == "dense" and asked == "auto" and keeps(call):
        return _kept(call)
    if call.sinks is not None or len(given) != 1:
        return None
    if chosen == "sdpa" and see.bias is None:
        return _padding(call)
    if (
        chosen == "sdpa"
        and see.bias is not None
        and not (call.bias_gradient or see.banded or see.bias.dtype != call.q.dtype)
    ):
        return _biased(call, see.bias.numel() <= CHECKED)
    return None


def _kernel(call: Call) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor | None]:
    """Torch's own, with the numbers of a call; those that are its defaults are not worth their way through Python."""
    plan, flag, looks = call.plan, call.see.banded, readable(call.q)
    scale, grouped = plan.scale, plan.G != plan.H
    usual = scale == 1.0 / math.sqrt(plan.D) and not grouped

    def run(q: Tensor, k: Tensor, v: Tensor, term: Tensor | None) -> Tensor | None:
        if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):
            q, k, v = side_by_side(q, k, v)
        if looks and _graded() and (q.requires_grad or k.requires_grad or v.requires_grad) and _allowed():
            return recorded(q, k, v, term, flag, scale)
        if usual:
            out = _SDPA(q, k, v, term, 0.0, flag)
        else:
            out = _SDPA(q, k, v, term, 0.0, flag, scale=scale, enable_gqa=grouped)
        if out.grad_fn is not None:
            mark(out)
        return out

    return run


def _plain(call: Call) -> Short:
    """Nothing restricts the call but j <= i."""
    run = _kernel(call)
    return lambda q, k, v, *_: run(q, k, v, None)


def _padding(call: Call) -> Short | None:
    """A mask over keys, the same for all rows, or one length: the keys outside of them are cut off."""
    S, flag, run = call.plan.S, call.see.banded, _kernel(call)
    lengths = call.see.mask is None
    if call.plan.batch != (1,) if call.see.mask is None else call.see.mask.numel() != S:
        return None

    def cut(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: None, kv_lengths: Tensor, *_: Any) -> Tensor | None:
        start = 0
        if lengths:
            stop = int(kv_lengths.item())
            if not 0 < stop <= S:
                return None
        else:
            shown = mask.numpy().tobytes()
            stop = len(shown.rstrip(b"\0"))
            start = stop and len(shown) - len(shown.lstrip(b"\0"))
            if not stop or (start and flag) or shown.find(0, start, stop) != -1:
                return None
        if start or stop < S:
            k, v = k.narrow(2, start, stop - start), v.narrow(2, start, stop - start)
        return run(q, k, v, None)

    return cut


def _biased(call: Call, whole: bool) -> Short:
    """A bias whose gradient nobody wants, where its last row of queries shows that no key is hidden from all."""
    run = _kernel(call)

    def biased(q: Tensor, k: Tensor, v: Tensor, mask: None, bias: Tensor, *_: Any) -> Tensor | None:
        bias = bias.detach() if bias.requires_grad else bias
        if not (bias if whole else bias.select(-2, -1)).amin().item() > -math.inf:
            return None
        return run(q, k, v, bias)

    return biased


def _kept(call: Call) -> Short:
    """Few scores. With a bias the output is looked through for rows without keys and for NaN that was hidden.

    Where there is a gradient, which hides more, so is the bias: whole, or its last row.
    """
    plan = call.plan
    term = future(plan.group, plan.T, plan.S, call.q.dtype) if call.see.banded else None
    whole = call.see.bias is None or call.see.bias.numel() <= GLANCE

    def kept(
        q: Tensor, k: Tensor, v: Tensor, mask: None, bias: Tensor | None, lengths: None, sinks: Tensor | None
    ) -> Tensor | None:
        if sinks is not None:
            if not sinks.detach().amax().item() < math.inf:
                return None
            sinks = sinks if sinks.dtype == q.dtype else sinks.to(q.dtype)
        if bias is None:
            return few(q, k, v, term, sinks, plan.scale, plan.softcap)
        out = few(q, k, v, bias, sinks, plan.scale, plan.softcap)
        if not out.requires_grad:
            flat = out.view(-1)
            return None if math.isnan(torch.dot(flat, flat).item()) else out
        shown = bias.detach()
        if not (shown if whole else shown.select(-2, -1)).amin().item() > -math.inf:
            return None
        return out if whole or not math.isnan(out.detach().select(-1, 0).sum().item()) else None

    return kept


def _sinks(call: Call) -> Short:
    """Sinks alone, or with j <= i."""
    flag, scale = call.see.banded, call.plan.scale

    def sunk(q: Tensor, k: Tensor, v: Tensor, mask: None, bias: None, kv_lengths: None, sinks: Tensor) -> Tensor | None:
        if not sinks.detach().amax().item() < math.inf:
            return None
        q, k, v = side_by_side(q, k, v)
        return with_sinks(q, k, v, sinks, flag, scale)

    return sunk
