"""What must hold for attention whatever the numbers are, in each package that is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

# B, H, G, T, S, D, Dv: all different, and one square case with a head for each key head. Few, since JAX compiles each.
SIZES = ((2, 4, 1, 3, 7, 5, 6), (3, 6, 2, 5, 4, 8, 1), (2, 3, 3, 5, 5, 4, 4))
SEEDS = st.integers(0, 2**32 - 1)
each_size = given(size=st.sampled_from(SIZES), seed=SEEDS)
few = settings(max_examples=9, deadline=None, derandomize=True, database=None)


@dataclass(frozen=True)
class Target:
    """A package with its converters, the dtype to judge it in, and the rounding to allow."""

    module: ModuleType
    into: Callable[[np.ndarray], Any]
    out_of: Callable[[Any], np.ndarray]
    dtype: Any
    tolerance: float

    def __call__(self, name: str, *arrays: np.ndarray, **keywords: Any) -> Any:
        """Call a function of the package with NumPy arrays and get NumPy arrays back."""
        positional = [self._convert(x) for x in arrays]
        result = getattr(self.module, name)(*positional, **{key: self._convert(x) for key, x in keywords.items()})
        return tuple(map(self.out_of, result)) if isinstance(result, tuple) else self.out_of(result)

    def _convert(self, x: Any) -> Any:
        if isinstance(x, list):
            return [self._convert(item) for item in x]
        if not isinstance(x, np.ndarray):
            return x
        return self.into(x.astype(self.dtype) if x.dtype == np.float64 else x)

    def check_close(self, got: np.ndarray, want: np.ndarray) -> None:
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=self.tolerance, atol=self.tolerance)


def make(name: str) -> Target:
    if name == "core_numpy":
        return Target(importlib.import_module(name), np.asarray, np.asarray, np.float64, 1e-12)
    module, arrays = importlib.import_module(name), importlib.import_module(f"{name}.arrays")
    # JAX has no float64 unless the whole process turns it on.
    dtype, tolerance = (np.float32, 2e-5) if name == "backend_jax" else (np.float64, 1e-12)
    return Target(module, arrays.from_numpy, arrays.to_numpy, dtype, tolerance)


NEEDS = {"core_numpy": "numpy", "backend_torch": "torch", "backend_jax": "jax"}


@pytest.fixture(scope="module", params=list(NEEDS))
def target(request: pytest.FixtureRequest) -> Target:
    if find_spec(NEEDS[request.param]) is None:
        pytest.skip(f"{NEEDS[request.param]} is not installed")
    return make(request.param)


def draw(size: tuple[int, ...], seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v, and a mask in which every row and every key may end up alone."""
    B, H, G, T, S, D, Dv = size
    r = np.random.default_rng(seed)
    q, k, v = r.normal(size=(B, H, T, D)), r.normal(size=(B, G, S, D)), r.normal(size=(B, G, S, Dv))
    mask = r.random((B, H, T, S)) < 0.5
    mask[:, :, 0] &= r.random() < 0.5  # a dead query half of the time
    return q, k, v, mask


@few
@each_size
def test_the_order_of_the_keys_does_not_matter(target, size, seed):
    q, k, v, mask = draw(size, seed)
    order = np.random.default_rng(seed).permutation(k.shape[-2])
    got = target("attention", q, k[..., order, :], v[..., order, :], mask=mask[..., order])
    target.check_close(got, target("attention", q, k, v, mask=mask))


@few
@each_size
def test_queries_do_not_see_each_other(target, size, seed):
    q, k, v, mask = draw(size, seed)
    order = np.random.default_rng(seed).permutation(q.shape[-2])
    got = target("attention", q[..., order, :], k, v, mask=mask[..., order, :])
    target.check_close(got, target("attention", q, k, v, mask=mask)[..., order, :])


@few
@given(size=st.sampled_from(SIZES), seed=SEEDS, shift=st.sampled_from([-30.0, 0.5, 30.0]))
def test_a_number_added_to_all_scores_of_a_row_changes_only_the_lse(target, size, seed, shift):
    q, k, v, mask = draw(size, seed)
    bias = shift * np.ones((1, 1, q.shape[-2], 1))
    bias[..., 1:, :] *= 0.5
    got, lse = target("attention_with_lse", q, k, v, mask=mask, bias=bias)
    want, before = target("attention_with_lse", q, k, v, mask=mask)
    target.check_close(got, want)
    target.check_close(lse, before + bias[..., 0])


@few
@each_size
def test_weights_are_not_negative_and_sum_to_1_or_0(target, size, seed):
    q, k, _, mask = draw(size, seed)
    weights = target("attention_weights", q, k, mask=mask)
    assert (weights >= 0).all() and (weights[~mask] == 0).all()
    target.check_close(weights.sum(axis=-1), mask.any(axis=-1).astype(weights.dtype))


@few
@each_size
def test_the_output_is_the_weights_times_the_values(target, size, seed):
    q, k, v, mask = draw(size, seed)
    weights = target("attention_weights", q, k, mask=mask)
    repeated = np.repeat(v, q.shape[1] // k.shape[1], axis=1)
    target.check_close(target("attention", q, k, v, mask=mask), weights @ repeated)


@few
@given(size=st.sampled_from(SIZES), seed=SEEDS, place=st.sampled_from([1, 2]))
def test_the_keys_may_be_split_and_merged(target, size, seed, place):
    q, k, v, mask = draw(size, seed)
    whole = target("attention_with_lse", q, k, v, mask=mask)
    parts = [
        target("attention_with_lse", q, k[..., part, :], v[..., part, :], mask=mask[..., part])
        for part in (slice(None, place), slice(place, None))
    ]
    outs, lses = ([np.asarray(x, dtype=target.dtype) for x in side] for side in zip(*parts, strict=True))
    for got, want in zip(target("merge_attention", outs, lses), whole, strict=True):
        target.check_close(got, want)


@few
@given(size=st.sampled_from(SIZES), seed=SEEDS, garbage=st.sampled_from([1e6, np.inf, np.nan]))
def test_what_stands_past_the_length_never_matters(target, size, seed, garbage):
    q, k, v, _ = draw(size, seed)
    B, S = k.shape[0], k.shape[-2]
    lengths = np.random.default_rng(seed).integers(0, S, size=B).astype(np.int32)
    want = target("attention", q, k, v, kv_lengths=lengths)
    for b, length in enumerate(lengths):
        k[b, :, length:], v[b, :, length:] = garbage, garbage
    np.testing.assert_array_equal(target("attention", q, k, v, kv_lengths=lengths), want)
    assert (want[lengths == 0] == 0).all()


@few
@each_size
def test_grouped_heads_are_repeated_heads(target, size, seed):
    q, k, v, mask = draw(size, seed)
    group = q.shape[1] // k.shape[1]
    got = target("attention", q, k, v, mask=mask)
    target.check_close(got, target("attention", q, np.repeat(k, group, axis=1), np.repeat(v, group, axis=1), mask=mask))


@few
@given(seed=SEEDS, t=st.sampled_from([1, 3]))
def test_a_causal_prefix_does_not_know_what_follows(target, seed, t):
    q, k, v, _ = draw((2, 4, 2, 5, 5, 3, 6), seed)
    whole = target("attention", q, k, v, causal=True)
    target.check_close(whole[..., :t, :], target("attention", *(x[..., :t, :] for x in (q, k, v)), causal=True))
    k[..., t:, :], v[..., t:, :] = 1e4, -1e4
    np.testing.assert_array_equal(target("attention", q, k, v, causal=True)[..., :t, :], whole[..., :t, :])


@few
@each_size
def test_batch_elements_do_not_see_each_other(target, size, seed):
    q, k, v, mask = draw(size, seed)
    together = target("attention", q, k, v, mask=mask)
    alone = [
        target("attention", q[b : b + 1], k[b : b + 1], v[b : b + 1], mask=mask[b : b + 1]) for b in range(size[0])
    ]
    target.check_close(together, np.concatenate(alone))


@few
@each_size
def test_the_values_enter_linearly(target, size, seed):
    q, k, v, mask = draw(size, seed)
    other = np.random.default_rng(seed + 1).normal(size=v.shape)
    both = target("attention", q, k, 2 * v - other, mask=mask)
    target.check_close(both, 2 * target("attention", q, k, v, mask=mask) - target("attention", q, k, other, mask=mask))
