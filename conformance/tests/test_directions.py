"""Gradients by other ways than formulas: differences along random directions, and both modes as adjoints."""

import types

import numpy as np
import pytest

from conformance import models, oracle, space
from conformance.directions import directions, model_directions
from conformance.functions import ATTENTION, FUNCTIONS
from conformance.inputs import widened
from conformance.reference import call, native
from conformance.runner import arguments_of
from conformance.targets import load
from conformance.zoo import all_faults
from conformance.zoo.catching import touched
from conformance.zoo.every import group_of
from conformance.zoo.faults import Faulty

# relu has no derivative at 0, where the contract says 0 and a difference says a half.
WRONG = [fault for fault in all_faults() if group_of(fault) == "gradients" and fault.id != "gradient-relu-zero"]
DIFFERENTIABLE = [case for case in models.select_models("quick") if case.train is None and "targets" in case.batch]
DIFFERENTIABLE = [case for case in DIFFERENTIABLE if not case.call]


def cases(level="quick"):
    return [case for case in space.select(level) if case.verb == "agrees" and case.gradients]


def test_the_gradients_that_targets_are_judged_by_are_those_of_differences():
    with np.errstate(all="ignore"):
        found = {f"{case.id} {one.argument}": one for case in cases() for one in directions(case)}
    assert len(found) > 150 and not [name for name, one in found.items() if not one.apart < 0.5]
    assert sum(one.size > 0 for one in found.values()) > 0.9 * len(found)


@pytest.mark.slow
def test_so_they_are_at_full():
    with np.errstate(all="ignore"):
        wrong = [(case.id, one) for case in cases("full") for one in directions(case) if not one.apart < 1.0]
    assert wrong == []


def test_the_gradients_of_models_are_those_of_differences():
    assert len(DIFFERENTIABLE) > 20
    assert not [(case.id, one) for case in DIFFERENTIABLE for one in model_directions(case) if not one.apart < 0.5]


@pytest.mark.slow
def test_so_is_that_of_each_parameter_alone():
    found = [(case.id, one) for case in DIFFERENTIABLE for one in model_directions(case, each=True)]
    assert len(found) > 500 and not [(name, one) for name, one in found if not one.apart < 1.0]


def gradients_of(fault):
    faulty = Faulty(fault)

    def gradients(function, arguments, wrt, cotangents):
        rest = dict(native(arguments))
        spec = FUNCTIONS[function]
        positional = [rest.pop(name) for name in spec.positional if name in rest]
        got = getattr(faulty.gradients, f"{function}_vjp")(*cotangents.values(), *positional, **rest)
        if not isinstance(got, dict):
            names = [name for name in spec.positional if name in spec.differentiable]
            got = dict(zip(names, got if isinstance(got, tuple | list) else (got,), strict=True))
        return {name: np.asarray(got[name]) for name in wrt}

    return gradients


@pytest.mark.parametrize("fault", WRONG[::3], ids=lambda fault: fault.id)
def test_a_wrong_gradient_is_far_from_every_difference(fault):
    with np.errstate(all="ignore"):
        own = [case for case in cases() if case.function in touched(fault)]
        assert any(not one.apart < 100.0 for case in own for one in directions(case, gradients_of(fault)))


@pytest.mark.slow
def test_so_is_every_wrong_gradient():
    with np.errstate(all="ignore"):
        for fault in WRONG:
            own = [case for case in cases() if case.function in touched(fault)]
            assert any(not one.apart < 100.0 for case in own for one in directions(case, gradients_of(fault))), fault.id


def test_a_wrong_gradient_of_a_model_is_far_from_every_difference():
    import core_numpy

    def halved(model, batch, **more):
        loss, found = core_numpy.loss_and_gradients(model, batch, **more)
        return loss, {name: x / 2 if name.endswith("scale") or "norm" in name else x for name, x in found.items()}

    names = ("Transformer", "ModelConfig", "get_params", "set_params", "key")
    module = types.SimpleNamespace(loss_and_gradients=halved, **{name: getattr(core_numpy, name) for name in names})
    assert all(one.apart > 10.0 for one in model_directions(DIFFERENTIABLE[0], module))


def both_modes(target, case):
    """<u, J d> by forward mode and <J^T u, d> by reverse mode, and the size of the products. By the formula, the kernel
    that has both."""
    given = arguments_of(case, "float64", "dense")
    exact = {name: widened(x) for name, x in given.items() if name != "kernel"}
    outer = oracle.drawn(case.id, call(case.function, exact), "float64")
    d = {n: np.where(np.isfinite(exact[n]), exact[n], 0.0)[..., ::-1].copy() for n in case.gradients}
    with target.scope("float64"):
        pulled = target.gradients(case.function, given, list(case.gradients), outer)
        rest = {name: target.native(x) for name, x in given.items()}
        wrt = {name: rest.pop(name) for name in d}

        def function(moved):
            every = {**rest, **moved}
            positional = [every.pop(name) for name in FUNCTIONS[case.function].positional if name in every]
            got = getattr(target.module, case.function)(*positional, **every)
            return got if isinstance(got, tuple) else (got,)

        _, found = PUSH[target.framework](function, wrt, {name: target.native(x) for name, x in d.items()})
        pushed = [np.nan_to_num(target.numpy(x)) for x in found]
    products = np.concatenate([np.ravel(np.nan_to_num(pulled[n]) * d[n]) for n in case.gradients])
    along = sum(float((u * x).sum()) for u, x in zip(outer.values(), pushed, strict=True))
    return along, products.sum(), np.abs(products).sum()


def by_torch(function, wrt, d):
    import torch

    return torch.func.jvp(function, (wrt,), (d,))


def by_jax(function, wrt, d):
    import jax

    return jax.jvp(function, (wrt,), (d,))


PUSH = {"torch": by_torch, "jax": by_jax}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, on its way to forward mode
@pytest.mark.parametrize("name", ["torch", "jax"])
def test_forward_and_reverse_mode_are_adjoint(name):
    pytest.importorskip(name)
    target = load(name)
    # A log-sum-exp has no gradient by v alone.
    own = [case for case in cases() if case.function in ATTENTION and "q" in case.gradients]
    own = own if name == "torch" else own[::6]  # JAX compiles each
    assert len(own) > 5
    for case in own:
        pushed, pulled, size = both_modes(target, case)
        assert abs(pushed - pulled) <= 1e-12 * size, (case.id, pushed, pulled, size)
