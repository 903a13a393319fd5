"""What `attention` refuses: rows of (id, arguments, exception, phrase), the same for every package.

`arguments()` gives plain NumPy arrays and Python values, positional ones under "q", "k" and "v"; a test converts the
arrays to its framework's own and expects the exception with the phrase in its sentence. Shapes: B2 H4 G2 T3 S5 D6 Dv7.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Row = tuple[str, Callable[[], dict[str, Any]], type[Exception], str]


def _ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype=dtype)


def valid() -> dict[str, Any]:
    """What no package refuses; every row changes or adds arguments."""
    return {"q": _ones(2, 4, 3, 6), "k": _ones(2, 2, 5, 6), "v": _ones(2, 2, 5, 7)}


def _with(**changes: Any) -> Callable[[], dict[str, Any]]:
    return lambda: valid() | changes


def _square(**changes: Any) -> Callable[[], dict[str, Any]]:
    """T = S = 5, so that causal and window need no offset."""
    return lambda: valid() | {"q": _ones(2, 4, 5, 6)} | changes


KEY = np.array([0, 1], dtype=np.uint32)
NAN, INF = float("nan"), float("inf")
LENGTHS = np.array([5, 2], dtype=np.int32)
SEGMENTS = {"q_segments": _ones(2, 3, dtype=np.int32), "kv_segments": _ones(2, 5, dtype=np.int32)}

ROWS: list[Row] = [
    # q, k, v
    ("q-list", _with(q=[[1.0, 2.0]]), TypeError, "q must be an array"),
    (
        "q-integer",
        _with(q=_ones(2, 4, 3, 6, dtype=np.int32)),
        TypeError,
        "q must be one of float16, bfloat16, float32, float64; got int32 (2, 4, 3, 6): convert it to one of them",
    ),
    ("k-integer", _with(k=_ones(2, 2, 5, 6, dtype=np.int32)), TypeError, "k must be one of float16"),
    ("v-boolean", _with(v=_ones(2, 2, 5, 7, dtype=bool)), TypeError, "v must be one of float16"),
    ("q-complex", _with(q=_ones(2, 4, 3, 6, dtype=np.complex64)), TypeError, "q must be one of float16"),
    ("k-other-dtype", _with(k=_ones(2, 2, 5, 6, dtype=np.float16)), TypeError, "k must have the dtype of q (float32)"),
    ("v-other-dtype", _with(v=_ones(2, 2, 5, 7, dtype=np.float16)), TypeError, "v must have the dtype of q (float32)"),
    (
        "q-rank-1",
        _with(q=_ones(6), k=_ones(6), v=_ones(7)),
        ValueError,
        "q must have at least two axes: (length, size) or (..., heads, length, size); got q (6,)",
    ),
    ("k-other-rank", _with(k=_ones(2, 5, 6)), ValueError, "k must have the rank of q"),
    ("v-other-rank", _with(v=_ones(5, 7)), ValueError, "v must have the rank of q"),
    ("k-other-batch", _with(k=_ones(1, 2, 5, 6)), ValueError, "k must have the batch axes of q, (2,)"),
    ("v-other-batch", _with(v=_ones(3, 2, 5, 7)), ValueError, "v must have the batch axes of q, (2,)"),
    ("head-size-0", _with(q=_ones(2, 4, 3, 0), k=_ones(2, 2, 5, 0)), ValueError, "head size of at least 1"),
    ("k-other-head-size", _with(k=_ones(2, 2, 5, 8)), ValueError, "k must have the head size of q, 6"),
    (
        "heads-not-a-multiple",
        _with(k=_ones(2, 3, 5, 6), v=_ones(2, 3, 5, 7)),
        ValueError,
        "H=4 query heads and G=3 key/value heads (the axes are ..., heads, length, size)",
    ),
    ("more-key-heads", _with(k=_ones(2, 8, 5, 6), v=_ones(2, 8, 5, 7)), ValueError, "H=4 query heads and G=8"),
    ("no-heads", _with(q=_ones(2, 0, 3, 6)), ValueError, "H=0 query heads"),
    ("no-key-heads", _with(k=_ones(2, 0, 5, 6), v=_ones(2, 0, 5, 7)), ValueError, "G=0 key/value heads"),
    ("v-other-heads", _with(v=_ones(2, 4, 5, 7)), ValueError, "v must have as many heads as k, 2"),
    ("v-other-length", _with(v=_ones(2, 2, 6, 7)), ValueError, "v must have the length of k, 5"),
    # mask
    ("mask-float", _with(mask=_ones(3, 5)), TypeError, "bias="),
    ("mask-float-blocked", _with(mask=_ones(3, 5)), TypeError, "from_blocked"),
    ("mask-integer", _with(mask=_ones(3, 5, dtype=np.int32)), TypeError, "mask must be boolean, True = may attend"),
    ("mask-text", _with(mask="causal"), TypeError, "mask must be an array"),
    ("mask-rank-3-batch", _with(mask=_ones(2, 3, 5, dtype=bool)), ValueError, "is batch, reshape to (2, 1, 3, 5)"),
    ("mask-rank-3-heads", _with(mask=_ones(4, 3, 5, dtype=bool)), ValueError, "heads, to (1, 4, 3, 5)"),
    ("mask-rank-1", _with(mask=_ones(5, dtype=bool)), ValueError, "mask must have rank 2 (3, 5)"),
    ("mask-rank-5", _with(mask=_ones(1, 2, 4, 3, 5, dtype=bool)), ValueError, "the full rank 4 (2, 4, 3, 5)"),
    ("mask-transposed", _with(mask=_ones(5, 3, dtype=bool)), ValueError, "mask must broadcast to (3, 5)"),
    ("mask-padding", _with(mask=_ones(2, 5, dtype=bool)), ValueError, "of (batch, keys) make mask[:, None, None, :]"),
    ("mask-key-heads", _with(mask=_ones(2, 2, 3, 5, dtype=bool)), ValueError, "mask must broadcast to (2, 4, 3, 5)"),
    # bias
    ("bias-boolean", _with(bias=_ones(3, 5, dtype=bool)), TypeError, "A boolean mask goes in mask="),
    ("bias-integer", _with(bias=_ones(3, 5, dtype=np.int32)), TypeError, "bias must be floating"),
    ("bias-number", _with(bias=1.0), TypeError, "bias must be an array"),
    ("bias-rank-3", _with(bias=_ones(4, 3, 5)), ValueError, "bias must have rank 2 (3, 5)"),
    ("bias-shape", _with(bias=_ones(1, 4, 3, 6)), ValueError, "bias must broadcast to (2, 4, 3, 5)"),
    ("bias-nan", _with(bias=np.full((3, 5), NAN, np.float32)), ValueError, "bias must not hold NaN"),
    # causal, window, q_offset
    ("causal-text", _square(causal="yes"), TypeError, "causal must be True or False"),
    ("causal-number", _square(causal=1), TypeError, "causal must be True or False"),
    ("causal-none", _square(causal=None), TypeError, "causal must be True or False"),
    ("causal-two-readings-0", _with(causal=True), ValueError, "q_offset=0 is the top-left reading"),
    ("causal-two-readings-2", _with(causal=True), ValueError, "q_offset=2 the bottom-right one"),
    ("window-two-readings", _with(window=(1, 1)), ValueError, "q_offset must be given with causal or window"),
    ("window-number", _square(window=3), TypeError, "window must be None or (left, right)"),
    ("window-one", _square(window=(3,)), TypeError, "window must be None or (left, right)"),
    ("window-fraction", _square(window=(1.5, 0)), TypeError, "window's left side must be an integer"),
    ("window-bool", _square(window=(True, 0)), TypeError, "window's left side must be an integer"),
    ("window-negative", _square(window=(0, -1)), ValueError, "window's right side must be an integer of at least 0"),
    ("offset-fraction", _with(causal=True, q_offset=1.5), TypeError, "q_offset must be an integer"),
    ("offset-bool", _with(causal=True, q_offset=True), TypeError, "q_offset must be an integer"),
    ("offset-float", _with(causal=True, q_offset=_ones(2)), TypeError, "q_offset must hold integers"),
    ("offset-shape", _with(causal=True, q_offset=LENGTHS[:1]), ValueError, "q_offset must have shape (2,)"),
    # kv_lengths, segments
    ("lengths-list", _with(kv_lengths=[5, 2]), TypeError, "kv_lengths must be an array"),
    ("lengths-int", _with(kv_lengths=2), TypeError, "got int 2: integers of shape"),
    ("lengths-float", _with(kv_lengths=_ones(2)), TypeError, "kv_lengths must hold integers"),
    ("lengths-shape", _with(kv_lengths=LENGTHS[:1]), ValueError, "kv_lengths must have shape (2,)"),
    ("lengths-negative", _with(kv_lengths=LENGTHS - 3), ValueError, "kv_lengths must be from 0 to the key length 5"),
    ("lengths-past-keys", _with(kv_lengths=LENGTHS + 1), ValueError, "got values from 3 to 6"),
    ("segments-one", _with(q_segments=SEGMENTS["q_segments"]), ValueError, "kv_segments must be given with q_segments"),
    ("segments-other", _with(kv_segments=SEGMENTS["kv_segments"]), ValueError, "q_segments must be given with kv_seg"),
    ("segments-float", _with(**SEGMENTS | {"q_segments": _ones(2, 3)}), TypeError, "q_segments must hold integers"),
    (
        "segments-unsigned",
        _with(**SEGMENTS | {"kv_segments": _ones(2, 5, dtype=np.uint8)}),
        TypeError,
        "kv_segments must hold signed integers",
    ),
    (
        "segments-shape",
        _with(**SEGMENTS | {"kv_segments": SEGMENTS["q_segments"]}),
        ValueError,
        "kv_segments must have shape (2, 5)",
    ),
    # sinks, scale, softcap
    ("sinks-integer", _with(sinks=_ones(4, dtype=np.int32)), TypeError, "sinks must be one of float16"),
    ("sinks-shape", _with(sinks=_ones(2)), ValueError, "sinks must have shape (4,) (one logit per query head)"),
    ("sinks-nan", _with(sinks=np.full(4, NAN, np.float32)), ValueError, "sinks must not hold NaN"),
    ("scale-nan", _with(scale=NAN), ValueError, "scale must be a finite number or None"),
    ("scale-infinite", _with(scale=INF), ValueError, "scale must be a finite number or None"),
    ("scale-text", _with(scale="1/8"), TypeError, "scale must be a finite number or None"),
    ("scale-bool", _with(scale=True), TypeError, "scale must be a finite number or None"),
    ("softcap-0", _with(softcap=0.0), ValueError, "softcap must be a finite number above 0 or None"),
    ("softcap-negative", _with(softcap=-30.0), ValueError, "softcap must be a finite number above 0 or None"),
    ("softcap-nan", _with(softcap=NAN), ValueError, "softcap must be a finite number above 0 or None"),
    ("softcap-text", _with(softcap="30"), TypeError, "softcap must be a finite number above 0 or None"),
    # dropout, kernel
    ("dropout-negative", _with(dropout_rate=-0.1, dropout_key=KEY), ValueError, "dropout_rate must be a number from 0"),
    ("dropout-above-1", _with(dropout_rate=1.5, dropout_key=KEY), ValueError, "dropout_rate must be a number from 0"),
    ("dropout-nan", _with(dropout_rate=NAN, dropout_key=KEY), ValueError, "dropout_rate must be a number from 0 to 1"),
    ("dropout-text", _with(dropout_rate="0.1"), TypeError, "dropout_rate must be a number from 0 to 1"),
    ("dropout-without-key", _with(dropout_rate=0.1), ValueError, "dropout_key must be given with dropout_rate > 0"),
    ("key-number", _with(dropout_rate=0.1, dropout_key=3), TypeError, "dropout_key must be a key made by key()"),
    ("key-float", _with(dropout_rate=0.1, dropout_key=_ones(2)), TypeError, "dropout_key must be a key made by key()"),
    ("key-one-word", _with(dropout_rate=0.1, dropout_key=KEY[:1]), TypeError, "two 32-bit words"),
    ("kernel-unknown", _with(kernel="fastest"), ValueError, "kernel must be one of 'auto'"),
    ("kernel-number", _with(kernel=3), TypeError, "kernel must be one of 'auto'"),
]
