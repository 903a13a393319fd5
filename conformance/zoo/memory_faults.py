"""Faults of how arrays lie in memory: axes in another order, strides that nobody looks at, arguments written into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import core_numpy as core
from core_numpy import gradients

from .faults import Fault, Row, from_rows
from .naive import Naive, functions


class InputsTransposed(Naive):
    """(B, T, H, D) is read, and written: heads and positions have changed places."""

    def __init__(self, q: np.ndarray, k: np.ndarray, v: np.ndarray | None, **arguments: Any) -> None:
        turned = [x if x is None or x.ndim < 3 else np.swapaxes(x, -3, -2) for x in (q, k, v)]
        super().__init__(*turned, **arguments)  # type: ignore[arg-type]

    def give(self, name: str, value: np.ndarray) -> np.ndarray:
        given = super().give(name, value)
        return np.swapaxes(given, -3, -2) if name == "out" and not self.flat else given


class OutputTransposed(Naive):
    """The axes are not turned back."""

    def give(self, name: str, value: np.ndarray) -> np.ndarray:
        given = super().give(name, value)
        return np.swapaxes(given, -3, -2) if name == "out" and not self.flat else given


class OutputViewed(Naive):
    """Turned back by a view: the right shape, other elements."""

    def give(self, name: str, value: np.ndarray) -> np.ndarray:
        given = super().give(name, value)
        return np.swapaxes(given, -3, -2).reshape(given.shape) if name == "out" and not self.flat else given


def _of_output(kind: type[Naive]) -> dict[str, Any]:
    return {name: made for name, made in functions(kind).items() if name != "attention_weights"}


# --- strides
def as_contiguous(x: Any) -> Any:
    """What a kernel reads that takes a pointer and a shape: the array's memory from its first element on."""
    if not isinstance(x, np.ndarray) or x.flags.c_contiguous or not x.size:
        return x
    dense = np.empty(x.shape, x.dtype).strides
    reach = sum((n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True))
    if min(x.strides) <= 0 or reach < x.nbytes - x.itemsize:  # it would read what is not the array's
        return x
    return np.lib.stride_tricks.as_strided(x, x.shape, dense)


def as_rows(x: Any) -> Any:
    """The same by a kernel that copies what is not contiguous along its last axis, and looks no further."""
    if isinstance(x, np.ndarray) and x.ndim and x.strides[-1] != x.itemsize:
        return np.ascontiguousarray(x)
    return as_contiguous(x)


def _reading(read: Callable[[Any], Any], *names: str, only: tuple[str, ...] = ()) -> dict[str, Any]:
    """The reference's functions on what `read` makes of their arrays; only: of these keywords alone."""

    def of(name: str) -> Any:
        def function(*given: Any, **named: Any) -> Any:
            changed = [x if only else read(x) for x in given]
            return getattr(core, name)(*changed, **{n: read(x) if n in only else x for n, x in named.items()})

        return function

    return {name: of(name) for name in names}


_ATTENTION = ("attention", "attention_weights", "attention_with_lse")


# --- arguments written into
def _writing(write: Callable[..., None], *names: str) -> dict[str, Any]:
    """The reference's functions, whose arguments are overwritten on the way."""

    def of(name: str) -> Any:
        def function(*given: Any, **named: Any) -> Any:
            result = getattr(core, name)(*given, **named)
            write(*given, **named)
            return result

        return function

    return {name: of(name) for name in names}


def _scale_queries(q: np.ndarray, *rest: Any, scale: Any = None, **named: Any) -> None:
    q *= np.asarray(q.shape[-1] ** -0.5 if scale is None else scale).astype(q.dtype)


def _clear_values(q: np.ndarray, k: np.ndarray, v: Any = None, *, kv_lengths: Any = None, **named: Any) -> None:
    """Of the padding."""
    if v is not None and kv_lengths is not None:
        beyond = np.arange(v.shape[-2]) >= np.asarray(kv_lengths)[..., None, None]
        np.copyto(v, v.dtype.type(0), where=beyond[..., None])


def _join_mask(q: np.ndarray, k: np.ndarray, *rest: Any, mask: Any = None, causal: bool = False, **named: Any) -> None:
    shape = (q.shape[-2], k.shape[-2])
    if mask is not None and causal and mask.shape[-2:] == shape:
        mask &= np.tri(*shape, dtype=bool)


def _mask_bias(q: np.ndarray, k: np.ndarray, *rest: Any, mask: Any = None, bias: Any = None, **named: Any) -> None:
    if mask is not None and bias is not None and np.broadcast_shapes(mask.shape, bias.shape) == bias.shape:
        np.copyto(bias, bias.dtype.type(-np.inf), where=~mask)


def _subtract_maximum(x: np.ndarray, **named: Any) -> None:
    top = x.max(axis=named.get("axis", -1), keepdims=True, initial=-np.inf)
    x -= np.where(np.isfinite(top), top, 0).astype(x.dtype)


def _centre(x: np.ndarray, *rest: Any, **named: Any) -> None:
    x -= x.mean(axis=-1, keepdims=True).astype(x.dtype)


def _rectify(x: np.ndarray) -> None:
    np.maximum(x, x.dtype.type(0), out=x)


def _drop(x: np.ndarray, rate: float, key: Any, **named: Any) -> None:
    x[...] = core.dropout(x, rate, key, **named)


def _sum_into_first(outs: list[np.ndarray], lses: list[np.ndarray]) -> None:
    outs[0][...] = core.merge_attention(outs, lses)[0]


def _overwriting_upstream(name: str) -> Callable[..., Any]:
    """The upstream gradient serves as room for dO . O, or for the mask."""

    def vjp(grad: np.ndarray, *rest: Any, **named: Any) -> Any:
        got = getattr(gradients, name)(grad, *rest, **named)
        grad *= grad.dtype.type(0.5)
        return got

    return vjp


_WRITTEN = "the contract is that no argument changes"
_ROWS: list[Row] = [
    ("layout-inputs", "(B, T, H, D) for (B, H, T, D) [flash-attention]",
     "blatant", _of_output(InputsTransposed),
     "q, k and v are read as (B, T, H, D), and the output written so; the contract is (B, H, T, D)"),
    ("layout-output", "(B, T, H, D) for (B, H, T, D), on the way out alone",
     "blatant", _of_output(OutputTransposed),
     "the output comes back as (B, T, H, D); the contract is (B, H, T, D)"),
    ("layout-output-viewed", "a view where a transposition was meant",
     "blatant", _of_output(OutputViewed),
     "the output's (B, T, H, D) is viewed as (B, H, T, D), not transposed: the right shape, elements elsewhere"),
    ("strides-ignored", "a pointer and a shape, and no strides",
     "subtle", _reading(as_contiguous, *_ATTENTION),
     "q, k and v are read as if they were contiguous; the contract is any strides"),
    ("strides-of-rows-ignored", "only the last axis is asked whether it is contiguous",
     "rare", _reading(as_rows, *_ATTENTION),
     "q, k and v are read as if heads and positions lay one behind the other; the contract is any strides"),
    ("strides-of-masks-ignored", "a pointer and a shape, and no strides, for masks and biases",
     "rare", _reading(as_contiguous, *_ATTENTION, only=("mask", "bias")),
     "masks and biases are read as if they were contiguous; the contract is any strides"),
    ("layer-norm-strides-ignored", "a pointer and a shape, and no strides",
     "subtle", _reading(as_contiguous, "layer_norm"),
     "layer_norm reads its arrays as if they were contiguous; the contract is any strides"),
    ("rms-norm-strides-ignored", "a pointer and a shape, and no strides",
     "subtle", _reading(as_contiguous, "rms_norm"),
     "rms_norm reads its arrays as if they were contiguous; the contract is any strides"),
    ("rotary-strides-ignored", "heads behind positions, as a projection leaves them, read the other way round",
     "rare", _reading(as_rows, "apply_rotary"),
     "apply_rotary reads heads and positions as if they lay one behind the other; the contract is any strides"),
    ("overwrites-queries", "queries scaled in place",
     "subtle", _writing(_scale_queries, *_ATTENTION), f"q is scaled in place; {_WRITTEN}"),
    ("overwrites-values", "values of padding cleared in place",
     "rare", _writing(_clear_values, *_ATTENTION), f"values past kv_lengths are set to 0 in place; {_WRITTEN}"),
    ("overwrites-mask", "causality joined to the caller's mask in place",
     "rare", _writing(_join_mask, *_ATTENTION), f"causality is written into the mask that was given; {_WRITTEN}"),
    ("overwrites-bias", "a mask written into the caller's bias",
     "rare", _writing(_mask_bias, *_ATTENTION), f"the mask is written into the bias that was given; {_WRITTEN}"),
    ("gradient-overwrites", "the upstream gradient used as room for something else",
     "subtle", {f"gradients.{name}_vjp": _overwriting_upstream(f"{name}_vjp") for name in _ATTENTION},
     f"the backward pass writes into the upstream gradient; {_WRITTEN}"),
    ("merge-overwrites", "parts summed into the first one",
     "subtle", _writing(_sum_into_first, "merge_attention"), f"merged parts are summed into the first one; {_WRITTEN}"),
    ("softmax-overwrites", "the maximum subtracted in place",
     "subtle", _writing(_subtract_maximum, "softmax"), f"softmax subtracts the maximum in place; {_WRITTEN}"),
    ("layer-norm-overwrites", "the mean subtracted in place",
     "subtle", _writing(_centre, "layer_norm"), f"layer_norm subtracts the mean in place; {_WRITTEN}"),
    ("relu-overwrites", "inplace=True",
     "subtle", _writing(_rectify, "relu"), f"relu writes its result over its argument; {_WRITTEN}"),
    ("layer-dropout-overwrites", "inplace=True",
     "subtle", _writing(_drop, "dropout"), f"dropout writes its result over its argument; {_WRITTEN}"),
]  # fmt: skip


def faults() -> list[Fault]:
    return from_rows(_ROWS)
