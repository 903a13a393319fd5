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
    """What follows from a form. left, right: the band, as in `Visibility`."""

    plan: AttentionPlan
    kernel: str
    left: int | None
    right: int | None


_known: dict[Form, Known] = {}
# Calls that torch's fused kernel takes as they are, all other arguments those by default: (shapes of q, k and v, dtype,
# whether on the CPU, causal, q_offset) -> (is_causal, enable_gqa, scale).
_plain: dict[Form, tuple[bool, bool, float]] = {}

_transforms = torch._C._functorch.peek_interpreter_stack
_autocast = torch._C._is_any_autocast_enabled


def plain_form(q: Any, k: Any, v: Any, causal: Any, q_offset: Any, dropout_rate: Any) -> Form | None:
    """The key of a call whose other arguments are those by default, or None. Not for use while torch.compile traces."""
    if type(q) is not Tensor or type(k) is not Tensor or type(v) is not Tensor:
        return None
    if type(causal) is not bool or type(q_offset) not in _SIDES or type(dropout_rate) is not float:
        return None
    dtype = q.dtype
    if k.dtype is not dtype or v.dtype is not dtype or _transforms() is not None or _autocast():
        return None
    return (q.shape, k.shape, v.shape, dtype, q.is_cpu, causal, q_offset)


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
    if _transforms() is not None:  # shapes are those of one element there
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


def recall_plain(name: Form | None) -> tuple[bool, bool, float] | None:
    return None if name is None else _plain.get(name)


def keep(name: Form | None, known: Known) -> None:
    """Remember a form that was found right."""
    _keep(_known, name, known)


def keep_plain(name: Form | None, rest: tuple[bool, bool, float] | None) -> None:
    """Remember a plain call that was found right, and to be torch's own."""
    if rest is not None:
        _keep(_plain, name, rest)


def _keep(forms: dict[Form, Any], name: Form | None, found: Any) -> None:
    """Where they are too many, all are forgotten."""
    if name is None:
        return
    if len(forms) >= MOST:
        forms.clear()
    forms[name] = found
