"""Layouts, strides, arguments written into and float32 that is none: caught and named, also outside the zoo."""

import types

import numpy as np
import pytest

import core_numpy
from conformance.diagnose import named_rightly, score_zoo
from conformance.guesses import Bench, diagnose, evidence
from conformance.memory import remembering
from conformance.observations import rows_of
from conformance.rows import load_cases
from conformance.runner import FAILED, run_case
from conformance.targets.protocol import STRIDED, Target, strided_copy
from conformance.zoo import all_faults, catch
from conformance.zoo.every import group_of
from conformance.zoo.memory_faults import as_contiguous, as_rows
from conformance.zoo.precision_faults import to_bfloat16, to_tf32

FAULTS = [fault for fault in all_faults() if group_of(fault) in ("memory", "precision")]


def attention(q, k, v, *, mask=None, short=lambda x: x):
    """In the inputs' own type; the exponentials are shortened, not the weights, as fused kernels do it."""
    if k.shape[:-2] != q.shape[:-2]:
        raise NotImplementedError("as many key heads as query heads")
    q, k, v = (short(x) for x in (q, k, v))
    s = np.einsum("...td,...sd->...ts", q, k) * q.dtype.type(q.shape[-1] ** -0.5)
    s = s if mask is None else np.where(mask, s, -np.inf)
    e = np.exp(s - np.maximum(s.max(-1, keepdims=True, initial=-np.inf), -1e30)).astype(q.dtype)
    return np.einsum("...ts,...sd->...td", short(e), v) / np.maximum(e.sum(-1, keepdims=True), q.dtype.type(1e-30))


def outside(function, *dtypes):
    return Target(types.SimpleNamespace(attention=function, DTYPES=dtypes or ("float64", "float32")), "outside")


@pytest.fixture(scope="module", autouse=True)
def kept():
    """What the faults of the zoo give on a case is the same for every target."""
    with remembering():
        yield


def guesses_of(target, pattern="attention-"):
    return diagnose(target, rows_of(target, "quick", pattern), Bench())


def turned(x):
    return np.ascontiguousarray(np.swapaxes(x, -3, -2))


def transposed(q, k, v):
    """(B, T, H, D); its errors are of another kind than NumPy's, as another framework's are."""
    if q.ndim < 3:
        return attention(q, k, v)
    q, k, v = (np.swapaxes(x, -3, -2) for x in (q, k, v))
    if q.shape[-3] != k.shape[-3]:
        raise RuntimeError("as many key heads as query heads")
    return turned(attention(q, k, v))


def scaled_in_place(q, k, v):
    right = attention(q, k, v)
    q /= q.dtype.type(q.shape[-1] ** 0.5)
    return right


OUTSIDE = {
    "layout-inputs": transposed,
    "layout-output": lambda q, k, v: turned(attention(q, k, v)) if q.ndim > 2 else attention(q, k, v),
    "layout-output-viewed": lambda q, k, v: (
        turned(attention(q, k, v)).reshape(*q.shape[:-1], -1) if q.ndim > 2 else attention(q, k, v)
    ),
    "strides-ignored": lambda q, k, v: attention(*(as_contiguous(x) for x in (q, k, v))),
    "strides-of-rows-ignored": lambda q, k, v: attention(*(as_rows(x) for x in (q, k, v))),
    "strides-of-masks-ignored": lambda q, k, v, *, mask=None: attention(q, k, v, mask=as_contiguous(mask)),
    "overwrites-queries": scaled_in_place,
    "inputs-bfloat16": lambda q, k, v: attention(*(to_bfloat16(x) for x in (q, k, v))),
    "output-bfloat16": lambda q, k, v: to_bfloat16(attention(q, k, v)),
}


@pytest.mark.parametrize("name", list(OUTSIDE))
def test_it_is_named_at_the_first_guess(name):
    dtypes = ("float32",) if name.endswith("bfloat16") else ()
    guess = guesses_of(outside(OUTSIDE[name], *dtypes))[0]
    assert guess.fault.id == name and guess.score > 0.6, (guess.fault.id, guess.contradicted)


@pytest.mark.parametrize(("short", "names"), [
    (to_tf32, {"products-tf32"}), (to_bfloat16, {"products-bfloat16", "inputs-bfloat16"}),
])  # fmt: skip
def test_products_in_a_shorter_type_are_named_by_how_large_their_errors_are(short, names):
    """Whether the weights or the exponentials are shortened, no fault of the zoo knows: the digits are others."""
    target = outside(lambda q, k, v, *, mask=None: attention(q, k, v, mask=mask, short=short), "float32")
    guess = guesses_of(target)[0]
    assert guess.fault.id in names and len(guess.explained) > 5
    assert guess.by_size and "by their size" in evidence(guess)


def test_a_wrong_scale_in_float32_is_no_matter_of_size():
    def wrong(q, k, v):
        return attention(q * q.dtype.type(1.1), k, v)

    assert not any(guess.by_size for guess in guesses_of(outside(wrong, "float32")))


@pytest.mark.slow
def test_a_fault_of_memory_or_precision_is_caught_and_named_on_the_rows_of_its_functions():
    with remembering():
        for fault in FAULTS:
            assert catch(fault, first=True).cases, fault.id
        assert sorted(named_rightly(score_zoo(FAULTS))) == sorted(fault.id for fault in FAULTS)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4), (2, 1, 3, 4), (2, 0, 3)])
def test_a_strided_copy_has_the_same_values_elsewhere_in_memory(shape):
    x = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    for way in STRIDED:
        copy = strided_copy(x, way)
        np.testing.assert_array_equal(copy, x)
        assert copy.ndim == 0 or way != "transposed" or copy.strides[-1] == x.itemsize
        if 0 not in shape and x.ndim > 1 and (x.ndim == 2 or way == "strided" or shape[-3] > 1):
            assert not copy.flags.c_contiguous
            assert not np.array_equal(as_contiguous(copy), x)


def test_torch_gets_the_same_strides():
    torch = pytest.importorskip("torch")
    from conformance.targets.torch_target import strided_tensor

    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for way in STRIDED:
        for part in (x, x[0]):
            ours, theirs = strided_copy(part, way), strided_tensor(torch.from_numpy(part.copy()), way)
            assert tuple(stride * x.itemsize for stride in theirs.stride()) == ours.strides
            np.testing.assert_array_equal(theirs.numpy(), part)


def test_the_memory_of_an_array_is_not_read_past_its_end():
    backwards = np.arange(6.0)[::-1]
    assert as_contiguous(backwards) is backwards
    spread = np.broadcast_to(np.arange(3.0), (4, 3))
    assert as_contiguous(spread) is spread


def test_a_kernel_that_looks_at_the_last_axis_alone_fails_on_transposed_arrays():
    """Contiguous and evenly spread arrays pass it; a projection's (B, T, H, D) does not."""
    (case,) = [case for case in load_cases() if case.id == "attention-square"]
    by_dtype = {r.dtype: r for r in run_case(case, outside(OUTSIDE["strides-of-rows-ignored"]))}
    assert by_dtype["float32"].status == FAILED and by_dtype["float32"].detail.startswith("transposed out")


def test_what_is_wrong_on_contiguous_arrays_is_not_said_to_be_wrong_by_its_strides():
    def wrong(q, k, v):
        return attention(*(as_contiguous(x) for x in (q, k, v))) + v.dtype.type(1e-3) * v.sum()

    (case,) = [case for case in load_cases() if case.id == "attention-square"]
    by_dtype = {r.dtype: r for r in run_case(case, outside(wrong))}
    assert by_dtype["float32"].status == FAILED and by_dtype["float32"].detail.startswith("out")


def test_a_backward_pass_that_writes_into_the_upstream_gradient_fails_and_is_named():
    def vjp(grad, q, k, v):
        right = core_numpy.gradients.attention_vjp(grad, q, k, v)
        grad *= grad.dtype.type(2)
        return right

    target = outside(attention)
    target.module.gradients = types.SimpleNamespace(attention_vjp=vjp)
    (case,) = [case for case in load_cases() if case.id == "attention-square"]
    said = {r.detail for r in run_case(case, target) if r.status == FAILED}
    assert said == {"the gradient of attention wrote into its argument grad_out"}
    assert guesses_of(target, "attention-s")[0].fault.id == "gradient-overwrites"


def test_a_backward_pass_of_torch_that_writes_into_the_upstream_gradient_fails():
    torch = pytest.importorskip("torch")
    from conformance.targets.torch_target import TorchTarget

    class Doubling(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            context.save_for_backward(x)
            return torch.nn.functional.silu(x)

        @staticmethod
        def backward(context, grad):
            (x,) = context.saved_tensors
            s = torch.sigmoid(x)
            return grad.mul_(s * (1 + x * (1 - s)))

    (case,) = [case for case in load_cases() if case.id == "silu"]
    target = TorchTarget(types.SimpleNamespace(silu=lambda x: Doubling.apply(x), DTYPES=("float64",)), "outside")
    said = {r.detail for r in run_case(case, target) if r.status == FAILED}
    assert said == {"the gradient of silu wrote into its argument grad_out"}


def test_writing_into_an_argument_is_not_taken_for_writing_into_another():
    def keys_in_place(q, k, v):
        right = attention(q, k, v)
        k /= k.dtype.type(k.shape[-1] ** 0.5)
        return right

    target = outside(keys_in_place)
    assert guesses_of(target, "attention-square") == []
    (case,) = [case for case in load_cases() if case.id == "attention-square"]
    assert {r.detail for r in run_case(case, target) if r.status == FAILED} == {"attention wrote into its argument k"}
