"""What a training run shows while it goes on: a bar on a terminal, lines elsewhere, JSON lines when asked."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def bits_per_byte(loss: float) -> float:
    """The loss in nats per byte, in bits: loss / ln 2. For a byte-level model one token is one byte."""
    return loss / math.log(2.0)


class Progress:
    """`row` after each update, `message` for sentences, `close` at the end.

    Lines are printed for the first 20 updates, every twentieth part of the run and the last. Tokens per second, the
    time left and the utilisation are over the last 20 updates, so that a compiling first step does not spoil them.
    `share` is what one token per second is of the machine's measured FLOPs; `unit` is "byte" or "token".
    """

    def __init__(
        self, first: int, steps: int, *, as_json: bool, plain: bool, unit: str = "byte", share: float = 0.0
    ) -> None:
        self.first, self.steps, self.as_json = first, steps, as_json
        self.unit, self.share = unit, share
        self._times: deque[tuple[float, int]] = deque(maxlen=21)
        self._times.append((time.perf_counter(), 0))
        self._bar: Any = None
        if not as_json and not plain and sys.stdout.isatty():
            self._bar = _rich_bar(first, steps)

    def row(self, step: int, result: dict[str, Any]) -> dict[str, Any]:
        """Show one update; gives the row for the log."""
        self._times.append((time.perf_counter(), int(result["tokens"])))
        elapsed = max(self._times[-1][0] - self._times[0][0], 1e-9)  # a clock may stand still for two readings
        speed = sum(tokens for _, tokens in list(self._times)[1:]) / elapsed
        left = (self.steps - step) * elapsed / (len(self._times) - 1)
        loss = float(result["loss"])
        bits = bits_per_byte(loss)
        row = {
            "step": step,
            "loss": loss,
            f"bits_per_{self.unit}": bits,
            "grad_norm": float(result["grad_norm"]),
            "lr": float(result["lr"]),
            "tokens_per_second": round(speed, 1),
            "utilisation": round(speed * self.share, 4),
            "seconds_left": round(left, 1),
        }
        shown = f"loss {loss:.4f}  bits/{self.unit} {bits:.4f}"
        fast = f"{speed:,.0f} tokens/s  {speed * self.share:.0%} of peak"
        if self._bar is not None:
            note = f"{shown}  {fast}"
            self._bar.update(self._bar.task_ids[0], completed=step, note=note)
        elif self.as_json:
            print(json.dumps(row), flush=True)
        elif step <= 20 or step - self.first <= 1 or step == self.steps or step % max(1, self.steps // 20) == 0:
            print(
                f"step {step:>5}/{self.steps}  {shown}  lr {row['lr']:.2e}  {fast}  {_clock(left)} left",
                flush=True,
            )
        return row

    def pause(self, seconds: float) -> None:
        """Leave out time that no update took."""
        self._times = deque(((at + seconds, tokens) for at, tokens in self._times), maxlen=self._times.maxlen)

    def message(self, text: str, **fields: Any) -> None:
        """A sentence for people; the fields, if any, as a JSON line for programs."""
        if self.as_json:
            if fields:
                print(json.dumps(fields), flush=True)
        elif self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def fit_bar(total: int, wanted: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar for `Trainer.fit` on a terminal where rich is installed, else nothing; call what it gives at each step."""
    if not wanted or not sys.stderr.isatty():
        yield lambda report: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress as Bar
    except ImportError:
        yield lambda report: None
        return
    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("training", total=total)
        yield lambda report: bar.update(task, advance=1, description=f"loss {report['loss']:.4f}")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def _rich_bar(first: int, steps: int) -> Any:
    """A started bar, or None without the package rich: lines serve as well."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    bar = Bar(MofNCompleteColumn(), BarColumn(bar_width=20), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
    bar.add_task("train", total=steps, completed=first, note="")
    bar.start()
    return bar
