"""The generator: published vectors, the bits of jax.random, three scripts that agree, and sane statistics."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

import backend_jax.random as in_jax  # noqa: E402
import backend_torch.random as in_torch  # noqa: E402
import core_numpy.random as in_numpy  # noqa: E402

MODULES = {"numpy": in_numpy, "torch": in_torch, "jax": in_jax}
SEEDS = (0, 1, 42, 2**31 - 1, 2**32 - 1)
SHAPES = ((), (1,), (7,), (3, 5), (2, 1, 4, 3), (0, 3))

# Threefry-2x32 with 20 rounds from Random123's kat_vectors: counter, key, output.
KNOWN_ANSWERS = (
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
)


def numbers(x):
    """A NumPy array of what any of the three returned, integers as int64."""
    x = np.asarray(x)
    return x.astype(np.int64) if x.dtype.kind in "iu" else x


def word(module, value):
    return {"numpy": np.uint32, "torch": torch.tensor, "jax": jax.numpy.uint32}[module](value)


@pytest.fixture(params=list(MODULES))
def name(request):
    return request.param


@pytest.mark.parametrize(("counter", "words", "expected"), KNOWN_ANSWERS)
def test_the_block_function_gives_the_published_vectors(name, counter, words, expected):
    module = MODULES[name]
    key = module.key(words[0] << 32 | words[1])
    first, second = module._threefry(key, word(name, counter[0]), word(name, counter[1]))
    assert (int(first), int(second)) == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_keys_and_their_descendants_are_those_of_jax(name, seed):
    module = MODULES[name]
    key, theirs = module.key(seed), jax.random.PRNGKey(np.uint32(seed))
    assert np.array_equal(numbers(key), numbers(theirs))
    for n in (1, 2, 5):
        ours = numbers(module.split(key, n))
        assert ours.shape == (n, 2)
        assert np.array_equal(ours, numbers(jax.random.split(theirs, n)))
    for data in (0, 1, 17, 2**32 - 1):
        assert np.array_equal(numbers(module.fold_in(key, data)), numbers(jax.random.fold_in(theirs, np.uint32(data))))


def test_a_seed_above_32_bits_fills_the_high_word(name):
    assert numbers(MODULES[name].key(3 * 2**32 + 5)).tolist() == [3, 5]
    assert numbers(MODULES[name].key(2**64 - 1)).tolist() == [2**32 - 1, 2**32 - 1]


@pytest.mark.parametrize("seed", SEEDS[1:3])
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_uniforms_and_bernoullis_are_those_of_jax(name, seed, shape):
    module = MODULES[name]
    key, theirs = module.key(seed), jax.random.PRNGKey(seed)
    bits = numbers(module.random_bits(key, shape))
    assert bits.shape == shape
    assert np.array_equal(bits, numbers(jax.random.bits(theirs, shape)))
    u = np.asarray(module.uniform(key, shape))
    assert u.dtype == np.float32
    assert np.array_equal(u, jax.random.uniform(theirs, shape))
    for p in (0.0, 0.3, 1.0):
        hit = np.asarray(module.bernoulli(key, p, shape))
        assert hit.dtype == bool
        assert np.array_equal(hit, jax.random.bernoulli(theirs, p, shape))


def test_normals_are_those_of_jax_to_rounding(name):
    module = MODULES[name]
    ours = np.asarray(module.normal(module.key(3), (40, 251)))
    theirs = np.asarray(jax.random.normal(jax.random.PRNGKey(3), (40, 251)))
    assert ours.dtype == np.float32
    # A few units in the last place (2**-23); and XLA's erf_inv takes log1p(-u²) of a rounded u², an error of 2**-24
    # in 1 - u², which moves the result z by that divided by 2 (1 - u²) |z|.
    z = np.abs(theirs).astype(np.float64)
    tail = 1 - (2 * np.asarray(in_numpy.uniform(in_numpy.key(3), (40, 251)), np.float64) - 1 + 2.0**-24) ** 2
    assert np.all(np.abs(ours - theirs) <= 4 * 2.0**-23 * z + 2.0**-24 / tail / np.maximum(z, 1))


def test_categorical_draws_are_those_of_jax(name):
    module = MODULES[name]
    logits = np.random.default_rng(0).normal(size=(50, 11)).astype(np.float32)
    logits[3, 2:] = -np.inf
    ours = module.categorical(module.key(9), as_array(name, logits))
    assert np.array_equal(numbers(ours), numbers(jax.random.categorical(jax.random.PRNGKey(9), logits)))
    assert numbers(ours)[3] < 2


def as_array(name, x):
    return {"numpy": np.asarray, "torch": torch.tensor, "jax": jax.numpy.asarray}[name](x)


def test_a_probability_may_be_an_array_that_broadcasts(name):
    module = MODULES[name]
    p = np.array([[0.0], [0.5], [1.0]], dtype=np.float32)
    hit = np.asarray(module.bernoulli(module.key(1), as_array(name, p), (3, 200)))
    assert not hit[0].any() and hit[2].all() and 60 < hit[1].sum() < 140
    assert np.array_equal(hit, jax.random.bernoulli(jax.random.PRNGKey(1), p, (3, 200)))


def test_bits_at_an_index_are_those_drawn_at_once(name):
    module = MODULES[name]
    key = module.key(5)
    index = np.array([[0, 7, 3], [59, 1, 30]], dtype=np.int32)
    assert np.array_equal(
        numbers(module.bits_at(key, as_array(name, index))), numbers(module.random_bits(key, (5, 12))).ravel()[index]
    )
    assert np.array_equal(
        np.asarray(module.uniform_at(key, as_array(name, index))), np.asarray(module.uniform(key, (60,)))[index]
    )


def test_indices_past_32_bits_use_the_high_word(name):
    module = MODULES[name]
    key = module.key(5)
    low, high = np.array([1, 2, 2**32 - 1], dtype=np.uint32), np.array([3, 0, 1], dtype=np.uint32)
    if name == "torch":
        low, high = low.astype(np.int64), high.astype(np.int64)
    ours = numbers(module.bits_at(key, as_array(name, low), as_array(name, high)))
    first, second = in_numpy._threefry(in_numpy.key(5), high.astype(np.uint32), low.astype(np.uint32))
    assert np.array_equal(ours, numbers(first ^ second))
    assert int(module.bits_at(key, 3 * 2**32 + 1)) == ours[0]
    if name != "jax":
        assert np.array_equal(numbers(module.bits_at(key, as_array(name, high.astype(np.int64) * 2**32 + low))), ours)


def test_jax_counts_indices_past_32_bits_in_two_words():
    shape, strides = (3, 2, 5), (2**33 + 12345, 2**31 + 999, 0xFFFFFFFF)
    low, high = in_jax._index_words(shape, strides)
    i, j, k = np.indices(shape).astype(object)
    expected = i * strides[0] + j * strides[1] + k * strides[2]
    assert np.array_equal(numbers(low).astype(object) + numbers(high).astype(object) * 2**32, expected)


def test_moments_are_those_of_the_distributions(name):
    module = MODULES[name]
    n = 200_000
    u = np.asarray(module.uniform(module.key(11), (n,)), dtype=np.float64)
    z = np.asarray(module.normal(module.key(12), (n,)), dtype=np.float64)
    # Five standard errors: mean and variance of uniforms are 1/2 and 1/12, of normals 0 and 1.
    assert abs(u.mean() - 0.5) < 5 * math.sqrt(1 / 12 / n)
    assert abs(u.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)
    assert abs(z.mean()) < 5 / math.sqrt(n)
    assert abs(z.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs(np.corrcoef(u[1:], u[:-1])[0, 1]) < 5 / math.sqrt(n)


def test_a_categorical_draw_has_the_softmax_frequencies(name):
    module = MODULES[name]
    p = np.array([0.5, 0.1, 0.4])
    logits = np.broadcast_to(np.log(p).astype(np.float32), (20_000, 3)).copy()
    drawn = np.bincount(numbers(module.categorical(module.key(2), as_array(name, logits))), minlength=3) / 20_000
    assert np.abs(drawn - p).max() < 5 * math.sqrt(0.25 / 20_000)


def test_compiled_jax_gives_the_same_bits():
    key = in_jax.key(8)
    compiled = jax.jit(lambda key, step: in_jax.random_bits(in_jax.fold_in(key, step), (3, 4)))
    assert np.array_equal(compiled(key, 6), in_jax.random_bits(in_jax.fold_in(key, 6), (3, 4)))


REFUSED = (
    ("negative seed", lambda m: m.key(-1), ValueError, "seed"),
    ("seed too large", lambda m: m.key(2**64), ValueError, "seed"),
    ("seed a float", lambda m: m.key(1.0), TypeError, "seed"),
    ("key an integer", lambda m: m.split(3), TypeError, "key"),
    ("key of three words", lambda m: m.uniform(m.split(m.key(0), 3)[:, 0], (2,)), TypeError, "key"),
    ("no keys", lambda m: m.split(m.key(0), 0), ValueError, "n"),
    ("shape an integer", lambda m: m.uniform(m.key(0), 3), TypeError, "shape"),
    ("negative size", lambda m: m.random_bits(m.key(0), (2, -1)), ValueError, "shape"),
    ("negative data", lambda m: m.fold_in(m.key(0), -1), ValueError, "data"),
    ("data too large", lambda m: m.fold_in(m.key(0), 2**32), ValueError, "data"),
    ("data a float", lambda m: m.fold_in(m.key(0), 1.5), TypeError, "data"),
    ("probability above 1", lambda m: m.bernoulli(m.key(0), 1.5, (2,)), ValueError, "p"),
    ("probability NaN", lambda m: m.bernoulli(m.key(0), math.nan, (2,)), ValueError, "p"),
    ("probability text", lambda m: m.bernoulli(m.key(0), "half", (2,)), TypeError, "p"),
    ("probability too wide", lambda m: m.bernoulli(m.key(0), m.uniform(m.key(0), (3,)), (2,)), ValueError, "p"),
    ("no logits", lambda m: m.categorical(m.key(0), m.uniform(m.key(0), (2, 0))), ValueError, "logits"),
    ("integer logits", lambda m: m.categorical(m.key(0), m.random_bits(m.key(0), (2,))), TypeError, "logits"),
    ("float index", lambda m: m.bits_at(m.key(0), m.uniform(m.key(0), (2,))), TypeError, "low"),
)


@pytest.mark.parametrize(("call", "exception", "argument"), [row[1:] for row in REFUSED], ids=[r[0] for r in REFUSED])
def test_bad_arguments_are_refused_by_name(name, call, exception, argument):
    with pytest.raises(exception, match=rf"^{argument} must"):
        call(MODULES[name])
