"""NumPy's pass beside its products alone: all of them, and no others."""

from __future__ import annotations

import json
import re

import pytest

from conformance.race import alone
from conformance.race.products import flops, main, multiplied, products
from conformance.race.task import SIZES, Task
from core_numpy.contract.cost import step_cost


@pytest.mark.parametrize("size", SIZES)
def test_the_products_are_those_that_the_cost_counts(size):
    task = Task(size)
    # All pairs: the cost of a causal model counts those that are seen.
    whole = task.model.replace(causal=False)
    assert flops(task) == step_cost(whole, task.batch, task.length).total.flops
    assert len(products(task)) == 18


def test_the_command_says_the_ratio(capsys, monkeypatch):
    monkeypatch.setattr(alone, "FEWEST_TURNS", 1)
    assert main(["--seconds", "0", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ratio"] == found["pass"] / found["products"] > 1
    assert found["turns"] == 1 and found["environment"]
    multiplied(Task("tiny"))()
    assert main(["--seconds", "0"]) == 0
    assert re.fullmatch(r"tiny.*: forward and backward .* ms, products alone .* times\n", capsys.readouterr().out)
