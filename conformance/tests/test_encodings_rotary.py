"""Rotary encodings: frequencies and scalings, tables far out, both layouts, and what others compute."""

import math

import numpy as np
import pytest

from conformance.tests.three import PACKAGES, back, load, to, wide
from core_numpy.contract.config import RotaryScaling

package_names = pytest.mark.parametrize("package", PACKAGES)

FACTORS = {
    "short_factors": tuple(1.0 + 0.25 * i for i in range(8)),
    "long_factors": tuple(1.0 + 2.0 * i for i in range(8)),
}
# kind, our fields beside it, running lengths
SCALINGS = (
    ("linear", {"factor": 3.0}, (None,)),
    ("dynamic", {"factor": 2.5, "original_max_length": 64}, (None, 10, 64, 200)),
    ("yarn", {"factor": 4.0, "original_max_length": 256}, (None,)),
    ("yarn", {"factor": 4.0, "original_max_length": 4096, "beta_fast": 16.0, "beta_slow": 2.0}, (None,)),
    ("yarn", {"factor": 0.5, "original_max_length": 4096, "attention_factor": 1.25}, (None,)),
    ("yarn", {"factor": 2.0, "original_max_length": 4}, (None,)),
    (
        "llama3",
        {"factor": 8.0, "original_max_length": 512, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        (None,),
    ),
    (
        "llama3",
        {"factor": 2.0, "original_max_length": 100, "low_freq_factor": 0.5, "high_freq_factor": 8.0},
        (None,),
    ),
    ("longrope", {"factor": 16.0, "original_max_length": 128} | FACTORS, (None, 128, 129)),
    ("longrope", {"factor": 16.0, "original_max_length": 128, "attention_factor": 1.5} | FACTORS, (None, 500)),
)
THEIR_NAMES = {
    "original_max_length": "original_max_position_embeddings",
    "short_factors": "short_factor",
    "long_factors": "long_factor",
}


def uniform(*shape, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, shape)


@package_names
@pytest.mark.parametrize("row", SCALINGS, ids=[f"{row[0]}-{n}" for n, row in enumerate(SCALINGS)])
@pytest.mark.parametrize("base", [10000.0, 500.0])
def test_scaled_frequencies_are_those_of_transformers(package, row, base):
    ours, theirs = load(package), pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind, fields, lengths = row
    rope = {"rope_type": kind, "rope_theta": base}
    rope |= {THEIR_NAMES.get(name, name): list(v) if isinstance(v, tuple) else v for name, v in fields.items()}
    config = theirs.LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=fields.get("original_max_length", 64),
        rope_parameters=rope,
    )
    for length in lengths:
        expected, factor = ROPE_INIT_FUNCTIONS[kind](config, device="cpu", seq_len=length)
        frequencies, ours_factor = ours.rotary_frequencies(
            16, base=base, scaling=RotaryScaling(kind=kind, **fields), length=length
        )
        # Theirs are float32 powers of a float32 base: a few units of 2^-24.
        np.testing.assert_allclose(back(frequencies), expected.numpy(), rtol=1e-6)
        assert ours_factor == pytest.approx(factor, rel=1e-12)


@package_names
def test_unscaled_frequencies_fall_geometrically(package):
    frequencies, factor = load(package).rotary_frequencies(6, base=1000.0)
    np.testing.assert_allclose(back(frequencies), [1.0, 0.1, 0.01], rtol=1e-7)
    assert factor == 1.0 and isinstance(factor, float)


@package_names
def test_ntk_stretches_the_lowest_frequency_by_the_factor(package):
    # f_i s^(-2i / (dim - 2)): the first stays, the last is divided by s.
    frequencies, factor = load(package).rotary_frequencies(
        6, base=1000.0, scaling=RotaryScaling(kind="ntk", factor=4.0)
    )
    np.testing.assert_allclose(back(frequencies), [1.0, 0.05, 0.0025], rtol=1e-7)
    assert factor == 1.0


@package_names
@pytest.mark.parametrize("kind", ["ntk", "dynamic"])
def test_two_rotated_features_have_frequency_one_under_any_base(package, kind):
    scaling = RotaryScaling(kind=kind, factor=4.0, original_max_length=8)
    assert back(load(package).rotary_frequencies(2, scaling=scaling, length=32)[0]).tolist() == [1.0]


@package_names
def test_dynamic_scaling_forgets_the_longest_length_it_saw(package):
    call = load(package).rotary_frequencies
    scaling = RotaryScaling(kind="dynamic", factor=2.0, original_max_length=4)
    short = back(call(8, scaling=scaling, length=3)[0])
    assert not np.array_equal(back(call(8, scaling=scaling, length=6)[0])[1:], short[1:])
    assert np.array_equal(back(call(8, scaling=scaling, length=3)[0]), short)
    assert np.array_equal(short, back(call(8)[0]))


@pytest.mark.parametrize("package", PACKAGES[1:])
@pytest.mark.parametrize("row", SCALINGS, ids=[f"{row[0]}-{n}" for n, row in enumerate(SCALINGS)])
def test_the_packages_have_the_same_frequencies_in_float64(package, row):
    kind, fields, lengths = row
    scaling = RotaryScaling(kind=kind, **fields)
    for length in lengths:
        expected, factor = load("core_numpy").rotary_frequencies(16, base=3000.0, scaling=scaling, length=length)
        with wide(package):
            frequencies, ours = load(package).rotary_frequencies(16, base=3000.0, scaling=scaling, length=length)
            assert back(frequencies).dtype == np.float64
            np.testing.assert_allclose(back(frequencies), expected, rtol=1e-14)
        assert ours == pytest.approx(factor, rel=1e-15)


FAR = np.array([0, 1, -1, 255, 257, 15962, 1_000_000, -999_999, 2**31 - 1], dtype=np.int32)


def test_tables_are_cosine_and_sine_of_position_times_frequency():
    cos, sin = load("core_numpy").rotary_tables(np.array([[0, 2]]), np.array([1.0, 0.25, 3.0]), attention_factor=2.0)
    assert cos.shape == sin.shape == (1, 2, 3) and cos.dtype == np.float64
    np.testing.assert_allclose(cos[0, 1], [2 * math.cos(2), 2 * math.cos(0.5), 2 * math.cos(6)])
    np.testing.assert_allclose(sin[0, 1], [2 * math.sin(2), 2 * math.sin(0.5), 2 * math.sin(6)])


@pytest.mark.parametrize(("package", "compiled"), [*((package, False) for package in PACKAGES), ("backend_jax", True)])
def test_a_table_at_a_million_is_that_of_the_same_frequencies_in_float64(package, compiled):
    ours, reference = load(package), load("core_numpy")
    frequencies = ours.rotary_frequencies(64)[0]
    tables = pytest.importorskip("jax").jit(ours.rotary_tables) if compiled else ours.rotary_tables
    cos, sin = tables(to(package, FAR), frequencies)
    expected = reference.rotary_tables(FAR, back(frequencies).astype(np.float64))
    for have, want in zip((cos, sin), expected, strict=True):
        assert np.abs(back(have) - want).max() < 3e-7


def test_a_bfloat16_or_float32_angle_would_fail_that_tolerance():
    import ml_dtypes

    frequencies = load("core_numpy").rotary_frequencies(64)[0]
    exact = np.cos(FAR[:, None] * frequencies)
    in_float32 = np.cos(FAR[:, None].astype(np.float32) * frequencies.astype(np.float32), dtype=np.float32)
    rounded = exact.astype(ml_dtypes.bfloat16).astype(np.float64)
    # A table in bfloat16, positions in bfloat16 (257 becomes 256), and angles in float32.
    assert np.abs(rounded - exact).max() > 1e-3
    assert float(ml_dtypes.bfloat16(257)) == 256.0 and float(ml_dtypes.bfloat16(15962)) == 15936.0
    assert np.abs(in_float32 - exact)[FAR == 1_000_000].max() > 1e-3


def test_jax_takes_frequencies_from_the_host_in_float64():
    jax = pytest.importorskip("jax")
    ours, frequencies = load("backend_jax"), load("core_numpy").rotary_frequencies(64)[0]
    expected = load("core_numpy").rotary_tables(FAR, frequencies, attention_factor=1.5)
    tables = jax.jit(lambda positions: ours.rotary_tables(positions, frequencies, attention_factor=1.5))
    for have, want in zip(tables(jax.numpy.asarray(FAR)), expected, strict=True):
        assert have.dtype == np.float32
        assert np.abs(np.asarray(have, np.float64) - want).max() < 4e-7


def test_jax_reduces_any_float32_frequency():
    jax = pytest.importorskip("jax")
    # So many that some of them carry from word to word, which one in five hundred does.
    draw, n = np.random.default_rng(3), 5000
    frequencies = (draw.choice([-1, 1], n) * draw.uniform(1, 10, n) * 10.0 ** draw.integers(-44, 2, n)).astype(
        np.float32
    )
    frequencies[0] = 0.0
    positions = np.array([0, 1, 77, -1000, 300_000], dtype=np.int32)
    cos, sin = load("backend_jax").rotary_tables(jax.numpy.asarray(positions), jax.numpy.asarray(frequencies))
    expected = load("core_numpy").rotary_tables(positions, frequencies)
    assert np.abs(np.asarray(cos) - expected[0]).max() < 2e-7
    assert np.abs(np.asarray(sin) - expected[1]).max() < 2e-7


@pytest.mark.parametrize("package", PACKAGES[1:])
def test_tables_in_float64_are_those_of_the_definition(package):
    frequencies = load("core_numpy").rotary_frequencies(64)[0]
    expected = load("core_numpy").rotary_tables(FAR, frequencies, attention_factor=1.5)
    with wide(package):
        tables = load(package).rotary_tables(to(package, FAR), to(package, frequencies), attention_factor=1.5)
        for have, want in zip(tables, expected, strict=True):
            assert back(have).dtype == np.float64
            np.testing.assert_allclose(back(have), want, atol=1e-12)


@package_names
def test_the_layouts_pair_halves_or_neighbours(package):
    # One position, frequencies 1 and 1/100, x = [1, 0, 0, 0]: the pair of feature 0 is feature 2 or feature 1.
    x, angles = np.array([[1.0, 0.0, 0.0, 0.0]]), np.array([[1.0, 0.01]])
    cos, sin = np.cos(angles), np.sin(angles)
    with wide(package):
        arguments = to(package, (x, cos, sin))
        half = back(load(package).apply_rotary(*arguments))
        neighbours = back(load(package).apply_rotary(*arguments, layout="interleaved"))
    np.testing.assert_allclose(half, [[math.cos(1), 0, math.sin(1), 0]], atol=1e-15)
    np.testing.assert_allclose(neighbours, [[math.cos(1), math.sin(1), 0, 0]], atol=1e-15)


def complex_rotation(x, cos, sin, layout):
    """The paper's form: a pair is a complex number, times e^(i angle)."""
    r = cos.shape[-1]
    turn = cos + 1j * sin
    turn = turn if turn.ndim == 2 else turn[:, None]
    out = x.copy()
    pairs = x[..., : 2 * r].reshape(*x.shape[:-1], r, 2) if layout == "interleaved" else None
    z = pairs[..., 0] + 1j * pairs[..., 1] if pairs is not None else x[..., :r] + 1j * x[..., r : 2 * r]
    z = z * turn
    out[..., : 2 * r] = (
        np.stack([z.real, z.imag], -1).reshape(*x.shape[:-1], 2 * r)
        if layout == "interleaved"
        else np.concatenate([z.real, z.imag], -1)
    )
    return out


CASES = (
    ((3, 10), (3, 5)),
    ((2, 4, 3, 10), (3, 5)),
    ((2, 4, 3, 10), (2, 3, 5)),
    ((2, 4, 3, 10), (1, 3, 5)),
    ((2, 4, 3, 10), (2, 3, 3)),
    ((4, 3, 10), (3, 2)),
    ((2, 4, 1, 10), (2, 1, 1)),
)


@package_names
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize(("shape", "table"), CASES)
def test_a_rotation_is_a_complex_product_and_the_rest_passes(package, layout, shape, table):
    x, angles = uniform(*shape), 3 * uniform(*table, seed=1)
    cos, sin = 1.5 * np.cos(angles), 1.5 * np.sin(angles)
    before = x.copy()
    with wide(package):
        out = back(load(package).apply_rotary(*to(package, (x, cos, sin)), layout=layout))
    np.testing.assert_allclose(out, complex_rotation(x, cos, sin, layout), atol=1e-15)
    assert np.array_equal(out[..., 2 * table[-1] :], x[..., 2 * table[-1] :])
    assert np.array_equal(x, before)


@package_names
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_a_rotation_is_that_of_onnx(package, layout):
    op = pytest.importorskip("onnx.reference.ops.op_rotary_embedding").rotary_embedding
    x, positions = uniform(2, 4, 3, 10), np.array([[0, 1, 2], [5, 5, 9]])
    angles = np.arange(12)[:, None] * np.array([1.0, 0.3, 0.1])
    expected = op(x, np.cos(angles), np.sin(angles), positions, layout == "interleaved", 6)
    with wide(package):
        tables = load(package).rotary_tables(to(package, positions), to(package, np.array([1.0, 0.3, 0.1])))
        out = load(package).apply_rotary(to(package, x), *tables, layout=layout)
        np.testing.assert_allclose(back(out), expected, atol=1e-14)


@package_names
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_short_float_is_rounded_once(package, dtype):
    import ml_dtypes

    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x, angles = uniform(2, 4, 3, 10).astype(dtype), 3 * uniform(3, 5, seed=1)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    out = back(load(package).apply_rotary(*to(package, (x, cos, sin))))
    exact = complex_rotation(x.astype(np.float64), cos.astype(np.float64), sin.astype(np.float64), "half")
    assert out.dtype == dtype
    # Half a unit in the last place, and float32's own error, which two terms of at most 1 can cancel to.
    unit = float(ml_dtypes.finfo(dtype).eps) / 2
    assert np.all(np.abs(out.astype(np.float64) - exact) <= unit * np.abs(exact) + 2.0**-22)


@package_names
@pytest.mark.parametrize("rotary_dim", [None, 4])
def test_a_permuted_projection_gives_the_same_scores_in_the_other_layout(package, rotary_dim):
    ours = load(package)
    heads, size, width, length = 2, 6, 5, 3
    query, key, bias = uniform(width, heads * size), uniform(width, heads * size, seed=1), uniform(heads * size, seed=2)
    x, angles = uniform(length, width, seed=3), 3 * uniform(length, (rotary_dim or size) // 2, seed=4)

    def scores(layout, *weights):
        q, k = ((x @ weight + weights[2]).reshape(length, heads, size).swapaxes(0, 1) for weight in weights[:2])
        tables = to(package, (np.cos(angles), np.sin(angles)))
        q, k = (back(ours.apply_rotary(to(package, y.copy()), *tables, layout=layout)) for y in (q, k))
        return q @ k.swapaxes(-1, -2)

    with wide(package):
        for source, target in (("half", "interleaved"), ("interleaved", "half")):
            arguments = {"source": source, "target": target, "rotary_dim": rotary_dim}
            moved = [back(ours.permute_rotary(to(package, w), heads, **arguments)) for w in (query, key, bias)]
            assert not np.array_equal(moved[0], query)
            np.testing.assert_allclose(scores(target, *moved), scores(source, query, key, bias), atol=1e-13)
            returned = ours.permute_rotary(
                to(package, moved[0]), heads, source=target, target=source, rotary_dim=rotary_dim
            )
            assert np.array_equal(back(returned), query)


@package_names
def test_permuting_by_hand(package):
    bias = np.arange(12.0, dtype=np.float32)
    moved = back(load(package).permute_rotary(to(package, bias), 2, source="half", target="interleaved"))
    assert moved.tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    partly = load(package).permute_rotary(to(package, bias), 2, source="interleaved", target="half", rotary_dim=4)
    assert back(partly).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
    same = back(load(package).permute_rotary(to(package, bias), 2, source="half", target="half"))
    assert np.array_equal(same, bias)


def test_positions_may_be_traced_by_torch_compile():
    torch = pytest.importorskip("torch")
    ours = load("backend_torch")

    def rotated(x, positions):
        frequencies, factor = ours.rotary_frequencies(6)
        return ours.apply_rotary(x, *ours.rotary_tables(positions, frequencies, attention_factor=factor))

    x, positions = torch.rand(2, 4, 3, 10), torch.tensor([[0, 1, 2], [7, 8, 1_000_000]])
    compiled = torch.compile(rotated, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, positions), rotated(x, positions))
