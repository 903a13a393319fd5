"""What a step sends between devices: bytes for each axis of a layout, and how long links of given speeds take.

    all-reduce of n bytes over p devices         2 n (p - 1) / p  leave each device
    all-gather, reduce-scatter to or of n bytes    n (p - 1) / p
    a ring's step of n bytes                       n

These are the volumes of ring algorithms, which are the least possible (Patarasuk and Yuan 2009). Counted is what the
trainers do: gradients over data and context in one buffer, parameters gathered for the forward and again for the
backward pass, sums of activations in each block over tensor, keys and values round the context axis.
"""

from __future__ import annotations

from dataclasses import dataclass

from .checks.common import require_int
from .config import BlockConfig, ModelConfig
from .parallel import AXES, Layout, context_pieces, pieces_of
from .parameters import model_parameters

# What is cut over the tensor axis: everything with heads or hidden features.
_CUT = (".query.", ".key.", ".value.", ".up.", ".gate.")
_CUT_WEIGHTS = (".output.weight", ".down.weight")


@dataclass(frozen=True)
class Message:
    """One kind of communication of a step. bytes: of the result (of the sum, of the gathered whole); times: how often.

    wire: bytes that leave each device in a step, all times together.
    """

    axis: str
    kind: str
    what: str
    times: int
    bytes: int
    devices: int

    @property
    def wire(self) -> int:
        p = self.devices
        share = {"all-reduce": 2 * (p - 1) / p, "all-gather": (p - 1) / p, "reduce-scatter": (p - 1) / p}
        return round(self.times * self.bytes * share.get(self.kind, 1.0))


def local_parameters(config: ModelConfig, layout: Layout) -> tuple[int, int]:
    """How many numbers of the parameters one place of the tensor axis has: (cut over tensor, whole everywhere)."""
    cut = whole = 0
    for name, parameter in model_parameters(config).items():
        size = 1
        for axis in parameter.shape:
            size *= axis
        if any(part in name for part in _CUT) or name.endswith(_CUT_WEIGHTS):
            cut += size
        else:
            whole += size
    return cut // layout.tensor, whole


def step_communication(
    config: ModelConfig, layout: Layout, batch: int, length: int, *, itemsize: int = 4, master: int = 4,
    accumulate: int = 1, gathers: int = 2,
) -> list[Message]:  # fmt: skip
    """The messages of one update on (batch, length); activations have `itemsize` bytes, parameters `master`.

    Parameters are gathered in the type that the products take, `itemsize`; gradients are summed in `master`. gathers:
    how often a block's parameters are brought in a micro-batch, 2 where they are given back after the forward pass, as
    torch's `fully_shard` does, or 1 where a compiler keeps them, as XLA does on a CPU. Refused: encoder-decoders, which
    train in layouts without a context axis and are not counted here.
    """
    if config.kind == "encoder_decoder":
        raise ValueError("config.kind must be 'decoder' or 'encoder' to count communication; got 'encoder_decoder'")
    B, T = require_int("batch", batch, 1), require_int("length", length, 1)
    rows, columns = B // layout.parts // accumulate, T // layout.context
    parameters = sum(local_parameters(config, layout))
    found: list[Message] = []
    if layout.fsdp > 1:
        # A block's parameters are given back after its forward pass; the root's stay.
        blocks = _block_parameters(config, layout)
        gathered = itemsize * (parameters + (require_int("gathers", gathers, 1) - 1) * blocks)
        found.append(Message("fsdp", "all-gather", "parameters", accumulate, gathered, layout.fsdp))
        found.append(Message("fsdp", "reduce-scatter", "gradients", accumulate, master * parameters, layout.fsdp))
    shard = master * parameters // layout.fsdp
    for axis in ("data", "context"):
        size = getattr(layout, axis)
        if size > 1:
            found.append(Message(axis, "all-reduce", "gradients", 1, shard, size))
    if layout.tensor > 1:
        activations = rows * columns * config.width * itemsize
        # Forward: what attention and feed-forward give. Backward: the gradients of the inputs of query, key, value,
        # up and gate, each by itself; a compiler may add them first.
        times = (2 + 3 + (2 if config.gated else 1)) * config.layers * accumulate
        found.append(Message("tensor", "all-reduce", "activations", times, activations, layout.tensor))
    if layout.context > 1:
        found += _ring(config, layout, rows, columns, itemsize, accumulate)
    return found


def _block_parameters(config: ModelConfig, layout: Layout) -> int:
    cut = whole = 0
    for name, parameter in model_parameters(config).items():
        if name.startswith("blocks."):
            size = 1
            for axis in parameter.shape:
                size *= axis
            is_cut = any(part in name for part in _CUT) or name.endswith(_CUT_WEIGHTS)
            cut, whole = (cut + size, whole) if is_cut else (cut, whole + size)
    return cut // layout.tensor + whole


def ring_steps(config: BlockConfig, context: int, length: int, *, causal: bool) -> int:
    """How many of the C - 1 steps round the context axis send anything: few where a window hides keys, else all."""
    size = length // context_pieces(context, causal)
    left, right = config.window or (None, None)
    if causal:
        right = 0 if right is None else min(right, 0)

    def sees(query: int, key: int) -> bool:
        last = size - 1
        return (right is None or key <= query + last + right) and (left is None or key + last >= query - left)

    def needs(place: int, other: int) -> bool:
        mine, theirs = (pieces_of(c, context, causal) for c in (place, other))
        return any(sees(q * size, k * size) for q in mine for k in theirs)

    return sum(any(needs(c, (c - step) % context) for c in range(context)) for step in range(1, context))


def _ring(
    config: ModelConfig, layout: Layout, rows: int, columns: int, itemsize: int, accumulate: int
) -> list[Message]:
    heads = config.groups // layout.tensor
    keys = rows * columns * heads * (config.key_size + config.value_size) * itemsize
    steps = sum(
        ring_steps(config.block(i), layout.context, columns * layout.context, causal=config.is_causal)
        for i in range(config.layers)
    )
    gradients = keys // itemsize * (8 if itemsize == 8 else 4)
    return [
        Message(
            "context", "send", "keys and values, forward and backward", 2 * steps * accumulate, keys, layout.context
        ),
        Message("context", "send", "their gradients", steps * accumulate, gradients, layout.context),
    ]


def wire_bytes(messages: list[Message]) -> dict[str, int]:
    """Axis -> bytes that leave each device in a step."""
    return {axis: sum(m.wire for m in messages if m.axis == axis) for axis in AXES}
