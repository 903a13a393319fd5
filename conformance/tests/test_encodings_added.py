"""Embeddings, sinusoids, ALiBi and T5's relative bias: values one can redo on paper, and what others compute."""

import decimal
import math

import numpy as np
import pytest

from conformance.tests.three import PACKAGES, back, load, to, wide
from core_numpy.contract.buckets import bucket_starts

package_names = pytest.mark.parametrize("package", PACKAGES)


@package_names
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.int16])
def test_embed_gives_the_row_of_each_id(package, dtype):
    # Row r of the table is r, r, r, so that an offset or a clamp shows.
    table = np.repeat(np.arange(6.0, dtype=np.float32)[:, None], 3, axis=1)
    ids = np.array([[2, 3, 4, 5], [0, 0, 5, 1]], dtype=dtype)
    out = back(load(package).embed(to(package, table), to(package, ids)))
    assert out.shape == (2, 4, 3) and out.dtype == np.float32
    assert np.array_equal(out[..., 0], ids)


@package_names
def test_sinusoids_by_hand(package):
    one = to(package, np.array([1]))
    interleaved = back(load(package).sinusoidal_encoding(one, 4))
    concatenated = back(load(package).sinusoidal_encoding(one, 4, layout="concatenated"))
    s1, c1, s2, c2 = math.sin(1), math.cos(1), math.sin(0.01), math.cos(0.01)
    np.testing.assert_allclose(interleaved, [[s1, c1, s2, c2]], atol=1e-7)
    np.testing.assert_allclose(concatenated, [[s1, s2, c1, c2]], atol=1e-7)


@package_names
def test_an_odd_width_has_one_sine_more(package):
    one = to(package, np.array([1]))
    f = [5.0 ** (-2 * i / 5) for i in range(3)]
    s, c = [math.sin(x) for x in f], [math.cos(x) for x in f]
    for layout, want in (
        ("interleaved", [s[0], c[0], s[1], c[1], s[2]]),
        ("concatenated", [s[0], s[1], s[2], c[0], c[1]]),
    ):
        out = back(load(package).sinusoidal_encoding(one, 5, base=5.0, layout=layout))
        np.testing.assert_allclose(out, [want], atol=1e-7)
        assert np.allclose(back(load(package).sinusoidal_encoding(one, 1, layout=layout)), [[s[0]]])


@package_names
@pytest.mark.parametrize("layout", ["interleaved", "concatenated"])
@pytest.mark.parametrize("shape", [(), (5,), (2, 5), (2, 1, 3)])
def test_sinusoids_take_positions_of_any_shape(package, layout, shape):
    positions = np.random.default_rng(0).integers(-5, 2_000_000, shape).astype(np.int32)
    exact = back(load("core_numpy").sinusoidal_encoding(positions, 7, layout=layout, dtype="float64"))
    out = back(load(package).sinusoidal_encoding(to(package, np.array(positions)), 7, layout=layout))
    assert out.shape == (*shape, 7) and out.dtype == np.float32
    np.testing.assert_allclose(out, exact, atol=3e-7)
    with wide(package):
        out = back(
            load(package).sinusoidal_encoding(to(package, np.array(positions)), 7, layout=layout, dtype="float64")
        )
        np.testing.assert_allclose(out, exact, atol=1e-9)


@package_names
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_short_sinusoids_are_the_exact_ones_rounded(package, dtype):
    positions = np.array([0, 255, 257, 15962], dtype=np.int32)
    exact = load("core_numpy").sinusoidal_encoding(positions, 6, dtype="float64")
    out = back(load(package).sinusoidal_encoding(to(package, positions), 6, dtype=dtype))
    assert out.dtype.name == dtype
    # Half a unit in the last place of numbers up to 1, and float32's error in JAX.
    assert np.abs(out.astype(np.float64) - exact).max() <= (2.0**-12 if dtype == "float16" else 2.0**-9) + 2e-7


SLOPES = {
    1: [-8],
    2: [-4, -8],
    3: [-4, -8, -2],
    6: [-2, -4, -6, -8, -1, -3],
    8: [-1, -2, -3, -4, -5, -6, -7, -8],
    12: [-1, -2, -3, -4, -5, -6, -7, -8, -0.5, -1.5, -2.5, -3.5],
}


@package_names
@pytest.mark.parametrize("heads", SLOPES)
def test_alibi_slopes_are_the_authors_for_any_number_of_heads(package, heads):
    slopes = back(load(package).alibi_slopes(heads))
    assert slopes.dtype == np.float32
    np.testing.assert_allclose(slopes, 2.0 ** np.array(SLOPES[heads]), rtol=1e-7)


@package_names
@pytest.mark.parametrize("heads", [1, 3, 8, 12, 20])
def test_alibi_is_that_of_bloom_up_to_a_constant_per_query(package, heads):
    torch = pytest.importorskip("torch")
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    theirs = bloom.build_alibi_tensor(torch.ones(1, 7), heads, torch.float32).numpy()
    ours = back(load(package).alibi_bias(heads, 7))
    # BLOOM adds slope * j, ours -slope (i - j): the last query's row differs by slope * 6.
    np.testing.assert_allclose(ours[:, -1] - ours[:, -1, :1], theirs[:, 0], rtol=1e-6)


@package_names
def test_alibi_by_hand_and_with_offsets(package):
    ours = load(package)
    bias = back(ours.alibi_bias(2, 2, 4, q_offset=1))
    # Queries stand at 1 and 2; slopes are 1/16 and 1/256.
    distance = np.array([[1, 0, 1, 2], [2, 1, 0, 1]])
    assert np.array_equal(bias, np.float32([-1 / 16, -1 / 256])[:, None, None] * distance)
    offsets = np.array([1, 0, -3], dtype=np.int32)
    many = back(ours.alibi_bias(2, 2, 4, q_offset=to(package, offsets)))
    assert many.shape == (3, 2, 2, 4)
    for row, offset in zip(many, offsets.tolist(), strict=True):
        assert np.array_equal(row, back(ours.alibi_bias(2, 2, 4, q_offset=offset)))
    assert np.array_equal(many[0], back(ours.alibi_bias(2, 2, 4, q_offset=to(package, np.array(1)))))
    assert back(ours.alibi_bias(3, 0, 4)).shape == (3, 0, 4)
    assert back(ours.alibi_bias(3, 2, dtype="bfloat16")).dtype.name == "bfloat16"
    assert not np.signbit(bias[:, 0, 1]).any()


CAUSAL = {0: 0, -1: 1, -15: 15, -16: 16, -17: 16, -31: 21, -32: 21, -64: 26, -127: 31, -128: 31, -1000: 31, 5: 0}
BOTH = {0: 0, 1: 17, -1: 1, 7: 23, 8: 24, -8: 8, 11: 24, -128: 15, 128: 31}


def bucket_of(package, relative, **arguments):
    """The bucket of one relative position j - i."""
    buckets = back(load(package).relative_buckets(1, 1, q_offset=-relative, **arguments))
    assert buckets.shape == (1, 1) and buckets.dtype == np.int32
    return int(buckets[0, 0])


@package_names
def test_t5_buckets_by_the_list(package):
    for relative, bucket in CAUSAL.items():
        assert bucket_of(package, relative, bidirectional=False) == bucket
    for relative, bucket in BOTH.items():
        assert bucket_of(package, relative) == bucket


BUCKETS = (
    (32, 128),
    (32, 64),
    (16, 128),
    (8, 16),
    (64, 256),
    (12, 100),
    (20, 1000),
    (32, 256),
    (128, 100_000),
    (6, 50),
)


@package_names
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), BUCKETS)
def test_t5_buckets_are_those_of_transformers(package, buckets, max_distance, bidirectional):
    torch = pytest.importorskip("torch")
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    arguments = {"buckets": buckets, "max_distance": max_distance, "bidirectional": bidirectional}
    ours = load(package)
    # One query at 100,000 sees every distance up to it, and some keys after it.
    out = back(ours.relative_buckets(1, 100_300, q_offset=100_000, **arguments))[0]
    theirs = t5.T5Attention._relative_position_bucket(
        torch.arange(100_300) - 100_000,
        bidirectional=bidirectional,
        num_buckets=buckets,
        max_distance=max_distance,
    )
    assert np.array_equal(out, theirs.numpy())


@pytest.mark.parametrize(
    ("buckets", "max_distance"), [*BUCKETS, (2, 7), (3, 10), (33, 129), (500, 12345), (32, 2**60 + 1)]
)
def test_bucket_edges_are_where_the_exact_logarithm_crosses(buckets, max_distance):
    starts = bucket_starts(buckets, max_distance)
    exact = buckets // 2
    assert len(starts) == buckets - 1 and list(starts[:exact]) == list(range(1, exact + 1))
    assert list(starts) == sorted(starts) and starts[-1] <= max_distance
    with decimal.localcontext(prec=60):
        D = decimal.Decimal
        for k, start in enumerate(starts[exact:], 1):
            for d, reached in ((start, True), (start - 1, False)):
                # Sixty digits decide; an edge that is a whole number has a gap of 0.
                gap = (D(d) / exact).ln() * (buckets - exact) - (D(max_distance) / exact).ln() * k
                assert (gap > -(D(10) ** -40)) == reached


@package_names
def test_edges_that_are_whole_numbers_belong_to_the_upper_bucket(package):
    # 32 buckets both ways: 8 exact, then 8 (16)^(k/8) = 8 * 2^(k/2), whole for k = 2, 4, 6.
    for distance, bucket in ((15, 9), (16, 10), (31, 11), (32, 12), (63, 13), (64, 14)):
        assert bucket_of(package, -distance) == bucket
        assert bucket_of(package, distance) == bucket + 16


@package_names
@pytest.mark.parametrize("offset", [0, 3, -2])
def test_relative_bias_is_the_row_of_each_bucket(package, offset):
    ours = load(package)
    table = np.arange(8 * 3, dtype=np.float32).reshape(8, 3)
    arguments = {"buckets": 8, "max_distance": 16, "q_offset": offset}
    bias = back(ours.relative_bias(to(package, table), 4, 6, **arguments))
    buckets = back(ours.relative_buckets(4, 6, **arguments))
    assert bias.shape == (3, 4, 6) and bias.dtype == np.float32
    for h, i, j in np.ndindex(bias.shape):
        assert bias[h, i, j] == 3 * buckets[i, j] + h


@package_names
def test_relative_bias_takes_an_offset_per_batch_element(package):
    ours = load(package)
    table, offsets = np.random.default_rng(0).random((8, 3), np.float32), np.array([0, 7], dtype=np.int32)
    arguments = {"buckets": 8, "max_distance": 16, "bidirectional": False}
    bias = back(ours.relative_bias(to(package, table), 4, 6, q_offset=to(package, offsets), **arguments))
    assert bias.shape == (2, 3, 4, 6)
    for row, offset in zip(bias, offsets.tolist(), strict=True):
        assert np.array_equal(row, back(ours.relative_bias(to(package, table), 4, 6, q_offset=offset, **arguments)))


def test_everything_traces_under_jit():
    jax = pytest.importorskip("jax")
    ours = load("backend_jax")
    table = jax.numpy.arange(24.0).reshape(8, 3)

    def f(ids, offset):
        return (
            ours.embed(table, ids),
            ours.sinusoidal_encoding(ids, 5),
            ours.alibi_bias(3, 4, 6, q_offset=offset),
            ours.relative_bias(table, 4, 6, buckets=8, max_distance=16, q_offset=offset),
        )

    ids, offset = jax.numpy.array([[1, 7, 0]]), jax.numpy.array(3)
    for have, want in zip(jax.jit(f)(ids, offset), f(ids, offset), strict=True):
        np.testing.assert_allclose(have, want, atol=2e-7)


def test_everything_traces_under_torch_compile():
    torch = pytest.importorskip("torch")
    ours = load("backend_torch")
    table = torch.arange(24.0).reshape(8, 3)

    def f(ids, offset):
        return (
            ours.embed(table, ids),
            ours.sinusoidal_encoding(ids, 5),
            ours.alibi_bias(3, 4, 6, q_offset=offset),
            ours.relative_bias(table, 4, 6, buckets=8, max_distance=16, q_offset=offset),
        )

    ids, offset = torch.tensor([[1, 7, 0]]), torch.tensor(3)
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    for have, want in zip(compiled(ids, offset), f(ids, offset), strict=True):
        torch.testing.assert_close(have, want)
