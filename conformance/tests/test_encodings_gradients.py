"""Gradients of the encodings: core's against finite differences, and both autodiffs against core's."""

import numpy as np
import pytest

import core_numpy
from conformance.tests.three import load

DRAW = np.random.default_rng(7)


def draw(*shape):
    return DRAW.standard_normal(shape)


IDS = np.array([[1, 4, 1], [0, 1, 3]])
BIAS = {"buckets": 8, "max_distance": 16, "q_offset": 2}
ROTARY = {"source": "half", "target": "interleaved", "rotary_dim": 4}

# name, differentiable arguments by name, the other positional ones after them, keywords
CASES = {
    "embed": ({"table": draw(5, 2)}, (IDS,), {}),
    "relative_bias": ({"table": draw(8, 3)}, (4, 6), BIAS),
    "relative_bias causal": ({"table": draw(8, 3)}, (4, 6), BIAS | {"bidirectional": False}),
    "relative_bias offsets": ({"table": draw(8, 3)}, (4, 6), BIAS | {"q_offset": np.array([0, 9])}),
    "permute_rotary": ({"weight": draw(3, 12)}, (2,), ROTARY),
}
for layout in ("half", "interleaved"):
    for name, shape, table in (
        ("shared", (2, 4, 3, 6), (3, 3)),
        ("batch", (2, 4, 3, 6), (2, 3, 3)),
        ("one", (2, 4, 3, 6), (1, 3, 2)),
        ("plain", (3, 6), (3, 2)),
    ):
        arrays = {"x": draw(*shape), "cos": draw(*table), "sin": draw(*table)}
        CASES[f"apply_rotary {layout} {name}"] = (arrays, (), {"layout": layout})

cases = pytest.mark.parametrize("case", CASES)


def call(package, case, arrays):
    _, rest, keywords = CASES[case]
    return getattr(package, case.split()[0])(*arrays.values(), *rest, **keywords)


def weights_like(out):
    return np.random.default_rng(1).standard_normal(out.shape)


@cases
def test_the_definition_agrees_with_finite_differences(case):
    arrays, rest, keywords = CASES[case]
    grad_out = weights_like(call(core_numpy, case, arrays))
    vjp = getattr(core_numpy, f"{case.split()[0]}_vjp")
    grads = vjp(grad_out, *arrays.values(), *rest, **keywords)
    assert list(grads) == list(arrays)
    for name, x in arrays.items():
        assert grads[name].shape == x.shape and grads[name].dtype == x.dtype
        for index in np.ndindex(x.shape):
            sides = []
            for step in (1e-4, -1e-4):
                moved = x.copy()
                moved[index] += step
                sides.append(np.sum(grad_out * call(core_numpy, case, arrays | {name: moved})))
            # Everything here is linear in each argument, so only rounding (1e-16 / 1e-4) remains.
            assert abs(grads[name][index] - (sides[0] - sides[1]) / 2e-4) < 1e-9


def test_the_gradient_of_the_tables_agrees_with_finite_differences():
    positions, frequencies = np.array([[0, 3], [-2, 7]]), np.array([1.0, 0.3, 0.05])
    grads = draw(2, 2, 3), draw(2, 2, 3)

    def total(f):
        tables = core_numpy.rotary_tables(positions, f, attention_factor=1.5)
        return sum(np.sum(g * t) for g, t in zip(grads, tables, strict=True))

    got = core_numpy.rotary_tables_vjp(*grads, positions, frequencies, attention_factor=1.5)["frequencies"]
    for i, step in enumerate(1e-5 * np.eye(3)):
        # The third derivative times 7^3 1e-10 / 6 is the error of the difference.
        assert abs(got[i] - (total(frequencies + step) - total(frequencies - step)) / 2e-5) < 1e-6


@cases
def test_torch_differentiates_to_the_definition(case):
    torch = pytest.importorskip("torch")
    arrays, rest, keywords = CASES[case]
    tensors = {name: torch.tensor(x, requires_grad=True) for name, x in arrays.items()}
    rest = tuple(torch.tensor(x) if isinstance(x, np.ndarray) else x for x in rest)
    keywords = {name: torch.tensor(x) if isinstance(x, np.ndarray) else x for name, x in keywords.items()}
    out = getattr(load("backend_torch"), case.split()[0])(*tensors.values(), *rest, **keywords)
    grad_out = weights_like(out)
    grads = torch.autograd.grad(out, list(tensors.values()), torch.tensor(grad_out))
    check(case, grad_out, dict(zip(tensors, grads, strict=True)))


@cases
def test_jax_differentiates_to_the_definition(case):
    jax = pytest.importorskip("jax")
    arrays, rest, keywords = CASES[case]
    with jax.enable_x64(True):
        function = getattr(load("backend_jax"), case.split()[0])
        out, pullback = jax.vjp(lambda *x: function(*x, *rest, **keywords), *map(jax.numpy.asarray, arrays.values()))
        grad_out = weights_like(out)
        check(case, grad_out, dict(zip(arrays, pullback(jax.numpy.asarray(grad_out)), strict=True)))


def check(case, grad_out, grads):
    arrays, rest, keywords = CASES[case]
    expected = getattr(core_numpy, f"{case.split()[0]}_vjp")(grad_out, *arrays.values(), *rest, **keywords)
    for name, grad in grads.items():
        np.testing.assert_allclose(np.asarray(grad), expected[name], rtol=1e-12, atol=1e-13)


def test_frequencies_have_a_gradient_in_torch_and_in_jax_without_float64():
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    positions, frequencies = np.array([[0, 3], [-2, 7]], np.int32), np.array([1.0, 0.3, 0.05], np.float32)
    grads = tuple(g.astype(np.float32) for g in (draw(2, 2, 3), draw(2, 2, 3)))
    want = core_numpy.rotary_tables_vjp(*grads, positions, frequencies, attention_factor=1.5)["frequencies"]

    f = torch.tensor(frequencies, requires_grad=True)
    tables = load("backend_torch").rotary_tables(torch.tensor(positions), f, attention_factor=1.5)
    sum((torch.tensor(g) * t).sum() for g, t in zip(grads, tables, strict=True)).backward()
    np.testing.assert_allclose(f.grad, want, rtol=1e-5)

    def total(f):
        tables = load("backend_jax").rotary_tables(jax.numpy.asarray(positions), f, attention_factor=1.5)
        return sum((g * t).sum() for g, t in zip(grads, tables, strict=True))

    np.testing.assert_allclose(jax.grad(total)(jax.numpy.asarray(frequencies)), want, rtol=1e-5)


def test_a_repeated_id_adds_up():
    grad = np.ones((2, 3, 2))
    # Ids 1, 4, 1 and 0, 1, 3: id 1 three times, id 2 never.
    assert core_numpy.embed_vjp(grad, np.zeros((5, 2)), IDS)["table"][:, 0].tolist() == [1, 3, 0, 1, 1]
