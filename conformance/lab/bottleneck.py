"""An LSTM reads the digits one by one and answers from its last state: everything has to fit through that."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from .common import NOT_OFFERED, Claim, Report, Table, digits, share, share_interval
from .recurrent import ROWS, train_recurrent

CLAIM = "A sequence squeezed into one state loses what does not fit: an LSTM needs room to answer from its last state."
SIZES, STEPS = (2, 4, 8, 64), 1500


def run(B: Any) -> Report:
    if B.__name__ == "core_numpy":
        note = "NumPy has no LSTM of its own; run this with --backend backend_torch or backend_jax."
        table = Table("an LSTM's last state", ("hidden size", "accuracy"), [(size, NOT_OFFERED) for size in SIZES])
        return Report((), (table,), lambda figure: figure.text(0.5, 0.5, note, ha="center"), notes=(note,))
    train, valid = digits()
    found = [train_recurrent(B, "lstm", size, train, valid, STEPS) for size in SIZES]
    scores = [score for score, _, _ in found]

    least = min(after - before for before, after in pairwise(scores))

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        ends = [share_interval(score) for score in scores]
        reach = [[s - low for s, (low, _) in zip(scores, ends, strict=True)],
                 [high - s for s, (_, high) in zip(scores, ends, strict=True)]]  # fmt: skip
        axes.errorbar(SIZES, scores, yerr=reach, marker="o", capsize=4)
        axes.axhline(0.5, linestyle="--", color="grey", label="chance")
        axes.set_xscale("log", base=2)
        axes.set_xticks(SIZES, [str(size) for size in SIZES])
        axes.set(xlabel="hidden size", ylabel="validation accuracy", title="An LSTM's last state", ylim=(0.4, 1.02))
        axes.legend()

    return Report(
        (
            Claim("A state of 2 does little better than chance (below 0.70).", share(scores[0]), scores[0] < 0.70),
            Claim("A state of 64 answers about 0.98 (0.95 or more).", share(scores[3]), scores[3] >= 0.95),
            Claim("More room does not hurt (by 0.03 or more).", ", ".join(f"{s:.3f}" for s in scores), least > -0.03),
        ),
        (
            Table(
                f"an LSTM's last state, {STEPS} updates of {ROWS} rows",
                ("hidden size", "parameters", "accuracy (95 % interval)", "seconds"),
                [(n, count, share(score), sec) for n, (score, count, sec) in zip(SIZES, found, strict=True)],
            ),
        ),
        draw,
    )
