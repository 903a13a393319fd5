"""The checks of modules: what they are made from, what they are called with, and the parameters put into them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..config import BlockConfig, ModelConfig
from ..ring import cache_slots
from .attention import check_bias, check_key, check_mask
from .common import (
    FLOATS,
    Values,
    came,
    dtype_name,
    require_array,
    require_choice,
    require_float,
    require_int,
    require_integer,
    require_shape,
)


@dataclass(frozen=True)
class CallPlan:
    """What one call of a module means, as plain numbers: B, T, past (positions in the cache), S = past + T."""

    B: int
    T: int
    past: int

    @property
    def S(self) -> int:
        return self.past + self.T


def check_module(config: Any, seed: Any, dtype: Any, *, model: bool) -> None:
    """What a module is made from: a ModelConfig (or, for the parts, a BlockConfig), a seed, the name of a dtype.

    The device is the backend's own to check; `check_no_device` is for the one that has none.
    """
    kind = ModelConfig if model else BlockConfig
    if not isinstance(config, kind):
        raise TypeError(f"config must be a {kind.__name__}; got {came(config)}")
    if not model and isinstance(config, ModelConfig) and config.kind == "encoder_decoder":
        raise ValueError("config must have one stack; got kind='encoder_decoder': pass config.stack('decoder')")
    require_int("seed", seed, 0)
    require_choice("dtype", dtype, FLOATS)


def check_no_device(device: Any) -> None:
    """NumPy computes on the CPU."""
    if device is not None and not isinstance(device, str):
        raise TypeError(f"device must be None or 'cpu'; got {device!r}")
    if device not in (None, "cpu"):
        raise ValueError(f"device must be None or 'cpu': NumPy has no other; got {device!r}")


def no_device(framework: str, device: Any, error: Exception) -> ValueError:
    """What a framework says of a device that it does not have here, as one sentence about the argument."""
    why = str(error).strip().split("\n")[0]
    return ValueError(f"device must be one that {framework} has here, 'cpu' for one; got {str(device)!r} ({why})")


def check_hidden(name: str, x: Any, width: int, dtype: str) -> None:
    """(B, T, W) in the module's dtype: nothing is promoted."""
    require_float(name, x)
    if len(x.shape) != 3 or x.shape[-1] != width:
        raise ValueError(f"{name} must have shape (batch, length, {width}); got {tuple(x.shape)}")
    if dtype_name(x) != dtype:
        raise TypeError(f"{name} must have the module's dtype ({dtype}); got {dtype_name(x)}: convert one of them")


def check_feed_forward_call(config: BlockConfig, x: Any, *, dropout_key: Any, dtype: str) -> None:
    """`feed_forward(x)`."""
    check_hidden("x", x, config.width, dtype)
    check_optional_key(dropout_key)


def check_optional_key(dropout_key: Any) -> None:
    if dropout_key is not None:
        check_key("dropout_key", dropout_key)


def check_block_call(
    config: BlockConfig,
    x: Any,
    *,
    mask: Any,
    bias: Any,
    kv_lengths: Any,
    segments: Any,
    positions: Any,
    rotary: Any,
    cache: Any,
    dropout_key: Any,
    context: Any,
    context_lengths: Any,
    dtype: str,
    cross: bool,
    values: Values,
) -> CallPlan:
    """The call of a block or of an attention module; `cross` says that it reads a context."""
    check_hidden("x", x, config.width, dtype)
    plan = _sequence(config, x, cache, dtype)
    if cache is not None and isinstance(config, ModelConfig) and config.layer_windows is not None:
        raise ValueError(
            "cache must be None for a part made from a ModelConfig with layer_windows, whose layers keep unlike many "
            "positions: make the part and its cache from config.block(layer)"
        )
    if bias is not None:
        check_bias(bias, (plan.B, config.heads, plan.T, plan.S), values)
    _check_restrictions(config, plan, mask, kv_lengths, segments, cache, values)
    makes_rotary = isinstance(config, ModelConfig) and config.positions == "rotary"
    if positions is not None and (rotary is not None or not makes_rotary):
        raise ValueError(
            "positions must be None where nothing reads them: only a block made from a ModelConfig with "
            "positions='rotary' and called without rotary= makes its own rotary tables"
        )
    check_positions(positions, plan, None, values)
    if rotary is not None:
        _check_rotary(rotary, config, plan)
    check_optional_key(dropout_key)
    if (context is not None) != cross:
        raise ValueError(
            "context must be given to a module that attends to one"
            if cross
            else "context must be None: this module has no cross-attention (BlockConfig.cross_attention)"
        )
    if context is not None:
        check_hidden("context", context, config.width, dtype)
        if context.shape[0] != plan.B:
            raise ValueError(f"context must have the batch of x, {plan.B}; got {tuple(context.shape)}")
    _check_context_lengths(context, context_lengths, plan.B, values)
    return plan


def check_attention_call(config: BlockConfig, x: Any, *, context: Any, **arguments: Any) -> CallPlan:
    """The call of an attention module: with a context it is cross-attention, restricted by context_lengths alone."""
    if context is not None:
        for name in ("mask", "bias", "kv_lengths", "segments", "positions", "rotary", "cache"):
            if arguments[name] is not None:
                raise ValueError(f"{name} must be None with a context: it concerns self-attention; use context_lengths")
    return check_block_call(config, x, context=context, cross=context is not None, **arguments)


def check_model_call(
    config: ModelConfig,
    tokens: Any,
    *,
    mask: Any,
    kv_lengths: Any,
    segments: Any,
    positions: Any,
    cache: Any,
    dropout_key: Any,
    context: Any,
    context_lengths: Any,
    dtype: str,
    values: Values,
) -> CallPlan:
    """`model(tokens)`; in an encoder-decoder the tokens are the decoder's and `context` the encoder's."""
    check_tokens("tokens", tokens, config.vocab, values)
    plan = _sequence(config, tokens, cache, dtype)
    _check_restrictions(config, plan, mask, kv_lengths, segments, cache, values)
    check_model_positions(config, positions, plan, values)
    check_optional_key(dropout_key)
    if (context is not None) != (config.kind == "encoder_decoder"):
        raise ValueError(
            "context must be given to an encoder-decoder: the source's token ids"
            if context is None
            else f"context must be None for kind={config.kind!r}: only an encoder-decoder has a source"
        )
    if context is not None:
        check_tokens("context", context, config.vocab, values)
        if context.shape[0] != plan.B:
            raise ValueError(f"context must have the batch of tokens, {plan.B}; got {tuple(context.shape)}")
        if config.positions == "learned" and context.shape[1] > config.max_length:
            raise ValueError(
                f"context must have at most max_length ({config.max_length}) positions, the learned table's length; "
                f"got {context.shape[1]}"
            )
    _check_context_lengths(context, context_lengths, plan.B, values)
    return plan


def check_tokens(name: str, tokens: Any, vocab: int, values: Values) -> None:
    """(B, T) integers from 0 to vocab - 1."""
    require_integer(name, tokens)
    if len(tokens.shape) != 2:
        raise ValueError(f"{name} must have shape (batch, length); got {tuple(tokens.shape)}")
    _check_range(name, tokens, 0, vocab - 1, "the vocabulary", values)


def check_model_positions(config: ModelConfig, positions: Any, plan: CallPlan, values: Values) -> None:
    """Positions have a reader, and a learned table has a row for each."""
    if positions is not None and config.positions in ("alibi", "relative", "none"):
        raise ValueError(
            f"positions must be None for a model with positions={config.positions!r}: nothing reads them "
            "(distances are counted in columns)"
        )
    rows = config.max_length if config.positions == "learned" else None
    check_positions(positions, plan, rows, values)
    if rows is not None and positions is None and rows < plan.S:
        raise ValueError(
            f"tokens must end at or before max_length ({rows}), the learned table's length; got {plan.S} positions"
            + (f", {plan.past} of them in the cache" if plan.past else "")
        )


def check_positions(positions: Any, plan: CallPlan, rows: int | None, values: Values) -> None:
    """(T,) or (B, T) integers; from 0 to rows - 1 where they index a table."""
    if positions is None:
        return
    require_integer("positions", positions)
    if tuple(positions.shape) not in ((plan.T,), (plan.B, plan.T)):
        raise ValueError(
            f"positions must have shape ({plan.T},) or ({plan.B}, {plan.T}), one per token; "
            f"got {tuple(positions.shape)}"
        )
    if rows is not None:
        _check_range("positions", positions, 0, rows - 1, "the learned table", values)


def check_owner(module: Any, owned: bool, package: str) -> None:
    """A module whose parameters are asked for belongs to the package that is asked."""
    if not owned:
        cls = type(module)
        raise TypeError(
            f"module must be one of {package}'s, such as its Transformer; got {cls.__name__} of "
            f"{cls.__module__.split('.')[0]}: between packages parameters move as get_params() of the one and "
            "set_params() of the other; modules of other libraries are read by import_params()"
        )


def check_params(expected: dict[str, tuple[tuple[int, ...], str]], params: Any) -> None:
    """`set_params`: exactly the expected names, each with its shape and dtype; every problem is listed."""
    if not isinstance(params, dict):
        raise TypeError(f"params must be a dict of canonical names to NumPy arrays; got {came(params)}")
    problems = _names([name for name in expected if name not in params], "is missing", "are missing")
    unknown = [str(name) for name in params if name not in expected]
    problems += _names(unknown, "is not a parameter of this module", "are not parameters of this module")
    foreign = set()
    for name, (shape, dtype) in expected.items():
        if name not in params:
            continue
        require_array(name, params[name])
        came_as = tuple(params[name].shape)
        if came_as != shape:
            turned = ": transposed it would fit, linear weights are (in, out) here" if came_as == shape[::-1] else ""
            problems.append(f"{name} must have shape {shape}; got {came_as}{turned}")
        if dtype_name(params[name]) != dtype:
            problems.append(f"{name} must have dtype {dtype}; got {dtype_name(params[name])}")
            foreign.add(dtype_name(params[name]))
    if problems:
        if len(foreign) == 1 and foreign < set(FLOATS):
            problems.append(f"make the module with dtype={foreign.pop()!r}, or convert the arrays")
        raise ValueError("params must match the module's parameters: " + "; ".join(problems))


def _names(names: list[str], one: str, many: str) -> list[str]:
    """Up to three names have a sentence each; more share one, in which as many are written out as a reader looks at."""
    if len(names) <= 3:
        return [f"{name} {one}" for name in names]
    shown = names if len(names) <= 8 else [*names[:6], f"{len(names) - 6} more"]
    return [f"{', '.join(shown[:-1])} and {shown[-1]} {many}"]


def _sequence(config: BlockConfig, x: Any, cache: Any, dtype: str) -> CallPlan:
    B, T = int(x.shape[0]), int(x.shape[1])
    if cache is None:
        return CallPlan(B, T, 0)
    for field in ("config", "batch", "capacity", "length", "written", "dtype"):
        if not hasattr(cache, field):
            raise TypeError(f"cache must be a KVCache; got {came(cache)}")
    # What decides the stored arrays; a ModelConfig's cache serves no single block and the reverse.
    if cache.config != config:
        raise ValueError("cache must be made from the configuration of the module that it is given to")
    if not (config.is_causal if isinstance(config, ModelConfig) else config.causal):
        raise ValueError("cache must be None where attention is not causal: later tokens would change earlier outputs")
    if cache.batch != B:
        raise ValueError(f"cache must have the batch of the input, {B}; got a cache for {cache.batch}")
    if str(cache.dtype) != dtype:
        raise TypeError(f"cache must have the module's dtype ({dtype}); got {cache.dtype}")
    if not isinstance(cache.length, int):
        # Counted by a traced program: shapes are then those of a full cache, and values are not checked.
        return CallPlan(B, T, cache.capacity - T)
    check_room(cache, T)
    return CallPlan(B, T, cache.length)


def check_room(cache: Any, T: int) -> None:
    """A cache is never written past its end, and not taken back behind what a window's ring has let go."""
    if cache.length + T > cache.capacity:
        raise ValueError(
            f"cache must have room for {T} more positions; got {cache.length} of {cache.capacity} filled: make it with "
            "a larger capacity"
        )
    least = min(cache_slots(cache.config, cache.capacity), default=cache.capacity)
    if cache.length < cache.written and cache.written > least:
        raise ValueError(
            f"cache must not be taken back from {cache.written} positions to {cache.length}: a layer with a window "
            f"keeps the last {least} alone; make a new one"
        )


def check_source(kept: Any, given: Any, values: Values) -> None:
    """The source (context, context_lengths) of a call with a cache is the one that the cache was begun with."""
    for name, old, new in zip(("context", "context_lengths"), kept, given, strict=True):
        if old is new:
            continue
        same = old is not None and new is not None and tuple(old.shape) == tuple(new.shape)
        if same:
            mine, theirs = values(old), values(new)
            # What cannot be read without waiting for a device is taken at its word.
            same = mine is None or theirs is None or bool((mine == theirs).all())
        if not same:
            raise ValueError(
                f"{name} must be what the cache was begun with, whose keys and values it keeps: make a new cache for "
                "another source"
            )


def _check_restrictions(
    config: BlockConfig, plan: CallPlan, mask: Any, kv_lengths: Any, segments: Any, cache: Any, values: Values
) -> None:
    if mask is not None:
        check_mask(mask, (plan.B, config.heads, plan.T, plan.S))
    if kv_lengths is not None:
        _check_lengths("kv_lengths", kv_lengths, plan.B, plan.S, values)
    if segments is None:
        return
    if cache is not None:
        raise ValueError("segments must be None with a cache: it does not keep the ids of its keys; pass mask=")
    require_integer("segments", segments)
    if dtype_name(segments).startswith("uint"):
        raise TypeError(f"segments must hold signed integers, a negative id is padding; got {came(segments)}")
    require_shape("segments", segments, (plan.B, plan.T), "(batch, length)")


def _check_context_lengths(context: Any, context_lengths: Any, B: int, values: Values) -> None:
    if context_lengths is None:
        return
    if context is None:
        raise ValueError("context_lengths must be None without a context")
    _check_lengths("context_lengths", context_lengths, B, int(context.shape[1]), values)


def _check_lengths(name: str, lengths: Any, B: int, most: int, values: Values) -> None:
    require_integer(name, lengths)
    require_shape(name, lengths, (B,), "(one per row)")
    _check_range(name, lengths, 0, most, "the length", values)


def _check_range(name: str, x: Any, least: int, most: int, meaning: str, values: Values) -> None:
    read = values(x)
    if read is not None and read.size and (read.min() < least or read.max() > most):
        wrong = int(read.min()) if read.min() < least else int(read.max())
        raise ValueError(f"{name} must be from {least} to {most} ({meaning}); got {wrong}")


def _check_rotary(rotary: Any, config: BlockConfig, plan: CallPlan) -> None:
    if not isinstance(rotary, tuple | list) or len(rotary) != 2:
        raise TypeError(f"rotary must be the pair (cos, sin) of rotary_tables; got {came(rotary)}")
    for name, table in zip(("rotary cos", "rotary sin"), rotary, strict=True):
        require_float(name, table)
        if tuple(table.shape[:-1]) not in ((plan.T,), (plan.B, plan.T)) or 2 * table.shape[-1] > config.key_size:
            raise ValueError(
                f"{name} must have shape ({plan.T}, pairs) or ({plan.B}, {plan.T}, pairs) with at most "
                f"{config.key_size // 2} pairs; got {tuple(table.shape)}"
            )
