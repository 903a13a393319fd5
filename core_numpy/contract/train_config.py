"""How to train: frozen, checked when it is made; `contract.config` offers it beside the other configurations."""

from __future__ import annotations

from dataclasses import dataclass

from .checked import Checked, fraction

OPTIMIZERS = ("adamw", "sgd", "lion")
SCHEDULES = ("constant", "cosine", "linear", "wsd")
PRECISIONS = ("float32", "bfloat16", "float16", "float64")
# Two words of 32 bits make a key.
SEEDS = 2**64
# The largest and the least normal number of float32; below it some devices compute with 0.
FLOAT32_MOST, FLOAT32_LEAST = 3.4028234663852886e38, 1.1754943508222875e-38
MATMUL_PRECISIONS = ("highest", "default")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Checked):
    """How to train. `lr` is per step, `warmup` and `steps` count optimiser steps, `clip_norm=None` never clips.

    `final_lr` is where cosine, linear and wsd end. `decay_steps` is the length of wsd's last phase (a tenth of
    the steps when None). `ema` is the decay of an exponential moving average of the weights, or None.
    `betas` serve adamw and lion; sgd takes `betas[0]` as its momentum. `nonfinite` says what a gradient that is
    NaN or infinite does: "stop" raises with the step and the parameters' names, "skip" leaves the step out.
    """

    optimizer: str = "adamw"
    steps: int = 1000
    batch: int = 16
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    schedule: str = "constant"
    warmup: int = 0
    final_lr: float = 0.0
    accumulate: int = 1
    precision: str = "float32"
    matmul_precision: str = "highest"
    remat: bool = False
    compile: bool | str = "auto"
    seed: int = 0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    ema: float | None = None
    parallel: dict[str, int] | None = None
    decay_steps: int | None = None
    nonfinite: str = "stop"

    def __post_init__(self) -> None:
        self._unwrap()
        self._choice("optimizer", OPTIMIZERS)
        self._integer("steps", 0)
        self._integer("batch", 1)
        self._number("lr", least=0.0)
        betas = self.betas
        if not isinstance(betas, tuple) or len(betas) != 2 or not all(fraction(beta) for beta in betas):
            self._fail("betas", "two numbers, each at least 0 and below 1")
        self._number("eps", above=0.0)
        self._number("weight_decay", least=0.0)
        self._number("clip_norm", above=0.0, optional=True)
        self._choice("schedule", SCHEDULES)
        self._integer("warmup", 0)
        if self.warmup > self.steps:
            self._fail("warmup", f"at most steps ({self.steps})")
        self._number("final_lr", least=0.0)
        self._integer("decay_steps", 0, optional=True)
        if self.decay_steps is not None and self.warmup + self.decay_steps > self.steps:
            self._fail("decay_steps", f"at most steps - warmup ({self.steps - self.warmup})")
        self._integer("accumulate", 1)
        if self.batch % self.accumulate:
            self._fail("accumulate", f"a divisor of batch ({self.batch})")
        self._choice("precision", PRECISIONS)
        self._choice("matmul_precision", MATMUL_PRECISIONS)
        self._flag("remat")
        if not isinstance(self.compile, str) or self.compile != "auto":
            self._flag("compile")
        self._integer("seed", 0)
        if self.seed >= SEEDS:
            self._fail("seed", "an integer from 0 to 2**64 - 1")
        self._number("label_smoothing", least=0.0, below=1.0)
        self._number("z_loss", least=0.0)
        self._number("ema", above=0.0, below=1.0, optional=True)
        self._choice("nonfinite", ("stop", "skip"))
        self._check_held()
        self._check_parallel()

    def _check_held(self) -> None:
        """Updates are computed in float32: a rate that is infinite there, or an eps that is 0, would give NaN."""
        if self.precision == "float64":
            return
        for field in ("lr", "final_lr", "weight_decay", "clip_norm", "eps", "z_loss"):
            value = getattr(self, field)
            if value is not None and value > FLOAT32_MOST:
                self._fail(field, f"at most {FLOAT32_MOST:.3g}, what float32 holds, for precision={self.precision!r}")
        if self.eps < FLOAT32_LEAST:
            self._fail("eps", f"at least {FLOAT32_LEAST:.3g}, float32's least, for precision={self.precision!r}")

    def _check_parallel(self) -> None:
        if self.parallel is None:
            return
        expected = 'None or axis sizes such as {"data": 2, "tensor": 2}'
        if not isinstance(self.parallel, dict):
            self._fail("parallel", expected, TypeError)
        for axis, size in self.parallel.items():
            if (
                axis not in ("data", "fsdp", "tensor", "context")
                or isinstance(size, bool)
                or not isinstance(size, int)
                or size < 1
            ):
                self._fail("parallel", expected + "; axes are data, fsdp, tensor and context")
