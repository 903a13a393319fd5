"""Calls whose form was checked before: an eager call like an earlier one costs a lookup in place of the checks.

A form is all that `attention_plan` and `choose` look at but the values of tensors, which are looked at in every call:
the types, shapes, dtypes and devices of arrays, and the numbers. Only forms that were found right are kept, and only
of arguments whose hash tells them apart from wrong ones (True is 1, and 1 is 1.0): others are checked each time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from core_numpy.contract.checks.attention import AttentionPlan

# So many forms are kept; a program has a few dozen, one whose lengths grow by one in every step has thousands.
MOST = 4096
_NUMBERS = frozenset((int, float, type(None)))
_SIDES = frozenset((int, type(None)))
_TENSORS = frozenset((Tensor, Parameter))

Form = tuple[Any, ...]


class Known(NamedTuple):
    """What follows from a form. plain: (is_causal, enable_gqa) where torch's fused kernel takes q, k and v as they are.

    left, right: the band, as in `Visibility`.
    """

    plan: AttentionPlan
    kernel: str
    left: int | None
    right: int | None
    plain: tuple[bool, bool] | None


_known: dict[Form, Known] = {}


def form(
    q: Any, k: Any, v: Any, wants_lse: bool, mask: Any, bias: Any, causal: Any, window: Any, q_offset: Any,
    kv_lengths: Any, q_segments: Any, kv_segments: Any, sinks: Any, scale: Any, softcap: Any, dropout_rate: Any,
    dropout_key: Any, kernel: Any,
) -> Form | None:  # fmt: skip
    """The form of a call, or None where it has to be checked anew. Not for use while torch.compile traces."""
    if type(q) is not Tensor or type(k) is not Tensor or type(v) is not Tensor:
        return None
    if type(causal) is not bool or type(kernel) is not str or type(dropout_rate) is not float or dropout_rate != 0.0:
        return None
    if dropout_key is not None or type(scale) not in _NUMBERS or type(softcap) not in _NUMBERS:
        return None
    if torch._C._functorch.peek_interpreter_stack() is not None:  # shapes are those of one element there
        return None
    if window is not None and (
        type(window) is not tuple or len(window) != 2 or type(window[0]) not in _SIDES or type(window[1]) not in _SIDES
    ):
        return None
    offset = q_offset
    if type(offset) not in _SIDES:
        if type(offset) is not Tensor or offset.dim() == 0:
            return None
        offset = (offset.shape, offset.dtype)
    rest = None
    if not (mask is bias is kv_lengths is q_segments is kv_segments is sinks is None):
        arrays = (mask, bias, kv_lengths, q_segments, kv_segments, sinks)
        if any(x is not None and type(x) not in _TENSORS for x in arrays):
            return None
        gradient = bias is not None and bias.requires_grad and torch.is_grad_enabled()
        rest = (*(None if x is None else (x.shape, x.dtype) for x in arrays), gradient)
    return (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, causal, window, offset, scale, softcap, kernel,
        wants_lse, rest,
    )  # fmt: skip


def recall(name: Form | None) -> Known | None:
    return None if name is None else _known.get(name)


def keep(name: Form | None, known: Known) -> None:
    """Remember a form that was found right; where they are too many, all are forgotten."""
    if name is None:
        return
    if len(_known) >= MOST:
        _known.clear()
    _known[name] = known
