"""What the encodings refuse, in every package: rows of (id, function, positional, keywords, exception, phrase).

Arrays are NumPy's; a test converts them to its framework's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from core_numpy.contract.config import RotaryScaling

Row = tuple[str, str, Callable[[], tuple[Any, ...]], dict[str, Any], type[Exception], str]

NAN = float("nan")


def _f(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype=dtype)


def _i(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def _a(*arguments: Any) -> Callable[[], tuple[Any, ...]]:
    return lambda: arguments


TABLE = _f(5, 3)
LONG = RotaryScaling(kind="longrope", original_max_length=8, short_factors=(1.0, 2.0), long_factors=(1.0, 4.0))
SHORT = LONG.replace(original_max_length=1, factor=2.0)
YARN = RotaryScaling(kind="yarn", factor=2.0, original_max_length=8)
ROTATE = _a(_f(2, 4, 3, 6), _f(3, 2), _f(3, 2))
HALF_TO_PAIRS = {"source": "half", "target": "interleaved"}

ROWS: list[Row] = [
    # embed
    ("id-past-the-table", "embed", _a(TABLE, _i(0, 5)), {}, ValueError, "ids must be from 0 to 4"),
    ("id-negative", "embed", _a(TABLE, _i(-1, 2)), {}, ValueError, "got values from -1 to 2"),
    ("ids-float", "embed", _a(TABLE, _f(2)), {}, TypeError, "ids must hold integers"),
    ("ids-boolean", "embed", _a(TABLE, _f(2, dtype=bool)), {}, TypeError, "ids must hold integers"),
    ("ids-list", "embed", _a(TABLE, [0, 1]), {}, TypeError, "ids must be an array"),
    ("table-integer", "embed", _a(_i(1, 2), _i(0)), {}, TypeError, "table must be one of float16"),
    ("table-rank-3", "embed", _a(_f(5, 3, 2), _i(0)), {}, ValueError, "table must have shape (V, W)"),
    # sinusoidal_encoding
    ("positions-float", "sinusoidal_encoding", _a(_f(3), 4), {}, TypeError, "positions must hold integers"),
    ("positions-list", "sinusoidal_encoding", _a([0, 1], 4), {}, TypeError, "positions must be an array"),
    ("width-0", "sinusoidal_encoding", _a(_i(0, 1), 0), {}, ValueError, "width must be an integer of at least 1"),
    ("width-float", "sinusoidal_encoding", _a(_i(0, 1), 4.0), {}, TypeError, "width must be an integer"),
    ("sinusoidal-base-0", "sinusoidal_encoding", _a(_i(0, 1), 4), {"base": 0.0}, ValueError, "base must be a finite"),
    ("sinusoidal-base-nan", "sinusoidal_encoding", _a(_i(0, 1), 4), {"base": NAN}, ValueError, "base must be a finite"),
    ("sinusoidal-layout", "sinusoidal_encoding", _a(_i(0), 4), {"layout": "interleave"}, ValueError, "'interleaved'?"),
    ("sinusoidal-dtype", "sinusoidal_encoding", _a(_i(0), 4), {"dtype": "float23"}, ValueError, "did you mean 'float"),
    (
        "sinusoidal-integers",
        "sinusoidal_encoding",
        _a(_i(0), 4),
        {"dtype": "int32"},
        ValueError,
        "dtype must be one of",
    ),
    # rotary_frequencies
    ("dim-odd", "rotary_frequencies", _a(7), {}, ValueError, "dim must be even"),
    ("dim-0", "rotary_frequencies", _a(0), {}, ValueError, "dim must be an integer of at least 2"),
    ("dim-float", "rotary_frequencies", _a(4.0), {}, TypeError, "dim must be an integer"),
    ("base-0", "rotary_frequencies", _a(4), {"base": 0.0}, ValueError, "base must be a finite number above 0"),
    (
        "base-negative",
        "rotary_frequencies",
        _a(4),
        {"base": -10000},
        ValueError,
        "base must be a finite number above 0",
    ),
    ("base-text", "rotary_frequencies", _a(4), {"base": "10000"}, TypeError, "base must be a finite number above 0"),
    ("length-0", "rotary_frequencies", _a(4), {"length": 0}, ValueError, "length must be an integer of at least 1"),
    ("scaling-text", "rotary_frequencies", _a(4), {"scaling": "yarn"}, TypeError, "RotaryScaling(kind='yarn'"),
    ("scaling-dict", "rotary_frequencies", _a(4), {"scaling": {}}, TypeError, "RotaryScaling.from_dict"),
    ("factors-too-few", "rotary_frequencies", _a(6), {"scaling": LONG}, ValueError, "3 short and long factors"),
    ("longrope-length-1", "rotary_frequencies", _a(4), {"scaling": SHORT}, ValueError, "original_max_length above 1"),
    ("yarn-base-1", "rotary_frequencies", _a(4), {"scaling": YARN, "base": 1}, ValueError, "base must be above 1"),
    # rotary_tables
    ("table-positions-float", "rotary_tables", _a(_f(3), _f(2)), {}, TypeError, "positions must hold integers"),
    ("frequencies-integer", "rotary_tables", _a(_i(0), _i(1)), {}, TypeError, "frequencies must be one of"),
    (
        "frequencies-rank-2",
        "rotary_tables",
        _a(_i(0), _f(2, 2)),
        {},
        ValueError,
        "frequencies must have shape (dim/2,)",
    ),
    ("factor-0", "rotary_tables", _a(_i(0), _f(2)), {"attention_factor": 0.0}, ValueError, "attention_factor must be"),
    # apply_rotary
    ("layout-unknown", "apply_rotary", ROTATE, {"layout": "halves"}, ValueError, "did you mean 'half'?"),
    (
        "rotated-past-the-head",
        "apply_rotary",
        _a(_f(2, 3, 6), _f(3, 4), _f(3, 4)),
        {},
        ValueError,
        "head size of x (6)",
    ),
    (
        "sin-other-shape",
        "apply_rotary",
        _a(_f(2, 3, 6), _f(3, 2), _f(3, 3)),
        {},
        ValueError,
        "sin must have shape (3, 2)",
    ),
    (
        "tables-other-length",
        "apply_rotary",
        _a(_f(2, 3, 6), _f(4, 2), _f(4, 2)),
        {},
        ValueError,
        "cos must have shape (3",
    ),
    ("tables-of-a-batch", "apply_rotary", _a(_f(2, 4, 3, 6), _f(5, 3, 2), _f(5, 3, 2)), {}, ValueError, "(2, 3, r)"),
    ("tables-with-heads", "apply_rotary", _a(_f(2, 3, 6), _f(2, 3, 2), _f(2, 3, 2)), {}, ValueError, "(3, r)"),
    ("tables-rank-1", "apply_rotary", _a(_f(2, 3, 6), _f(2), _f(2)), {}, ValueError, "cos must have shape"),
    ("x-rank-1", "apply_rotary", _a(_f(6), _f(1, 2), _f(1, 2)), {}, ValueError, "x must have shape"),
    ("x-integer", "apply_rotary", _a(_i(1, 2), _f(1, 2), _f(1, 2)), {}, TypeError, "x must be one of float16"),
    # permute_rotary
    ("source-unknown", "permute_rotary", _a(_f(3, 8), 2), HALF_TO_PAIRS | {"source": "hlaf"}, ValueError, "'half'?"),
    (
        "target-unknown",
        "permute_rotary",
        _a(_f(3, 8), 2),
        HALF_TO_PAIRS | {"target": "neox"},
        ValueError,
        "target must",
    ),
    ("permute-heads-0", "permute_rotary", _a(_f(3, 8), 0), HALF_TO_PAIRS, ValueError, "heads must be an integer of at"),
    ("permute-heads-3", "permute_rotary", _a(_f(3, 8), 3), HALF_TO_PAIRS, ValueError, "a multiple of heads (3)"),
    ("permute-odd-size", "permute_rotary", _a(_f(3, 10), 2), HALF_TO_PAIRS, ValueError, "rotary_dim must be even"),
    (
        "permute-too-many",
        "permute_rotary",
        _a(_f(3, 8), 2),
        HALF_TO_PAIRS | {"rotary_dim": 6},
        ValueError,
        "at most the",
    ),
    ("permute-rank-3", "permute_rotary", _a(_f(3, 2, 8), 2), HALF_TO_PAIRS, ValueError, "weight must have shape (in,"),
    # alibi
    ("slopes-of-0-heads", "alibi_slopes", _a(0), {}, ValueError, "heads must be an integer of at least 1"),
    ("slopes-of-true", "alibi_slopes", _a(True), {}, TypeError, "heads must be an integer"),
    ("alibi-0-heads", "alibi_bias", _a(0, 3), {}, ValueError, "heads must be an integer of at least 1"),
    ("alibi-negative-T", "alibi_bias", _a(2, -3), {}, ValueError, "T must be an integer of at least 0"),
    ("alibi-float-offset", "alibi_bias", _a(2, 3), {"q_offset": 1.5}, TypeError, "q_offset must be an array"),
    ("alibi-offset-rank-2", "alibi_bias", _a(2, 3), {"q_offset": np.zeros((2, 1), np.int32)}, ValueError, "shape (B,)"),
    ("alibi-dtype", "alibi_bias", _a(2, 3), {"dtype": "float"}, ValueError, "dtype must be one of"),
    # relative
    ("buckets-odd", "relative_buckets", _a(3), {"buckets": 7}, ValueError, "buckets must be even and at least 4"),
    (
        "buckets-2-both-ways",
        "relative_buckets",
        _a(3),
        {"buckets": 2},
        ValueError,
        "buckets must be even and at least 4",
    ),
    ("buckets-1", "relative_buckets", _a(3), {"buckets": 1, "bidirectional": False}, ValueError, "of at least 2"),
    ("max-distance-exact", "relative_buckets", _a(3), {"max_distance": 8}, ValueError, "max_distance must be above 8"),
    (
        "max-distance-float",
        "relative_buckets",
        _a(3),
        {"max_distance": 128.0},
        TypeError,
        "max_distance must be an int",
    ),
    (
        "bidirectional-1",
        "relative_buckets",
        _a(3),
        {"bidirectional": 1},
        TypeError,
        "bidirectional must be True or False",
    ),
    ("table-of-31", "relative_bias", _a(_f(31, 2), 3), {}, ValueError, "table must have shape (32, H)"),
    ("table-of-integers", "relative_bias", _a(_i(1), 3), {}, TypeError, "table must be one of float16"),
]
