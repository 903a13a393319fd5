"""The layer functions of `core_numpy`: numbers redone on paper, and gradients against finite differences."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from core_numpy import cross_entropy, dropout, gelu, gradients, layer_norm, pieces, relu, rms_norm, silu, softmax
from core_numpy.random import key, uniform

RNG = np.random.default_rng(7)
X = RNG.standard_normal((2, 3, 5))
WEIGHT, BIAS = RNG.standard_normal(5), RNG.standard_normal(5)
# Central differences of step 1e-5 in float64 are good to about h^2 + 1e-16 / h = 1e-10.
STEP, CLOSE = 1e-5, 2e-9


def differences(f, x, grad):
    """The gradient of sum(grad * f(x)) in x, entry by entry."""
    found = np.zeros_like(x)
    for place in np.ndindex(*x.shape):
        up, down = x.copy(), x.copy()
        up[place] += STEP
        down[place] -= STEP
        found[place] = np.sum(grad * (f(up) - f(down))) / (2 * STEP)
    return found


def check(f, vjp, **arrays):
    """Each gradient that `vjp` gives is that of finite differences."""
    grad = RNG.standard_normal(np.shape(f(**arrays)))
    found = vjp(grad, **arrays)
    assert set(found) == set(arrays)
    for name, x in arrays.items():
        expected = differences(lambda value, name=name: f(**{**arrays, name: value}), x, grad)
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=CLOSE)


def test_softmax_is_exact_on_logarithms():
    x = np.log([[1.0, 2.0, 5.0], [4.0, 4.0, 2.0]])
    np.testing.assert_allclose(softmax(x), [[0.125, 0.25, 0.625], [0.4, 0.4, 0.2]], rtol=1e-15)
    np.testing.assert_allclose(softmax(x, axis=0), [[0.2, 1 / 3, 5 / 7], [0.8, 2 / 3, 2 / 7]], rtol=1e-15)


def test_softmax_ignores_a_constant_of_any_size():
    x = np.array([0.0, 1.0, -2.0])
    np.testing.assert_array_equal(softmax(x + 2.0**40), softmax(x))
    assert np.isfinite(softmax(np.array([1e308, 0.0]))).all()


def test_softmax_of_nothing_is_zero():
    np.testing.assert_array_equal(softmax(np.full((2, 3), -np.inf)), np.zeros((2, 3)))
    np.testing.assert_array_equal(softmax(np.array([-np.inf, 0.0])), [0.0, 1.0])
    assert softmax(np.zeros((2, 0))).shape == (2, 0)


def test_eps_stands_inside_the_root():
    row = np.array([1.0, -1.0, 2.0, -2.0]) * 1e-3
    np.testing.assert_allclose(layer_norm(row, None, None, eps=1e-5)[0], 1e-3 / math.sqrt(2.5e-6 + 1e-5), rtol=1e-14)
    np.testing.assert_allclose(layer_norm(row, None, None, eps=1e-5)[0], 0.28284, atol=1e-5)
    np.testing.assert_allclose(layer_norm(row, None, None, eps=1e-6)[0], 0.53452, atol=1e-5)
    np.testing.assert_allclose(rms_norm(np.full(4, 1e-3), None, eps=1e-6), math.sqrt(0.5), rtol=1e-12)


@pytest.mark.parametrize("mean", [0.0, 100.0, 1000.0, 10000.0])
def test_a_large_mean_does_not_cancel_the_variance(mean):
    """Against the same float32 numbers in float64 by numpy's own two-pass variance."""
    x = (mean + np.arange(16) * 1e-3).astype(np.float32)
    wide = x.astype(np.float64)
    expected = (wide - wide.mean()) / np.sqrt(wide.var() + 1e-5)
    np.testing.assert_allclose(layer_norm(x, None, None, eps=1e-5), expected, rtol=6e-8, atol=1e-12)


def test_the_variance_divides_by_n():
    np.testing.assert_allclose(layer_norm(np.array([1.0, 3.0]), None, None, eps=1e-30), [-1.0, 1.0], rtol=1e-15)


def test_weight_and_bias_are_applied_before_the_rounding():
    x, weight = X.astype(ml_dtypes.bfloat16), WEIGHT
    wide = x.astype(np.float64)
    y = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    assert rms_norm(x, weight, eps=1e-5).dtype == x.dtype
    np.testing.assert_array_equal(rms_norm(x, weight, eps=1e-5), (y * weight).astype(ml_dtypes.bfloat16))
    assert (
        rms_norm(x, weight, eps=1e-5) != (y.astype(ml_dtypes.bfloat16).astype(float) * weight).astype(x.dtype)
    ).any()


def test_a_weight_of_zero_with_unit_offset_is_no_weight():
    np.testing.assert_array_equal(rms_norm(X, np.zeros(5), eps=1e-5, unit_offset=True), rms_norm(X, None, eps=1e-5))
    np.testing.assert_allclose(rms_norm(X, WEIGHT, eps=1e-5, unit_offset=True), rms_norm(X, 1 + WEIGHT, eps=1e-5))


def test_the_two_gelus_differ_by_what_is_known():
    at = np.array([-2.699])
    np.testing.assert_allclose(abs(gelu(at) - gelu(at, approximate="tanh")), 4.73e-4, atol=5e-7)
    np.testing.assert_allclose(gelu(np.array([1.0])), 0.5 * (1 + math.erf(math.sqrt(0.5))), rtol=1e-15)
    # The lower tail, where 1 + erf would cancel to nothing.
    np.testing.assert_allclose(gelu(np.array([-10.0])), -10 * 0.5 * math.erfc(10 / math.sqrt(2)), rtol=1e-13)


def test_silu_and_relu_at_chosen_points():
    np.testing.assert_allclose(silu(np.log([3.0])), math.log(3) * 0.75, rtol=1e-15)
    np.testing.assert_array_equal(relu(np.array([-2.0, 0.0, 3.0])), [0.0, 0.0, 3.0])
    assert np.isnan(relu(np.array([np.nan])))[0]
    np.testing.assert_array_equal(gradients.relu_vjp(np.ones(3), np.array([-2.0, 0.0, 3.0]))["x"], [0.0, 0.0, 1.0])


def test_dropout_keeps_where_the_uniform_number_is_below():
    x = np.array([[1.0, 2.0, np.nan], [4.0, 5.0, 6.0]])
    kept = uniform(key(3), (2, 3)) < np.float32(0.75)
    assert 0 < kept.sum() < 6
    y = dropout(x, 0.25, key(3))
    np.testing.assert_array_equal(y, np.where(kept, x / 0.75, 0.0))
    np.testing.assert_array_equal(dropout(x, 1.0, key(3)), np.zeros((2, 3)))
    np.testing.assert_array_equal(dropout(x, 0.0, None), x)
    assert dropout(x, 0.0, None) is not x


def test_dropout_without_a_key_is_refused():
    with pytest.raises(ValueError, match="key must be given"):
        dropout(X, 0.1, None)


def test_dropout_keeps_the_share_and_the_mean():
    y = dropout(np.ones(40_000), 0.25, key(0))
    # Five standard deviations of a binomial share.
    assert abs(np.mean(y > 0) - 0.75) < 5 * math.sqrt(0.75 * 0.25 / 40_000)
    assert set(np.unique(y)) == {0.0, 1 / 0.75}


def test_cross_entropy_is_the_mean_over_counted_targets():
    logits = np.log([[[1.0, 3.0], [2.0, 2.0]], [[3.0, 1.0], [1.0, 7.0]]])
    targets = np.array([[1, -100], [1, 1]])
    expected = (math.log(4 / 3) + math.log(4.0) + math.log(8 / 7)) / 3
    assert float(cross_entropy(logits, targets)) == pytest.approx(expected, rel=1e-15)


def test_a_target_that_is_not_counted_has_no_effect_even_with_nan():
    logits = np.log([[1.0, 3.0], [2.0, 2.0]])
    logits[1] = np.nan
    targets = np.array([1, -100])
    assert float(cross_entropy(logits, targets)) == pytest.approx(math.log(4 / 3), rel=1e-15)
    found = gradients.cross_entropy_vjp(1.0, logits, targets)["logits"]
    np.testing.assert_allclose(found, [[0.25, -0.25], [0.0, 0.0]], rtol=1e-14)


def test_the_loss_of_nothing_is_zero():
    logits, targets = X[0], np.full(3, 4)
    assert float(cross_entropy(logits, targets, ignore_index=4)) == 0.0
    np.testing.assert_array_equal(
        gradients.cross_entropy_vjp(1.0, logits, targets, ignore_index=4)["logits"], np.zeros((3, 5))
    )


def test_label_smoothing_and_z_loss_have_their_formulas():
    logits = np.log([[1.0, 1.0, 2.0]])
    lse = math.log(4.0)
    smooth = 0.7 * (lse - math.log(2.0)) + 0.1 * (lse + lse + lse - math.log(2.0))
    got = cross_entropy(logits, np.array([2]), label_smoothing=0.3, z_loss=0.5)
    assert float(got) == pytest.approx(smooth + 0.5 * lse * lse, rel=1e-14)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_the_output_has_the_dtype_of_the_input(dtype):
    x, weight = X.astype(dtype), WEIGHT.astype(np.float32)
    results = [softmax(x), layer_norm(x, weight, weight, eps=1e-5), rms_norm(x, weight, eps=1e-5), gelu(x)]
    results += [silu(x), relu(x), dropout(x, 0.5, key(1)), gradients.gelu_vjp(x, x)["x"]]
    assert all(y.dtype == x.dtype for y in results)
    loss = cross_entropy(x, np.zeros((2, 3), dtype=np.int64))
    assert loss.shape == () and loss.dtype == (np.float64 if dtype == np.float64 else np.float32)


def test_arguments_are_not_written_to():
    x, weight = X.copy(), WEIGHT.copy()
    for f in (softmax, gelu, silu, relu):
        f(x)
    layer_norm(x, weight, weight, eps=1e-5)
    gradients.layer_norm_vjp(x, x, weight, weight, eps=1e-5)
    gradients.softmax_vjp(x, x)
    cross_entropy(x, np.zeros((2, 3), dtype=np.int32))
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(weight, WEIGHT)


def test_norm_gradients_match_differences():
    check(lambda x, weight, bias: layer_norm(x, weight, bias, eps=0.1),
          lambda g, x, weight, bias: gradients.layer_norm_vjp(g, x, weight, bias, eps=0.1),
          x=X, weight=WEIGHT, bias=BIAS)  # fmt: skip
    check(lambda x: layer_norm(x, None, None, eps=0.1),
          lambda g, x: gradients.layer_norm_vjp(g, x, None, None, eps=0.1), x=X)  # fmt: skip
    for offset in (False, True):
        check(lambda x, weight, o=offset: rms_norm(x, weight, eps=0.1, unit_offset=o),
              lambda g, x, weight, o=offset: gradients.rms_norm_vjp(g, x, weight, eps=0.1, unit_offset=o),
              x=X, weight=WEIGHT)  # fmt: skip


def test_activation_gradients_match_differences():
    check(gelu, gradients.gelu_vjp, x=X)
    check(lambda x: gelu(x, approximate="tanh"), lambda g, x: gradients.gelu_vjp(g, x, approximate="tanh"), x=X)
    check(silu, gradients.silu_vjp, x=X)
    check(relu, gradients.relu_vjp, x=X)
    check(lambda x: softmax(x, axis=1), lambda g, x: gradients.softmax_vjp(g, x, axis=1), x=X)
    check(lambda x: dropout(x, 0.4, key(5)), lambda g, x: gradients.dropout_vjp(g, x, 0.4, key(5)), x=X)


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.3, 0.0), (0.0, 0.2), (0.3, 0.2)])
def test_cross_entropy_gradients_match_differences(smoothing, z_loss):
    targets = np.array([[1, -100, 4], [0, 0, 2]])
    options = {"label_smoothing": smoothing, "z_loss": z_loss}
    check(lambda logits: cross_entropy(logits, targets, **options),
          lambda g, logits: gradients.cross_entropy_vjp(g, logits, targets, **options), logits=X)  # fmt: skip


def test_linear_gradients_match_differences():
    weight, bias = RNG.standard_normal((5, 4)), RNG.standard_normal(4)
    check(lambda x, weight, bias: x @ weight + bias, gradients.linear_vjp, x=X, weight=weight, bias=bias)


LOSS = {"label_smoothing": 0.1, "z_loss": 0.2}


@pytest.mark.parametrize("piece", [1, 7, 15])
@pytest.mark.parametrize("targets", [np.array([[4, 0, 2], [1, 1, 3]]), np.array([[4, -100, 2], [1, -100, 3]])])
def test_a_formula_is_the_same_a_piece_at_a_time(piece, targets, monkeypatch):
    sizes = []

    def results():
        grad = np.cos(X)
        yield from (gelu(X), gelu(X, approximate="tanh"), silu(X), layer_norm(X, WEIGHT, BIAS, eps=1e-5))
        yield from (rms_norm(X, WEIGHT, eps=1e-5), cross_entropy(X, targets, **LOSS))
        for found in (
            gradients.gelu_vjp(grad, X), gradients.gelu_vjp(grad, X, approximate="tanh"), gradients.silu_vjp(grad, X),
            gradients.layer_norm_vjp(grad, X, WEIGHT, BIAS, eps=1e-5), gradients.rms_norm_vjp(grad, X, WEIGHT, eps=0.1),
            gradients.cross_entropy_vjp(1.0, X, targets, **LOSS),
        ):  # fmt: skip
            yield from found.values()
        yield from pieces.by_element(lambda x: (sizes.append(x.size), (x, 2.0 * x))[1], X)

    whole = list(results())
    monkeypatch.setattr(pieces, "PIECE", piece)
    for got, want in zip(results(), whole, strict=True):
        assert np.shape(got) == np.shape(want)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-15)
    assert sizes[0] == X.size and max(sizes[1:]) == piece and sum(sizes[1:]) == X.size


def test_pieces_of_nothing_have_its_shape():
    nothing = np.zeros((2, 0, 5))
    assert gelu(nothing).shape == layer_norm(nothing, WEIGHT, None, eps=1e-5).shape == nothing.shape
    assert gradients.rms_norm_vjp(nothing, nothing, WEIGHT, eps=1e-5)["weight"].tolist() == [0.0] * 5


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: softmax(np.arange(3)), TypeError, "x must be one of float16"),
        (lambda: softmax(X, axis=3), ValueError, "axis must be from -3 to 2"),
        (lambda: layer_norm(X, WEIGHT[:4], None, eps=1e-5), ValueError, r"weight must have shape \(5,\)"),
        (lambda: layer_norm(X, WEIGHT, None, eps=0.0), ValueError, "eps must be a finite number above 0"),
        (lambda: rms_norm(X, WEIGHT, eps=1e-5, unit_offset=1), TypeError, "unit_offset must be True or False"),
        (lambda: gelu(X, approximate="erf"), ValueError, "approximate must be one of 'none', 'tanh'"),
        (lambda: dropout(X, 1.5, key(0)), ValueError, "rate must be a number from 0 to 1"),
        (lambda: cross_entropy(X, np.zeros((2, 5), int)), ValueError, r"targets must have shape \(2, 3\)"),
        (lambda: cross_entropy(X, np.zeros((2, 3))), TypeError, "targets must hold integers"),
        (lambda: cross_entropy(X, np.full((2, 3), 5)), ValueError, "targets must be from 0 to 4"),
        (lambda: cross_entropy(X, np.full((2, 3), -1)), ValueError, "or -100 for not counted; got -1"),
        (lambda: cross_entropy(X, np.zeros((2, 3), int), label_smoothing=1.0), ValueError, "label_smoothing must be"),
    ],
)
def test_wrong_arguments_are_refused_by_name(call, error, words):
    with pytest.raises(error, match=words):
        call()
