"""Row x target x dtype x kernel -> result.

Every result says how many comparisons were made and fails if there were none. A feature that the target does not
offer is a colour of its own, never a pass.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from . import oracle
from .budget import UNIT
from .compare import Disagreement, Tally, check_exact, check_kind, check_together, check_within
from .errormap import error_map
from .functions import ATTENTION, FUNCTIONS
from .inputs import DTYPES, build, rounded, widened
from .memory import remembered
from .rows import Case
from .targets.protocol import STRIDED, NotOffered, Target

HALF = ("float16", "bfloat16")
PASSED, FAILED, ABSENT = "passed", "failed", "not offered"
# A failure of a peer that its differences file explains (deviations.py).
KNOWN = "known difference"


@dataclass(frozen=True)
class Result:
    """One judged call.

    share: of the error budget, over 1 fails; None where there is no number: a wrong shape, an error, what must be
    exact, what is not offered. comparisons: how many were made. errors: where the worst array is off (errormap.py),
    None where no arrays were compared.
    """

    case: str
    rules: tuple[str, ...]
    function: str
    target: str
    dtype: str
    kernel: str
    status: str
    share: float | None
    where: str
    comparisons: int
    detail: str
    seconds: float
    errors: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_case(case: Case, target: Target, level: str = "full") -> Iterator[Result]:
    """All results of one case on one target: dtypes by kernels.

    A target whose calls are compiled first (a second each) gets all of them at "exhaustive" only. At "quick" it gets
    float64 with one of its kernels and one other dtype with the kernel of its own choice; at "full" every dtype with
    its own choice and every kernel with one dtype. Which, turns with the case, so that every combination is met.
    """
    for dtype, kernel in calls(case, target, level):
        yield judge_call(case, target, dtype, kernel)


def judge_call(case: Case, target: Target, dtype: str, kernel: str) -> Result:
    """One call, judged; a dtype that the target does not serve is not offered."""
    if dtype in target.dtypes():
        return judge(case, target, dtype, kernel)
    return judged(case, target, dtype, "auto", _no_dtype(dtype))


def calls(case: Case, target: Target, level: str) -> list[tuple[str, str]]:
    """The dtypes and kernels in which a case is called on a target."""
    # A literal and an unchanged value need no more than float64 and float32; a refusal one dtype.
    dtypes = case.dtypes[: {"agrees": None, "refuses": 1}.get(case.verb, 2)]
    if without_floats(case):
        dtypes = ("float32",)
    kernels = target.kernels() if case.kernels and case.verb != "refuses" else ["auto"]
    if level == "exhaustive" or not target.compiles:
        return [(dtype, kernel) for dtype in dtypes for kernel in kernels]
    dtypes = tuple(dtype for dtype in dtypes if dtype in target.dtypes()) or dtypes
    turn = zlib.crc32(case.id.encode())
    named = kernels[1:] or kernels
    if level == "full":
        more = [(dtypes[(turn + i) % len(dtypes)], kernel) for i, kernel in enumerate(kernels[1:])]
        if len(dtypes) == 1 and more:  # a row of the space: its like come with the other kernels
            more = [more[turn % len(more)]]
        return [*((dtype, "auto") for dtype in dtypes), *more]
    first = (dtypes[0], named[turn % len(named)])
    others = dtypes[1:]
    return [first, (others[turn % len(others)], "auto")] if others else [first]


def _no_dtype(dtype: str) -> Callable[[Tally], None]:
    def work(tally: Tally) -> None:
        raise NotOffered(f"no {dtype}")

    return work


def without_floats(case: Case) -> bool:
    specs = list(case.inputs.values())
    flat = [item for spec in specs for item in (spec["tree"] if isinstance(spec, dict) and "tree" in spec else [spec])]
    return not any(_is_float_spec(spec) for spec in flat)


def _is_float_spec(spec: Any) -> bool:
    if not isinstance(spec, dict):
        return False
    if "values" in spec:
        return spec.get("dtype", "run") == "run"
    return "shape" in spec and not {"density", "high", "segments"} & set(spec)


def judge(case: Case, target: Target, dtype: str, kernel: str = "auto") -> Result:
    """One call, judged."""
    case, lacking = as_offered(case, target)

    def work(tally: Tally) -> None:
        tally.lacking = lacking
        VERBS[case.verb](case, target, dtype, kernel, tally)

    return judged(case, target, dtype, kernel, work)


def as_offered(case: Case, target: Target) -> tuple[Case, str]:
    """A target with `attention` alone is judged by its output where a case asks for the log-sum-exp too."""
    if case.function != "attention_with_lse" or target.offers(case.function) or not target.offers("attention"):
        return case, ""
    equals = None if case.equals is None else {"out": case.equals["out"]}
    return replace(case, function="attention", equals=equals), "lse not offered: no function attention_with_lse"


def judged(case: Any, target: Target, dtype: str, kernel: str, work: Callable[[Tally], None]) -> Result:
    """Run `work` and turn what happens into a result; whatever a target raises fails this case and no other."""
    begun, tally, status, detail = time.perf_counter(), Tally(), PASSED, ""
    measured = False
    try:
        with target.scope(dtype):
            work(tally)
        measured = tally.count > 0 and bool(np.isfinite(tally.share))
        if tally.count == 0:
            status, detail = FAILED, "the case compared nothing"
        elif not tally.share <= 1.0:
            status, detail = FAILED, f"{tally.where} is off by {tally.share:.3g} times its error budget"
        elif not tally.together[0] <= 1.0:
            status, detail = FAILED, _off_together(*tally.together)
        else:
            detail = tally.lacking
    except NotOffered as absent:
        status, detail = ABSENT, str(absent)
    except Disagreement as wrong:
        status, detail = FAILED, str(wrong)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit, a cancelled task, a panic in Rust: it ends its case, not the run
        status, detail = FAILED, f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - begun
    return Result(
        case=case.id,
        rules=case.rules,
        function=case.function,
        target=target.name,
        dtype=dtype,
        kernel=kernel,
        status=status,
        share=tally.share if measured else None,
        where=tally.where,
        comparisons=tally.count,
        detail=printable(detail),
        seconds=seconds,
        errors=None if tally.worst is None else error_map(*tally.worst),
    )


def four_digits(share: float | None) -> float | None:
    """A share as the documents have it."""
    return None if share is None else float(f"{share:.4g}")


def printable(text: str) -> str:
    """One line of it. What a target says may hold what no terminal, XML or UTF-8 file should get: that is escaped."""
    line = " ".join(text.split())[:400]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)


def _off_together(share: float, where: str) -> str:
    return (
        f"{where} over all elements is off by {share:.3g} times what rounding to nearest leaves, each within its own "
        "budget: is it cut where it should be rounded?"
    )


def arguments_of(case: Case, dtype: str, kernel: str = "auto") -> dict[str, Any]:
    """The row's inputs in the run's dtype, and its arguments."""
    given = {name: rounded(build(case.id, name, spec), dtype) for name, spec in case.inputs.items()}
    given |= case.arguments
    if "scaling" in given:
        from core_numpy.contract.config import RotaryScaling

        given["scaling"] = RotaryScaling.from_dict(given["scaling"])
    if kernel != "auto":
        given["kernel"] = kernel
    return given


def _call(target: Target, case: Case, given: dict[str, Any], **options: Any) -> dict[str, np.ndarray]:
    return ask(target, case.function, given, **options)


def ask(target: Target, function: str, given: dict[str, Any], **options: Any) -> dict[str, np.ndarray]:
    """Call a public name of the target; NotOffered for one that it lacks, and for a kernel that cannot serve."""
    target.require(function, given)
    try:
        return target.call(function, given, **options)
    except ValueError as error:
        _refused_kernel(error, given)
        raise


def _refused_kernel(error: ValueError, given: dict[str, Any]) -> None:
    """A kernel that was asked for by name and says why it cannot serve is not offered for these arguments."""
    if "kernel" in given and str(error).startswith("kernel="):
        raise NotOffered(str(error)) from error


def _agrees(case: Case, target: Target, dtype: str, kernel: str, tally: Tally) -> None:
    if case.wide_weights and target.stores_weights(kernel):
        raise NotOffered(f"kernel {kernel} stores the weights of half types after dividing them by their sum")
    given = arguments_of(case, dtype, kernel)
    exact = {name: widened(x) for name, x in given.items() if name != "kernel"}
    want = oracle.expected(case.id, case.function, exact, list(case.gradients), dtype)
    dtypes = result_dtypes(case.function, case.arguments, dtype)
    first = _call(target, case, given)
    compare(tally, "", first, want.results, want.bounds, dtypes, case.tolerance)
    if dtype in HALF and case.function in ("attention", "attention_with_lse"):
        from .plainly import check_beside_plain, plain_output  # which stands on the zoo, and that on this

        plain = remembered(("plain", case.id, case.function, dtype), lambda: plain_output(given, dtype))
        check_beside_plain(tally, first["out"], want.results["out"], plain, dtype)
    if dtype == "float32" and target.framework in ("numpy", "torch"):  # what has strides to get wrong
        for way in STRIDED if tally.share <= 1.0 else ():  # what is wrong already is not wrong by its strides
            got = _call(target, case, given, strided=way)
            compare(tally, f"{way} ", got, want.results, want.bounds, dtypes, case.tolerance)
            if not tally.share <= 1.0:
                return
    if not case.gradients:
        return
    cotangents = {name: rounded(x, lse_dtype(dtype) if name == "lse" else dtype) for name, x in want.cotangents.items()}
    try:
        got = target.gradients(case.function, given, list(case.gradients), cotangents)
    except ValueError as error:
        _refused_kernel(error, given)
        raise
    except NotOffered as absent:  # what it returned is judged all the same
        tally.lacking = "; ".join(filter(None, (tally.lacking, f"gradients not offered: {absent}")))
        return
    compare(tally, "gradient of ", got, want.gradients, want.gradient_bounds, {}, case.tolerance)


def lse_dtype(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def result_dtypes(function: str, arguments: dict[str, Any], dtype: str) -> dict[str, str]:
    """The dtype that each result must have, where the contract fixes it by the run's dtype."""
    if function in ATTENTION:
        return {name: lse_dtype(dtype) if name == "lse" else dtype for name in FUNCTIONS[function].results}
    if function == "mask_to_bias":
        return {"bias": arguments["dtype"]}
    follows = (
        "layer_norm",
        "rms_norm",
        "gelu",
        "silu",
        "relu",
        "softmax",
        "dropout",
        "apply_rotary",
        "embed",
        "relative_bias",
    )
    return {"out": dtype, "bias": dtype} if function in follows else {}


def compare(
    tally: Tally,
    prefix: str,
    got: dict[str, np.ndarray],
    want: dict[str, np.ndarray],
    bounds: dict[str, np.ndarray],
    dtypes: dict[str, str],
    tolerance: float,
) -> None:
    """Every array of `want`, within its bound or, where it has none, exactly; a tolerance joins, relative."""
    if list(got) != list(want):
        raise Disagreement(f"expected {list(want)}; got {list(got)}")
    for name, value in want.items():
        check_kind(f"{prefix}{name}", got[name], value.shape, dtypes.get(name))
        if name not in bounds:
            check_exact(tally, f"{prefix}{name}", got[name], value)
            continue
        bound = bounds[name] + (tolerance * np.abs(value) if tolerance else 0.0)
        own = str(got[name].dtype)
        right = overflowed(value, own)
        check_within(tally, f"{prefix}{name}", got[name], right, bound)
        if own in HALF:
            check_together(tally, f"{prefix}{name}", got[name], right, bound, own)


def overflowed(value: np.ndarray, dtype: str) -> np.ndarray:
    """What is too large for the result's own type is infinite there."""
    if dtype not in DTYPES or dtype in ("float64", "bfloat16"):
        return value
    limit = float(np.finfo(DTYPES[dtype]).max) * (1.0 + UNIT[dtype])
    wide = np.asarray(value, dtype=np.float64)
    return np.where(np.abs(wide) > limit, np.copysign(np.inf, wide), wide)


def _equals(case: Case, target: Target, dtype: str, kernel: str, tally: Tally) -> None:
    assert case.equals is not None
    got = _call(target, case, arguments_of(case, dtype, kernel))
    dtypes = result_dtypes(case.function, case.arguments, dtype)
    for name, literal in case.equals.items():
        want = np.array(build(case.id, name, literal if isinstance(literal, dict) else {"values": literal}))
        check_kind(name, got[name], want.shape, dtypes.get(name))
        if want.dtype == bool or np.issubdtype(want.dtype, np.integer) or FUNCTIONS[case.function].exact:
            check_exact(tally, name, got[name], want)
            continue
        size = np.where(np.isfinite(want), np.abs(want), 0.0)
        # A literal is written with as many digits as float64 shows: rounding to the run's dtype, a few times over.
        bound = np.where(
            size > 0, 16.0 * UNIT[dtype if dtype != "float64" else "float64"] * np.maximum(size, 1e-3), 0.0
        )
        check_within(tally, name, got[name], want, bound + case.tolerance * size)


def _refuses(case: Case, target: Target, dtype: str, kernel: str, tally: Tally) -> None:
    assert case.refuses is not None
    given = arguments_of(case, dtype)
    target.require(case.function, given)
    if not target.refuses():
        raise NotOffered("it does not say REFUSALS = True, that it promises the contract's refusals")
    try:
        target.call(case.function, given)
    except Exception as error:
        name, phrase = case.refuses["type"], case.refuses["phrase"]
        if type(error).__name__ != name:
            raise Disagreement(f"must raise {name}; got {type(error).__name__}: {error}") from error
        if phrase not in str(error):
            raise Disagreement(f"the error must say {phrase!r}; it says {error}") from error
        tally.add("refusal", 0.0)
        return
    raise Disagreement(f"must raise {case.refuses['type']} ({case.refuses['phrase']!r}); it returned")


def _unchanged(case: Case, target: Target, dtype: str, kernel: str, tally: Tally) -> None:
    assert case.unchanged is not None
    if case.unchanged.get("shields") == "pairs" and not target.shields_pairs(kernel):
        raise NotOffered(f"kernel {kernel} shields only keys that no query may attend to")
    given = arguments_of(case, dtype, kernel)
    name, place, values = case.unchanged["input"], case.unchanged["at"], case.unchanged["values"]
    kept: dict[str, Any] = {
        key: tuple(slice(*pair) for pair in where) for key, where in case.unchanged.get("only", {}).items()
    }
    reference = _call(target, case, given)
    wrt = list(case.gradients)
    cotangents = {key: rounded(np.ones(value.shape), str(value.dtype)) for key, value in reference.items()}
    for key, where in kept.items():
        part = np.zeros_like(cotangents[key])
        part[where] = cotangents[key][where]
        cotangents[key] = part
    try:
        before = target.gradients(case.function, given, wrt, cotangents) if wrt else {}
    except NotOffered as absent:  # its results are judged all the same
        before, wrt = {}, []
        tally.lacking = f"gradients not offered: {absent}"
    for value in values:
        moved = dict(given)
        moved[name] = given[name].copy()
        moved[name][tuple(slice(*pair) for pair in place)] = rounded(
            np.float64({"nan": np.nan, "inf": np.inf}.get(value, value)) * np.ones(()), dtype
        )
        got = _call(target, case, moved)
        for key, want in reference.items():
            where = kept.get(key, ...)
            check_exact(tally, f"{key} with {name} at {value}", got[key][where], want[where])
        if wrt:
            after = target.gradients(case.function, moved, wrt, cotangents)
            for key, want in before.items():
                check_exact(tally, f"gradient of {key} with {name} at {value}", after[key], want)


Verb = Callable[[Case, Target, str, str, Tally], None]
VERBS: dict[str, Verb] = {"agrees": _agrees, "equals": _equals, "refuses": _refuses, "unchanged": _unchanged}
