"""RNN, GRU, LSTM and transformer blocks on the course's task: parameters, accuracy, time."""

from __future__ import annotations

from typing import Any

from core_numpy.contract.parameters import model_parameters

from .common import NOT_OFFERED, Claim, Report, Table, accuracy, classifier, digits, share, train
from .recurrent import ROWS, train_recurrent

CLAIM = "One block of attention solves the task wholly, with half of the parameters of an LSTM."
HIDDEN, STEPS = 64, 1200


def run(B: Any) -> Report:
    learnt, valid = digits()
    found: dict[str, tuple[float, int, float] | None] = {}
    for kind in ("rnn", "gru", "lstm"):
        offered = B.__name__ != "core_numpy"  # NumPy has no recurrent layers
        found[kind.upper()] = train_recurrent(B, kind, HIDDEN, learnt, valid, STEPS) if offered else None
    for layers in (1, 2):
        config = classifier(B, layers=layers)
        # Down to 0 at the end, so that it settles instead of wandering around the solution.
        model, seconds = train(B, config, learnt, steps=STEPS, batch=ROWS, lr=5e-3, warmup=100, schedule="linear")
        count = sum(size(parameter.shape) for parameter in model_parameters(config).values())
        found[f"{layers} block{'s' * (layers - 1)}"] = (accuracy(B, model, valid), count, seconds)
    measured = {name: row for name, row in found.items() if row is not None}

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        for name, (score, count, seconds) in measured.items():
            left.plot(count, score, "o", markersize=10, label=name)
            right.bar(name, seconds)
        left.set(xlabel="parameters", ylabel="validation accuracy", title="accuracy by size")
        left.axhline(0.5, linestyle="--", color="grey")
        left.legend()
        right.set(ylabel="seconds", title=f"time of {STEPS} updates of {ROWS} rows")

    score, count, _ = measured["1 block"]
    claims = [Claim("One block reaches 1.0000 (no more than one error in 2,000).", share(score), score >= 0.9995)]
    rivals = {name: row for name, row in measured.items() if "block" not in name}
    if rivals:
        best = max(rivals, key=lambda name: rivals[name][0])
        claims.append(
            Claim("No recurrent layer is better than the block.", f"best is {best}, {share(rivals[best][0])}",
                  rivals[best][0] <= score)
        )  # fmt: skip
        claims.append(
            Claim("The block has fewer parameters than the GRU and the LSTM.",
                  f"{count} against {rivals['GRU'][1]} and {rivals['LSTM'][1]}",
                  count < min(rivals["GRU"][1], rivals["LSTM"][1]))
        )  # fmt: skip
    rows = [
        (name, NOT_OFFERED, NOT_OFFERED, NOT_OFFERED) if row is None else (name, row[1], share(row[0]), row[2])
        for name, row in found.items()
    ]
    columns = ("model", "parameters", "accuracy (95 % interval)", "seconds")
    return Report(claims, (Table(f"{STEPS} updates of {ROWS} rows", columns, rows),), draw, size=(10, 4))


def size(shape: tuple[int, ...]) -> int:
    total = 1
    for axis in shape:
        total *= axis
    return total
