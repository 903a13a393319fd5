"""How the blockwise kernel cuts its work: sizes of blocks, and which ranges of keys a block of queries visits.

Everything is in the layout q (B, G, r, T, D), k (B, G, S, D), v (B, G, S, Dv) with r = H / G query heads per
key/value head; terms have five axes (B, G, r, T, S), each its size or 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Terms = dict[str, jax.Array]
Window = tuple[int | None, int | None]

# A block of scores of 1 MiB of float32 stays in the second-level cache of current processors (1 to 2 MiB a core).
CACHED_SCORES = 1 << 18
# Measured on x86-64: below 512 rows and columns the matrix products lose speed, above it the scores leave the cache.
CHUNK = 512
# Whole rows of scores need no running maximum; unrolled blocks of 256 rows then waste least of a causal triangle, of
# half as many where there are fewer than four such blocks.
ROWS = 256
ROWS_LONGEST = 2048
# Unrolled blocks cost compile time, some tenths of a second each; a loop over them does not.
UNROLLED = 8
# Below this a block of queries pays more for its loop than for its products.
FEWEST_ROWS = 64
# A bounded window reads one range of keys per block of queries up to this length, beyond it chunks.
SLAB_LONGEST = 1024
# Up to this many pairs of a query and a key, weights are kept for the backward pass instead of made again: at most
# 256 KiB a head in float32, what its queries, keys, values and outputs of size 64 take. Measured on x86-64: ahead up to
# 256 rows and keys, but not where all pairs of many heads (16 MiB) must come back from memory.
WHOLE = 1 << 16
# So many times as many where no band leaves pairs out, on a CPU, all heads in one step: with 512 rows and keys blocks
# take 1.2 to 1.9 of the time forward, and with a bias 1.1 to 1.2 with its gradient.
UNBANDED = 4
MOST_KEPT = 1 << 21
# So many weights that are kept are made at a time, 2 MiB of float32: the passes over them then find them in the cache.
KEPT_SCORES = 1 << 19
# Rows of a block of kept weights, where a band leaves fewer keys to some blocks than to others.
KEPT_ROWS = 64
# Offsets and window sides are cut here, so that a row, an offset and a side add up in 32 bits; lengths are far below.
FAR = 1 << 29


@dataclass(frozen=True)
class Spec:
    """What is static in one call, in the layout above.

    band: (left, right): i - left <= j <= i + right, with causality and a static offset folded in, so either side may
    be negative; an offset that is not static is in the terms. highest: full float32 products on every device.
    on_cpu: work in steps that fit a processor's cache rather than in the widest ones.
    """

    B: int
    G: int
    r: int
    T: int
    S: int
    D: int
    Dv: int
    scale: float
    softcap: float | None
    band: Window | None
    dropout: float
    highest: bool
    on_cpu: bool

    @property
    def precision(self) -> lax.Precision | None:
        return lax.Precision.HIGHEST if self.highest else None


@dataclass(frozen=True)
class Layout:
    """nb, ng: batch elements and key/value heads per step. rows x width: one block of scores.

    ranges: the static range of keys of each block of queries, all blocks unrolled. slab: one range of `width` keys for
    each block of queries, found as it goes. Neither: chunks of `width` keys with a running maximum.
    """

    nb: int
    ng: int
    rows: int
    width: int
    ranges: tuple[tuple[int, int], ...] | None
    slab: bool = False


def fold_band(causal: bool, window: Window | None, offset: int | None, T: int, S: int) -> Window | None:
    """Causality is a window without a left side whose right side is 0; a static offset moves both sides.

    Bounds are cut where they stop mattering, so that any Python integer fits in 32 bits.
    """
    left, right = window if window is not None else (None, None)
    if causal:
        right = 0 if right is None else min(right, 0)
    far = FAR if offset is None else S + T
    if left is not None:
        left = min(max(left - (offset or 0), -far), far)
    if right is not None:
        right = min(max(right + (offset or 0), -far), far)
    return None if left is None and right is None else (left, right)


def keeps_weights(spec: Spec) -> bool:
    """Few scores, and no more keys than a chunk: of a long cache most chunks may be skipped."""
    pairs = spec.T * spec.S
    most = WHOLE if spec.band is not None or not spec.on_cpu else UNBANDED * WHOLE
    few = spec.band is not None or spec.B * spec.G * spec.r * pairs <= MOST_KEPT
    return 0 < pairs <= most and spec.S <= CHUNK and spec.B > 0 and few


def kept_layout(spec: Spec, names: frozenset[str]) -> Layout:
    """The same for weights that are kept: blocks of rows only where a static band gives them fewer keys."""
    nb, ng = _group(spec, spec.T, spec.S, KEPT_SCORES if spec.T * spec.S <= WHOLE else MOST_KEPT)
    ranges = tuple(static_range(spec, i, min(i + KEPT_ROWS, spec.T)) for i in range(0, spec.T, KEPT_ROWS))
    if "q_offset" in names or not all(lo < hi for lo, hi in ranges) or all(hi - lo == spec.S for lo, hi in ranges):
        return Layout(nb, ng, spec.T, spec.S, ((0, spec.S),))
    return Layout(nb, ng, min(KEPT_ROWS, spec.T), max(hi - lo for lo, hi in ranges), ranges)


def every_query_sees(spec: Spec, terms: Terms) -> bool:
    """Whether it is static that no query is without a key."""
    return _always_meets(spec.band, terms, spec.T, spec.S)


def every_key_is_seen(spec: Spec, terms: Terms) -> bool:
    """Whether it is static that no key is without a query: the band seen from the keys has its sides exchanged."""
    return _always_meets(spec.band and spec.band[::-1], terms, spec.S, spec.T)


def _always_meets(band: Window | None, terms: Terms, n: int, m: int) -> bool:
    """Whether [p - left, p + right] meets [0, m) for each p of [0, n), and nothing but the band restricts."""
    if terms.keys() - {"sinks", "dropout_key"}:
        return False
    left, right = band or (None, None)
    return (
        (left is None or n - 1 - left < m)
        and (right is None or right >= 0)
        and (left is None or right is None or left + right >= 0)
    )


def layout(spec: Spec, names: frozenset[str]) -> Layout:
    """Choose the blocks from what is static: lengths, the band, and which terms there are."""
    static = "q_offset" not in names
    rows = _even(spec.T, _most_rows(spec))
    ranges = tuple(static_range(spec, i, min(i + rows, spec.T)) for i in range(0, spec.T, rows)) if static else ()
    if static and (len(ranges) == 1 or not names & {"kv_lengths", "q_segments"}) and len(ranges) <= UNROLLED:
        widest = max(hi - lo for lo, hi in ranges)
        if widest <= ROWS_LONGEST:
            return Layout(*_group(spec, rows, widest), rows, widest, ranges)
    left, right = spec.band or (None, None)
    if static and left is not None and right is not None:
        widest = min(spec.S, max(0, rows + left + right))
        if widest <= SLAB_LONGEST:
            return Layout(*_group(spec, rows, widest), rows, widest, None, slab=True)
    rows, width = _even(spec.T, max(FEWEST_ROWS, CHUNK // spec.r)), _even(spec.S, CHUNK)
    return Layout(*_group(spec, rows, width), rows, width, None)


def _most_rows(spec: Spec) -> int:
    """Rows of a block whose range of keys is static; a few more where that saves the loop over blocks."""
    rows = max(FEWEST_ROWS, min(ROWS, max(ROWS // 2, spec.T // 4)) // spec.r)
    enough = -(-spec.T // max(1, UNROLLED))
    return enough if rows < enough <= CHUNK // spec.r else rows


def _even(length: int, most: int) -> int:
    return -(-length // -(-length // most))


def _group(spec: Spec, rows: int, width: int, cached: int | None = None) -> tuple[int, int]:
    """Batch elements and heads per step: on a CPU as many as keep the scores cached, elsewhere all of them."""
    if not spec.on_cpu:
        return spec.B, spec.G
    fit = max(1, (CACHED_SCORES if cached is None else cached) // max(1, spec.r * rows * width))
    ng = max(n for n in range(1, spec.G + 1) if spec.G % n == 0 and n <= fit)
    if ng < spec.G:
        return 1, ng
    return max(n for n in range(1, spec.B + 1) if spec.B % n == 0 and n <= max(1, fit // ng)), ng


def static_range(spec: Spec, first: int, last: int) -> tuple[int, int]:
    """Keys [lo, hi) that the band lets the queries [first, last) see."""
    left, right = spec.band or (None, None)
    lo = 0 if left is None else min(max(0, first - left), spec.S)
    hi = spec.S if right is None else max(min(spec.S, last + right), lo)
    return lo, hi


def row_starts(spec: Spec, plan: Layout) -> list[int]:
    """Where the blocks of queries begin. The last block of a loop is moved back to end at T."""
    return list(range(0, spec.T, plan.rows))


def start(spec: Spec, plan: Layout, u: jax.Array | int) -> tuple[jax.Array | int, jax.Array | int]:
    """First batch element and first key/value head of group u."""
    per_batch = spec.G // plan.ng
    return u // per_batch * plan.nb, u % per_batch * plan.ng


def one_pass(spec: Spec, plan: Layout) -> bool:
    """Whether a block of queries meets all its keys at once, so that nothing needs to be carried along."""
    return plan.ranges is not None or plan.slab or plan.width == spec.S


def visit(spec: Spec, plan: Layout, terms: Terms, where, span: tuple[int, int] | None, step, state):
    """Take the blocks of keys that the queries of one block may see through `step`, in order."""
    i, count = where[2:]
    masked = spec.band is not None or bool(terms.keys() - {"sinks", "dropout_key"})
    if span is not None:
        lo, hi = span
        whole = spec.band is None or _all_inside(spec, i, i + count, lo, hi)
        restricted = not whole or bool(terms.keys() - {"sinks", "dropout_key", "q_offset"})
        return step(lo, hi - lo, None, restricted, state) if hi > lo else state
    if plan.slab:
        left = spec.band[0] if spec.band is not None and spec.band[0] is not None else 0
        return step(jnp.clip(i - left, 0, spec.S - plan.width), plan.width, None, True, state) if plan.width else state
    width, chunks = plan.width, -(-spec.S // plan.width)
    if chunks == 1:
        return step(0, width, None, masked, state)
    lo, inner_lo, inner_hi, hi = _chunk_bounds(spec, plan, terms, where)

    def turn(restricted: bool):
        def body(c, state):
            first = c * width
            return step(jnp.minimum(first, spec.S - width), width, first if restricted else None, restricted, state)

        return body

    if not masked and spec.S % width == 0:
        return lax.fori_loop(np.int32(0), np.int32(chunks), turn(False), state)
    state = lax.fori_loop(lo, inner_lo, turn(True), state)
    state = lax.fori_loop(inner_lo, inner_hi, turn(False), state)
    return lax.fori_loop(inner_hi, hi, turn(True), state)


def _all_inside(spec: Spec, first: int, last: int, lo: int, hi: int) -> bool:
    left, right = spec.band or (None, None)
    return (left is None or lo >= last - 1 - left) and (right is None or hi - 1 <= first + right)


def _chunk_bounds(spec: Spec, plan: Layout, terms: Terms, where):
    """Chunks [lo, hi) that may hold a visible pair, and within them [inner_lo, inner_hi) that mask nothing."""
    b, _, i, count = where
    width, chunks = plan.width, -(-spec.S // plan.width)
    least, most, shortest = jnp.int32(0), jnp.int32(spec.S), jnp.int32(spec.S)
    inner_least, inner_most = jnp.int32(0), jnp.int32(spec.S)
    if spec.band is not None:
        left, right = spec.band
        offset = take(terms["q_offset"], (b,), (plan.nb,)) if "q_offset" in terms else jnp.zeros((1,), jnp.int32)
        near, far = offset.min(), offset.max()
        if left is not None:
            least, inner_least = i + near - left, i + count - 1 + far - left
        if right is not None:
            most, inner_most = i + count + far + right, i + near + right + 1
    if "kv_lengths" in terms:
        lengths = take(terms["kv_lengths"], (b,), (plan.nb,))
        most, shortest = jnp.minimum(most, lengths.max()), lengths.min()
    lo = jnp.clip(least, 0, spec.S) // width
    hi = -(-jnp.clip(most, 0, spec.S) // width)
    if "q_segments" in terms:
        first, last = _segment_span(spec, plan, terms, where, chunks)
        lo, hi = jnp.maximum(lo, first), jnp.minimum(hi, last)
    hi = jnp.maximum(lo, hi)
    if terms.keys() & {"q_segments", "mask", "bias"}:
        return lo, lo, lo, hi
    inner_lo = jnp.clip(-(-jnp.clip(inner_least, 0, spec.S) // width), lo, hi)
    inner_hi = jnp.clip(jnp.minimum(jnp.clip(inner_most, 0, spec.S), shortest) // width, inner_lo, hi)
    return lo, inner_lo, inner_hi, hi


def _segment_span(spec: Spec, plan: Layout, terms: Terms, where, chunks: int) -> tuple[jax.Array, jax.Array]:
    """First and past-the-last chunk whose range of ids meets that of the queries; packed documents make it short."""
    b, _, i, count = where
    mine = take(terms["q_segments"], (b, i), (plan.nb, count))
    keys = take(terms["kv_segments"], (b, 0), (plan.nb, spec.S))
    keys = jnp.pad(keys, ((0, 0), (0, chunks * plan.width - spec.S)), constant_values=-1).reshape(plan.nb, chunks, -1)
    largest = jnp.iinfo(keys.dtype).max
    low, my_low = (jnp.where(x < 0, largest, x).min(-1) for x in (keys, mine))
    high, my_high = keys.max(-1), mine.max(-1)
    meets = (high >= my_low[:, None]) & (low <= my_high[:, None]) & (high >= 0)
    meets = meets.any(0)
    first = jnp.where(meets.any(), jnp.argmax(meets), chunks).astype(jnp.int32)
    last = jnp.where(meets.any(), chunks - jnp.argmax(meets[::-1]), 0).astype(jnp.int32)
    return first, last


def take(x: jax.Array, starts: tuple, sizes: tuple[int, ...]) -> jax.Array:
    """A block of x; an axis of size 1 that the block does not have is left alone."""
    starts = indices(0 if n == 1 else s for n, s in zip(x.shape, starts, strict=True))
    sizes = tuple(min(n, m) for n, m in zip(x.shape, sizes, strict=True))
    if sizes == x.shape:
        return x
    return lax.dynamic_slice(x, starts, sizes)


def indices(starts: Iterable[jax.Array | int]) -> tuple[Any, ...]:
    """One dtype for all, which slices ask for: Python integers would be 64-bit with x64 on."""
    return tuple(s.astype(np.int32) if isinstance(s, jax.Array) else np.int32(s) for s in starts)
