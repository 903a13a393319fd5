"""The checks of batches, caches and generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..config import BlockConfig, ModelConfig, TrainConfig
from .attention import check_key
from .common import FLOATS, Values, came, require_choice, require_int, require_integer, require_number, require_shape
from .layers import check_targets
from .model import check_model_call

# Ids that need no target: what loss_and_gradients leaves out of the mean (PyTorch's convention).
IGNORED = -100
_FIELDS = ("tokens", "targets", "lengths", "segments", "positions", "context", "context_lengths")


def check_batch(config: ModelConfig, batch: Any, *, dropout_key: Any, dtype: str, values: Values) -> None:
    """A batch of `loss_and_gradients` and `Trainer`: its fields, their shapes, and every id."""
    if not isinstance(batch, dict):
        raise TypeError(f"batch must be a dict with the fields {', '.join(_FIELDS)}; got {came(batch)}")
    unknown = sorted(str(name) for name in batch if name not in _FIELDS)
    if unknown:
        raise ValueError(f"batch must hold {', '.join(_FIELDS)} and nothing else; got {', '.join(unknown)}")
    for name in ("tokens", "targets"):
        if name not in batch:
            raise ValueError(f"batch must hold {name!r}; got {', '.join(sorted(batch)) or 'nothing'}")
    if config.head == "none":
        raise ValueError("model must have head='lm' or 'classifier' to have a loss; got head='none'")
    check_model_call(
        config,
        batch["tokens"],
        mask=None,
        kv_lengths=batch.get("lengths"),
        segments=batch.get("segments"),
        positions=batch.get("positions"),
        cache=None,
        dropout_key=dropout_key,
        context=batch.get("context"),
        context_lengths=batch.get("context_lengths"),
        dtype=dtype,
        values=values,
    )
    B, T = batch["tokens"].shape
    targets = batch["targets"]
    require_integer("targets", targets)
    if config.head == "classifier":
        require_shape("targets", targets, (B,), "(one class per row)")
    else:
        require_shape("targets", targets, (B, T), "(that of tokens)")
    check_targets(targets, (config.classes or 0) if config.head == "classifier" else config.vocab, IGNORED, values)


def check_accumulation(rows: int, accumulate: int) -> None:
    """A batch splits into micro-batches of equally many rows."""
    if rows % accumulate:
        raise ValueError(f"batch must have a multiple of accumulate ({accumulate}) rows; got {rows}")


def check_trainer(model: Any, config: Any) -> None:
    """`Trainer(model, config)`: a Transformer with a head, a TrainConfig, and parameters in the master's dtype.

    Parameters, moments and averages are kept in float32 (float64 for precision="float64"), and cast for each pass.
    """
    if not isinstance(config, TrainConfig):
        raise TypeError(f"config must be a TrainConfig; got {came(config)}")
    if not isinstance(getattr(model, "config", None), ModelConfig):
        raise TypeError(f"model must be a Transformer; got {type(model).__name__}")
    if model.config.head == "none":
        raise ValueError("model must have head='lm' or 'classifier' to have a loss; got head='none'")
    master = "float64" if config.precision == "float64" else "float32"
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype != master:
        raise TypeError(
            f"model must have dtype {master} for precision={config.precision!r}, the dtype in which parameters are "
            f"kept between steps; got {dtype}"
        )


def check_eager(config: TrainConfig) -> None:
    """What a backend without compiler and without devices refuses."""
    if config.compile is True:
        raise ValueError("config.compile must be 'auto' or False: NumPy has no compiler")
    if config.parallel is not None:
        raise ValueError(f"config.parallel must be None: NumPy has one device; got {config.parallel!r}")


def check_batches(batches: Any) -> None:
    """`fit` and `evaluate` take an iterable of batches, not one batch."""
    if isinstance(batches, dict) or not hasattr(batches, "__iter__"):
        raise TypeError(f"batches must be an iterable of batches (dicts); got {came(batches)}")


def check_finite(step: int, names: list[str], saved: Any) -> None:
    """Stop at gradients that are NaN or infinite: the sentence names update, parameters and the last checkpoint."""
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    raise FloatingPointError(
        f"gradients must be finite; got NaN or infinity at update {step} in {shown}. "
        f"{'Nothing was saved before' if saved is None else f'The last good checkpoint is {saved}'}; "
        "nonfinite='skip' leaves such steps out"
    )


def check_loss(loss: float, params: Callable[[], Mapping[str, np.ndarray]]) -> None:
    """Stop where an evaluation's loss is NaN or infinite: the sentence names the parameters that are."""
    if np.isfinite(loss):
        return
    # As float32: bfloat16 is no type of NumPy's own.
    names = [name for name, p in params().items() if not np.isfinite(p.astype(np.float64)).all()]
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    raise FloatingPointError(
        f"the loss of an evaluation must be finite; got {loss} "
        + (f"with NaN or infinity in {shown}" if names else "though every parameter is finite: it overflows on the way")
    )


def check_cache(config: Any, batch: Any, capacity: Any, dtype: Any) -> int:
    """What a KVCache is made from. Returns its capacity."""
    if not isinstance(config, BlockConfig):
        raise TypeError(f"config must be a ModelConfig or a BlockConfig; got {came(config)}")
    require_int("batch", batch, 0)
    require_choice("dtype", dtype, FLOATS)
    if capacity is None:
        if not isinstance(config, ModelConfig):
            raise ValueError("capacity must be given for a BlockConfig, which has no max_length")
        capacity = config.max_length
    size = require_int("capacity", capacity, 1)
    scaling = config.rotary_scaling if isinstance(config, ModelConfig) and config.positions == "rotary" else None
    if scaling is not None and scaling.kind in ("dynamic", "longrope") and size > (scaling.original_max_length or 0):
        raise ValueError(
            f"capacity must be at most original_max_length ({scaling.original_max_length}) with "
            f"rotary_scaling.kind={scaling.kind!r}: past it the frequencies change with the length, and cached keys "
            f"would keep the old ones; got {size}. Call the model without a cache instead"
        )
    return size


def check_generate(
    config: Any,
    tokens: Any,
    *,
    max_new: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    key: Any,
    lengths: Any,
    context: Any,
    context_lengths: Any,
    dtype: str,
    values: Values,
) -> int:
    """`generate`'s arguments. Returns max_new."""
    if not isinstance(config, ModelConfig) or config.head != "lm":
        raise ValueError("model must be a Transformer with head='lm' to generate tokens")
    if not config.is_causal:
        raise ValueError("model must be causal to generate tokens one after the other")
    check_model_call(
        config, tokens, mask=None, kv_lengths=None, segments=None, positions=None, cache=None, dropout_key=None,
        context=context, context_lengths=context_lengths, dtype=dtype, values=values,
    )  # fmt: skip
    new = require_int("max_new", max_new, 0)
    B, T = tokens.shape
    if T == 0:
        raise ValueError("tokens must hold at least one token per row to continue from; got length 0")
    if lengths is not None:
        require_integer("lengths", lengths)
        require_shape("lengths", lengths, (B,), "(one per row)")
        read = values(lengths)
        if read is not None and read.size and (read.min() < 1 or read.max() > T):
            raise ValueError(
                f"lengths must be from 1 to {T} (the prompt's length); got values from {read.min()} to {read.max()}"
            )
    # The last new token is returned and never read, so it needs no position.
    if config.positions == "learned" and T + new - 1 > config.max_length:
        raise ValueError(
            f"max_new must be at most {config.max_length - T + 1}: the learned table has max_length="
            f"{config.max_length} positions, and tokens hold {T}; got {new}"
        )
    _check_sampling(temperature, top_k, top_p, key)
    return new


def _check_sampling(temperature: Any, top_k: Any, top_p: Any, key: Any) -> None:
    heat = require_number("temperature", temperature, "a number of at least 0")
    if heat < 0:
        raise ValueError(f"temperature must be a number of at least 0; got {temperature!r}")
    if top_k is not None:
        require_int("top_k", top_k, 1)
    if top_p is not None and not 0.0 < require_number("top_p", top_p, "a number above 0 and at most 1") <= 1.0:
        raise ValueError(f"top_p must be a number above 0 and at most 1; got {top_p!r}")
    if heat == 0 and (top_k is not None or top_p is not None):
        raise ValueError("top_k and top_p must be None at temperature 0, which takes the likeliest token")
    if heat > 0 and key is None:
        raise ValueError("key must be given with temperature > 0: sampling draws from it")
    if key is not None:
        check_key("key", key)
