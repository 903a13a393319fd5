"""Wrong arguments of the encodings: the same exception, naming the argument, in all three packages."""

import numpy as np
import pytest

from conformance.tests.refusals_encodings import ROWS
from conformance.tests.three import PACKAGES, load, to
from core_numpy.contract.config import RotaryScaling


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    ("function", "positional", "keywords", "exception", "phrase"), [row[1:] for row in ROWS], ids=[r[0] for r in ROWS]
)
def test_a_wrong_argument_is_refused_by_name(package, function, positional, keywords, exception, phrase):
    call = getattr(load(package), function)
    with pytest.raises(exception) as caught:
        call(*to(package, positional()), **to(package, keywords))
    assert type(caught.value) is exception
    assert phrase in str(caught.value)


def test_the_ids_of_the_rows_differ():
    assert len({row[0] for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize(
    ("fields", "phrase"),
    [
        ({"kind": "yran", "factor": 2.0}, "did you mean 'yarn'?"),
        ({"kind": "yarn", "factor": 2.0}, "RotaryScaling.original_max_length"),
        ({"kind": "linear", "factor": 0.0}, "RotaryScaling.factor"),
        ({"kind": "longrope", "original_max_length": 8, "short_factors": (1.0,)}, "RotaryScaling.long_factors"),
        ({"kind": "ntk", "factor": 2.0, "long_factors": (1.0,)}, "only longrope reads it"),
    ],
)
def test_a_senseless_scaling_is_refused_when_it_is_made(fields, phrase):
    with pytest.raises(ValueError, match="RotaryScaling") as caught:
        RotaryScaling(**fields)
    assert phrase in str(caught.value)


def test_jax_refuses_float64_while_it_is_off():
    jax = pytest.importorskip("jax")
    package = load("backend_jax")
    positions = jax.numpy.arange(3)
    for call in (
        lambda: package.sinusoidal_encoding(positions, 4, dtype="float64"),
        lambda: package.alibi_slopes(2, dtype="float64"),
        lambda: package.alibi_bias(2, 3, dtype="float64"),
    ):
        with pytest.raises(TypeError, match="jax_enable_x64"):
            call()


def test_a_traced_id_past_the_table_reads_as_nan_in_jax():
    jax = pytest.importorskip("jax")
    table = jax.numpy.ones((5, 3))
    rows = jax.jit(load("backend_jax").embed)(table, jax.numpy.array([4, 5, -1]))
    assert np.isnan(rows).all(axis=1).tolist() == [False, True, True]
