"""What is raced: one model, its weights, its data and its optimiser, the same for every contestant."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from core_numpy.contract.config import ModelConfig, TrainConfig
from core_numpy.contract.cost import step_cost
from core_numpy.contract.data import batches, byte_tokens, default_text
from core_numpy.contract.parallel import Layout

SEED = 0
MEASURES = ("step", "backward", "forward", "decode")
PRECISIONS = ("float32", "bfloat16")
DEVICES = ("cpu", "cuda", "tpu")
# What `decode` makes of a prompt: half of the length at most, so that prompt and answer fit in it.
MOST_DECODED = 64


@dataclass(frozen=True)
class Size:
    width: int
    heads: int
    layers: int
    length: int
    batch: int


SIZES = {
    "tiny": Size(width=64, heads=4, layers=2, length=64, batch=16),
    "small": Size(width=256, heads=8, layers=4, length=256, batch=8),
    "long": Size(width=128, heads=4, layers=1, length=2048, batch=1),
}

# Who cannot build the first races on another, and is compared on it with those who can build it too. The fields are
# what differs from "gpt": learned positions, layer norm before, exact GELU, biases everywhere but in the head.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt": {},
    # x-transformers has no biases in attention and none in its norms.
    "gpt-unbiased": {"attention_bias": False, "norm_bias": False},
    "llama": {"norm": "rms", "positions": "rotary", "activation": "swiglu", "attention_bias": False, "ffn_bias": False},
    # The gpt with each block's place taken by one recurrent layer of the same width.
    "lstm": {},
    "gru": {},
}
RECURRENT = {"lstm": 4, "gru": 3}  # gates
# Relative distance allowed to the float64 reference's losses over the first updates. float32: torch and JAX measured
# 5e-8 to 8e-7 at tiny and small; an optimiser without decay is 5e-5 off at tiny, another beta or rate, a biased
# variance or the other GELU 1e-4 and more. bfloat16 keeps 8 bits, of which a mean over a batch regains some: 4e-5 to
# 2e-4 measured there.
LOSS_TOLERANCES = {"float32": 4e-6, "bfloat16": 2e-3}


class Task:
    """A decoder that every library can build, trained with AdamW at a constant rate."""

    def __init__(
        self,
        size: str | Size | Mapping[str, int] = "tiny",
        architecture: str = "gpt",
        *,
        precision: str = "float32",
        remat: bool = False,
        measure: str = "step",
        device: str = "cpu",
        parallel: Mapping[str, int] | None = None,
    ) -> None:
        """parallel: how an update is laid out over devices; None is one of them."""
        if isinstance(size, str) and size not in SIZES:
            raise ValueError(f"size must be one of {', '.join(SIZES)}; got {size!r}")
        for name, value, known in (
            ("architecture", architecture, ARCHITECTURES), ("precision", precision, PRECISIONS),
            ("measure", measure, MEASURES), ("device", device, DEVICES),
        ):  # fmt: skip
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}")
        self.shape = SIZES[size] if isinstance(size, str) else size if isinstance(size, Size) else Size(**size)
        known_sizes = {shape: name for name, shape in SIZES.items()}
        self.size = known_sizes.get(self.shape) or "C{width} H{heads} L{layers} T{length} B{batch}".format(
            **dataclasses.asdict(self.shape)
        )
        self.architecture, self.precision, self.remat = architecture, precision, remat
        self.measure, self.device = measure, device
        self.parallel = None if parallel is None else dict(parallel)
        shape, changes = self.shape, dict(ARCHITECTURES[architecture])
        if changes.get("activation") == "swiglu":
            # Llama's: three matrices of 8/3 the width cost as much as two of four times.
            changes["hidden"] = max(round(8 * shape.width / 3 / 16), 1) * 16
        self.batch, self.length = shape.batch, shape.length
        self.model = ModelConfig(
            vocab=256, width=shape.width, heads=shape.heads, layers=shape.layers, max_length=shape.length, **changes
        )
        # A constant rate without warm-up, so that every update counts from the first.
        self.train = TrainConfig(
            batch=shape.batch, lr=1e-3, seed=SEED, precision=precision, remat=remat, parallel=self.parallel
        )

    def spec(self) -> dict[str, Any]:
        """What `from_spec` makes it of, in another process."""
        names = ("architecture", "precision", "remat", "measure", "device", "parallel")
        return {"size": dataclasses.asdict(self.shape), **{name: getattr(self, name) for name in names}}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Self:
        return cls(spec["size"], **{name: value for name, value in spec.items() if name != "size"})

    def replace(self, **changes: Any) -> Task:
        """The same with other fields: `size` fields or those of `spec`."""
        spec = self.spec()
        sizes = {name: changes.pop(name) for name in spec["size"] if name in changes}
        return Task.from_spec({**spec, **changes, "size": {**spec["size"], **sizes}})

    @property
    def title(self) -> str:
        """How a table names it: the size, and what is not the default."""
        plain = {"gpt", "float32", "step", "cpu", ""}
        parts = (self.architecture, self.precision, "remat" if self.remat else "", self.measure, self.device)
        layout = "" if self.parallel is None else ", ".join(f"{axis} {size}" for axis, size in self.parallel.items())
        return ", ".join([self.size, *(part for part in (*parts, layout) if part not in plain)])

    @property
    def devices(self) -> int:
        return Layout.of(self.parallel).devices

    @property
    def loss_tolerance(self) -> float:
        return LOSS_TOLERANCES[self.precision]

    def params(self) -> dict[str, np.ndarray]:
        """The reference's initial weights; of a recurrent architecture, those outside of its layers."""
        import core_numpy

        return core_numpy.get_params(core_numpy.Transformer(self.model, seed=SEED))

    def batches(self) -> Iterator[dict[str, np.ndarray]]:
        """Endless, the same for everybody."""
        return batches(byte_tokens(default_text()), batch=self.batch, length=self.length, seed=SEED)

    @property
    def decoded(self) -> int:
        """Tokens that `decode` adds to each prompt."""
        return max(min(MOST_DECODED, self.length // 2), 1)

    def prompts(self) -> np.ndarray:
        """(batch, length - decoded) tokens of text, for `decode`."""
        return next(iter(self.batches()))["tokens"][:, : max(self.length - self.decoded, 1)]

    @property
    def tokens(self) -> int:
        """Tokens that one turn's unit of work makes: an update's, or those decoded."""
        return self.batch * (self.decoded if self.measure == "decode" else self.length)

    @property
    def flops(self) -> int:
        """Model FLOPs of one unit of work, from `cost`; decoding counts prompt and new tokens once each."""
        if self.architecture in RECURRENT:
            # Each layer multiplies input and state (width each) with the gates' matrices; the head as ever.
            per_token = 4 * RECURRENT[self.architecture] * self.model.width**2 * self.model.layers
            forward = self.batch * self.length * (per_token + 2 * self.model.width * self.model.vocab)
        else:
            forward = step_cost(self.model, self.batch, self.length).total.forward
        return forward if self.measure in ("forward", "decode") else 3 * forward

    @property
    def bytes_moved(self) -> int | None:
        """What `cost` says that a training step must move at least; None where it does not know the architecture."""
        if self.architecture in RECURRENT or self.measure != "step":
            return None
        return step_cost(self.model, self.batch, self.length).total.bytes_moved

    def to_dict(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "title": self.title,
            "batch": self.batch,
            "length": self.length,
            "tokens": self.tokens,
            "flops": self.flops,
            "bytes_moved": self.bytes_moved,
            "spec": self.spec(),
            "model": self.model.to_dict(),
            "train": self.train.to_dict(),
        }
