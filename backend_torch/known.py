"""Calls whose form was checked before: an eager call like an earlier one costs a lookup in place of the checks.

A form is all that `attention_plan` and `choose` look at but the values of tensors, which are looked at in every call:
the types, shapes, dtypes and devices of arrays, whether q is contiguous, and the numbers with their types (True is 1,
and 1 is 1.0). Only forms that were found right are kept, and only of plain tensors and numbers: others are checked each
time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from core_numpy.contract.checks.attention import AttentionPlan

from .fused import mark
from .short import Short
from .tiles import FLASH, says_enough

# So many forms are kept; a program has a few dozen, one whose lengths grow by one in every step has thousands.
MOST = 4096
_TENSORS = frozenset((Tensor, Parameter))
_NUMBERS = frozenset((int, float, type(None)))
_SIDES = frozenset((int, type(None)))

Form = tuple[Any, ...]


class Known(NamedTuple):
    """What follows from a form. left, right: the band, as in `Visibility`; short: the short way, if there is one."""

    plan: AttentionPlan
    kernel: str
    left: int | None
    right: int | None
    short: Short | None


_known: dict[Form, Known] = {}
# Calls on a CPU that are told nothing but `causal` and need nothing but torch's kernel.
_bare: set[Form] = set()
_transforms = torch._C._functorch.peek_interpreter_stack
_dispatched = torch._C._len_torch_dispatch_stack
_graded = torch.is_grad_enabled
_allowed = torch._C._get_flash_sdp_enabled


def _wanted(*arrays: Tensor) -> bool:
    """Whether one of them is to have a gradient."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in arrays)


def bare(q: Any, k: Any, v: Any, causal: Any) -> Tensor | None:
    """The output of an eager call on a CPU that is told nothing else, where the like of it was found to need nothing
    but torch's kernel; None elsewhere.

    A step of decoding takes 30 microseconds: the whole form and its short way cost five of them, this half of that.
    """
    if not (type(q) is type(k) is type(v) is Tensor) or _transforms() is not None or forward_ad._current_level >= 0:
        return None
    if (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, causal, type(causal)) not in _bare:
        return None
    # The kernel takes features to lie side by side; and somebody may have told torch to take another one.
    if not (q.is_cpu and q.is_contiguous() and k.is_contiguous() and v.is_contiguous() and _allowed()):
        return None
    out, lse = FLASH(q, k, v, 0.0, causal)
    if out.requires_grad:
        if not says_enough(lse.detach()):
            return None
        mark(out)
    return out


def look(
    q: Any, k: Any, v: Any, wants_lse: bool, mask: Any, bias: Any, causal: Any, window: Any, q_offset: Any,
    kv_lengths: Any, q_segments: Any, kv_segments: Any, sinks: Any, scale: Any, softcap: Any, dropout_rate: Any,
    dropout_key: Any, kernel: Any,
) -> tuple[Form | None, Known | None]:  # fmt: skip
    """The form of a call, None where it has to be checked anew, and what is known of it. Not while torch traces."""
    # Under a transform shapes are those of one element; under a dispatch mode tensors may have no values; forward mode
    # asks for operations that have one.
    if dropout_key is not None or _transforms() is not None or _dispatched() or forward_ad._current_level >= 0:
        return None, None
    try:
        at = type(q_offset)
        if at is Tensor:
            q_offset = (q_offset.shape, q_offset.dtype)
        arrays: Any = None
        if not mask is bias is kv_lengths is q_segments is kv_segments is sinks is None:
            arrays = (
                None if mask is None else (type(mask), mask.shape, mask.dtype),
                None if bias is None else (type(bias), bias.shape, bias.dtype, bias.requires_grad and _graded()),
                None if kv_lengths is None else (type(kv_lengths), kv_lengths.shape, kv_lengths.dtype),
                None if q_segments is None else (type(q_segments), q_segments.shape, q_segments.dtype),
                None if kv_segments is None else (type(kv_segments), kv_segments.shape, kv_segments.dtype),
                None if sinks is None else (type(sinks), sinks.shape, sinks.dtype, _wanted(q, k, v, sinks)),
            )
        name = (
            type(q), type(k), type(v), q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device,
            q.is_contiguous(), causal, type(causal),
            None if window is None else (type(window), *window, *map(type, window)), q_offset, at,
            scale, type(scale), softcap, type(softcap), dropout_rate, type(dropout_rate), kernel, wants_lse, arrays,
        )  # fmt: skip
        return name, _known.get(name)
    except (AttributeError, TypeError):  # no tensor where one should be, or nothing that has a hash: the checks say so
        return None, None


def keep(name: Form | None, known: Known, q: Any, k: Any, v: Any, options: tuple[Any, ...]) -> None:
    """Remember the form of a call that was found right, where it says all; where they are too many, forget them."""
    if name is None or not _tells(q, k, v, *options):
        return
    if len(_known) >= MOST:
        _known.clear()
        _bare.clear()
    _known[name] = known
    others = (*options[:2], *options[3:11], *options[12:-1])
    # Of a contiguous q, as `bare` asks for: of another one the choice may be another.
    served = known.kernel == "sdpa" and known.short is not None and q.is_cpu and q.is_contiguous()
    if served and options[-1] == "auto" and all(x is None for x in others):
        # Eager, or it would have no name, and of torch's and Python's own types, or it would not be kept.
        _bare.add((q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, options[2], bool))


def _tells(
    q: Any, k: Any, v: Any, mask: Any, bias: Any, causal: Any, window: Any, q_offset: Any, kv_lengths: Any,
    q_segments: Any, kv_segments: Any, sinks: Any, scale: Any, softcap: Any, dropout_rate: Any, dropout_key: Any,
    kernel: Any,
) -> bool:  # fmt: skip
    """Whether a call is of plain tensors and of numbers of Python's own types, which are what they were."""
    arrays = (x for x in (mask, bias, kv_lengths, q_segments, kv_segments, sinks) if x is not None)
    return (
        type(q) is type(k) is type(v) is Tensor
        and all(type(x) in _TENSORS for x in arrays)
        and type(causal) is bool
        and (window is None or (type(window) is tuple and {type(side) for side in window} <= _SIDES))
        and (type(q_offset) in _SIDES or (type(q_offset) is Tensor and q_offset.dim() > 0))
        and {type(scale), type(softcap)} <= _NUMBERS
        and type(dropout_rate) is float
        and dropout_rate == 0.0
        and dropout_key is None
        and type(kernel) is str
    )
