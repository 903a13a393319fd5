"""The node cases of the installed `onnx` package: the standard's own numbers for its own operators.

Every case is one node with inputs and the outputs that onnx's reference, a second independent implementation, gave for
it. `onnx_operators` translates the node into calls of the public names. Judged as onnx judges a runtime: equal shapes
and dtypes, |got - want| <= 1e-7 + 1e-3 |want|, with 2^-6 in the place of 1e-3 for bfloat16. For float32 that is wide:
`where` gives the largest error beside it. For float16 it is narrow, two roundings at most, and the reference itself,
which computes in float16, is up to 1.4 units in the last place from the exact value: only what is rounded once can
count on passing.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from ..budget import UNIT
from ..compare import Disagreement, Tally, check_kind, check_within
from ..rows import Pattern, matches
from ..runner import Result, ask, judged
from ..targets.protocol import NotOffered, Target
from . import OutsideCase
from .onnx_operators import OPERATORS, Node

try:
    import onnx
except ImportError as error:
    raise ImportError("the suite onnx needs the package onnx: pip install 'attention-conformance[peers]'") from error

# The widest that onnx's own runner allows where it compares bfloat16: two units in the last place.
BFLOAT16_RTOL = 2.0**-6


@dataclass(frozen=True)
class NodeCase(OutsideCase):
    """node: what is asked. wanted: the outputs that onnx's reference gave, by the schema's names."""

    id: str
    function: str
    rules: tuple[str, ...]
    node: Node
    wanted: dict[str, np.ndarray]
    rtol: float
    atol: float

    @property
    def dtype(self) -> str:
        return str(next(iter(self.node.inputs.values())).dtype)

    def judge(self, target: Target, level: str) -> Iterator[Result]:
        """With the target's own choice of kernel; from level full on also with each kernel that it lists."""
        for kernel in target.kernels() if level != "quick" and self.function == "attention" else ["auto"]:
            yield judged(self, target, self.dtype, kernel, partial(self._ask, target, kernel))

    def _ask(self, target: Target, kernel: str, tally: Tally) -> None:
        if self.dtype not in target.dtypes():
            raise NotOffered(f"no {self.dtype}")
        chosen = {} if kernel == "auto" else {"kernel": kernel}
        answer = OPERATORS[self.node.operator].answer
        _compare(tally, self, answer(self.node, lambda function, given: ask(target, function, given | chosen)))


def cases(level: str = "quick", pattern: Pattern = None) -> list[NodeCase]:
    """The cases of the operators that have a translation; the levels differ in the kernels, not in the cases."""
    return [case for case in _load() if matches(pattern, case.id, case.function)]


def _compare(tally: Tally, case: NodeCase, got: dict[str, np.ndarray]) -> None:
    """Every output that the case has. The largest error of all is kept beside the place of the worst share."""
    worst = 0.0
    for name, want in case.wanted.items():
        if name not in got:
            raise Disagreement(f"no output {name}; got {list(got)}")
        check_kind(name, got[name], want.shape, str(want.dtype))
        exact = want.astype(np.float64)
        rtol = max(case.rtol, BFLOAT16_RTOL) if case.dtype == "bfloat16" else case.rtol
        bound = case.atol + rtol * np.where(np.isfinite(exact), np.abs(exact), 0.0)
        check_within(tally, name, got[name], exact, bound)
        worst = max(worst, _relative(got[name].astype(np.float64), exact))
    tally.where += (
        f" (largest error of all: {worst:.2g} of an output's largest value, {worst / UNIT[case.dtype]:.2g} u)"
    )


def _relative(got: np.ndarray, want: np.ndarray) -> float:
    finite = np.isfinite(want)
    size = np.abs(want[finite]).max(initial=0.0)
    return float(np.abs(got[finite] - want[finite]).max(initial=0.0) / size) if size else 0.0


@cache
def _load() -> tuple[NodeCase, ...]:
    # Importing one of these modules makes its cases; onnx's own collectors import all 400 of them and take ten seconds.
    # They reseed NumPy's global generator on the way, which is put back.
    state = np.random.get_state()
    try:
        for operator in OPERATORS.values():
            importlib.import_module(f"onnx.backend.test.case.node.{operator.module}")
    finally:
        np.random.set_state(state)
    collected = importlib.import_module("onnx.backend.test.case.node")._NodeTestCases
    found = [case for test in collected for case in _case(test)]
    return tuple(sorted(found, key=lambda case: list(OPERATORS).index(case.node.operator)))


def _case(test: Any) -> Iterator[NodeCase]:
    """The case of a test whose graph is one node of a translated operator; "expanded" tests are the same twice."""
    nodes = test.model.graph.node
    if len(nodes) != 1 or nodes[0].op_type not in OPERATORS or nodes[0].domain not in ("", "ai.onnx"):
        return
    (node,) = nodes
    version = next(opset.version for opset in test.model.opset_import if opset.domain in ("", "ai.onnx"))
    schema = onnx.defs.get_schema(node.op_type, version)
    value = onnx.helper.get_attribute_value
    attributes = {name: value(a.default_value) for name, a in schema.attributes.items() if a.default_value.name}
    attributes |= {a.name: value(a) for a in node.attribute}
    for number, (inputs, outputs) in enumerate(test.data_sets):
        wanted = _by_name(schema.outputs, node.output, outputs)
        question = Node(node.op_type, attributes, _by_name(schema.inputs, node.input, inputs), tuple(wanted))
        operator = OPERATORS[node.op_type]
        yield NodeCase(
            id=f"onnx/{test.name}" + (f"/{number}" if number else ""),
            function=operator.function,
            rules=(f"onnx.{node.op_type}-{schema.since_version}",),
            node=question,
            wanted=wanted,
            rtol=test.rtol,
            atol=test.atol,
        )


def _by_name(formal: Any, actual: Any, arrays: Any) -> dict[str, np.ndarray]:
    """Arrays by the schema's names; an optional one that is left out has an empty name in the node."""
    present = [parameter.name for parameter, name in zip(formal, actual, strict=False) if name]
    return dict(zip(present, (np.asarray(x) for x in arrays), strict=True))
