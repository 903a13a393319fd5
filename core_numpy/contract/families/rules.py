"""Rules that several families share: rotary frequencies, windows, dropout rates, names of activations."""

from __future__ import annotations

import math
import warnings
from typing import Any

from ..config import ModelConfig, RotaryScaling
from .family import Given, Rule

# "gelu" is the exact one with the error function; the others are names of its tanh form.
PLAIN = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
         "relu": "relu", "silu": "silu", "swish": "silu"}  # fmt: skip
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh",
         "gelu_new": "geglu_tanh", "gelu_fast": "geglu_tanh"}  # fmt: skip


def dropout(*names: str, default: float = 0.0, others: tuple[float, ...] = ()) -> Rule:
    """Their rates for attention, residual and embeddings, where ours is one for all of them.

    Rates that differ (`others` are those a family has fixed) leave 0 and a warning: no inference depends on them.
    """

    def read(given: Given) -> dict[str, Any]:
        rates = [given.fields.get(name, default) or 0.0 for name in names]
        if len({*rates, *others}) == 1:
            return {"dropout": rates[0]}
        said = ", ".join(f"{name} = {rate:g}" for name, rate in zip(names, rates, strict=True))
        warnings.warn(f"dropout is set to 0: one rate serves the whole model here, and the folder has {said}"
                      + (" alone" if others else ""), UserWarning, stacklevel=2)  # fmt: skip
        return {"dropout": 0.0}

    return Rule(names, read, lambda config: dict.fromkeys(names, config.dropout))


def rotary(
    *, base: str = "rope_theta", part: str = "partial_rotary_factor", default_part: float = 1.0, sized: bool = True
) -> Rule:
    """Base, rotated part and scaling: fields of their own and `rope_scaling` in old files, `rope_parameters` in new.

    `sized` says that the family has a `head_dim` field.
    """
    names = {"rope_theta", "partial_rotary_factor", "rope_scaling", "rope_parameters", base, part,
             "original_max_position_embeddings"}  # fmt: skip

    def read(given: Given) -> dict[str, Any]:
        stored = given.fields
        said = _said(stored)
        theta = _one(said.pop("rope_theta", None), stored.get(base), base, 10000.0)
        factor = _one(said.pop("partial_rotary_factor", None), stored.get(part), part, default_part)
        size = (stored.get("head_dim") if sized else None) or stored["hidden_size"] // stored["num_attention_heads"]
        rotated = int(size * factor)
        return {
            "positions": "rotary",
            "rotary_base": theta,
            "rotary_dim": None if rotated == size else rotated,
            "rotary_scaling": _scaling(said, stored),
        }

    def write(config: ModelConfig) -> dict[str, Any]:
        parameters: dict[str, Any] = {"rope_theta": float(config.rotary_base), "rope_type": "default"}
        stored: dict[str, Any] = {base: float(config.rotary_base)}
        if config.positions == "rotary" and (config.rotary_size != config.key_size or default_part != 1.0):
            parameters["partial_rotary_factor"] = stored[part] = _part(config.rotary_size, config.key_size)
        if config.rotary_scaling is not None:
            scaling = _written(config.rotary_scaling)
            parameters |= scaling
            # The older place too, so that programs which only know that one do not drop the scaling.
            stored["rope_scaling"] = scaling | {"type": scaling["rope_type"]}
        return stored | {"rope_parameters": parameters}

    return Rule(tuple(sorted(names)), read, write)


def _part(rotated: int, size: int) -> float:
    """The fraction that the reader's int(size * fraction) turns into `rotated` again."""
    fraction = rotated / size
    return fraction if int(size * fraction) == rotated else math.nextafter(fraction, 1.0)


def _said(stored: Any) -> dict[str, Any]:
    """What `rope_parameters` and `rope_scaling` say together; where both say something it must be the same."""
    said: dict[str, Any] = {}
    for place in ("rope_parameters", "rope_scaling"):
        values = stored.get(place) or {}
        if not isinstance(values, dict):
            raise ValueError(f"{place} must be an object or null; got {values!r}")
        values = dict(values)
        kind = values.pop("type", None)
        if kind is not None:
            values["rope_type"] = _one(values.get("rope_type"), kind, "rope_type", None)
        for name, value in values.items():
            if name in said and said[name] != value:
                raise ValueError(f"{name} must be the same in rope_parameters and rope_scaling; got {said[name]!r} "
                                 f"and {value!r}")  # fmt: skip
            said[name] = value
    return said


def _one(first: Any, second: Any, name: str, default: Any) -> Any:
    if first is not None and second is not None and first != second:
        raise ValueError(f"{name} must be the same in all places; got {first!r} and {second!r}")
    return default if first is None and second is None else second if first is None else first


def _scaling(said: dict[str, Any], stored: Any) -> RotaryScaling | None:
    """`said` is emptied: what is left in it nobody has read."""
    kind = said.pop("rope_type", "default")
    longest = stored.get("max_position_embeddings")
    own = stored.get("original_max_position_embeddings")
    if kind == "default":
        scaling = None
    elif kind == "linear":
        scaling = RotaryScaling(kind=kind, factor=said.pop("factor", 1.0))
    elif kind == "dynamic":
        original = _one(said.pop("original_max_position_embeddings", None), own, "original_max_position_embeddings",
                        longest)  # fmt: skip
        if original != longest:
            raise ValueError(
                "original_max_position_embeddings must be max_position_embeddings for dynamic scaling, whose formula "
                f"has that length; got {original!r} and {longest!r}"
            )
        scaling = RotaryScaling(kind=kind, factor=said.pop("factor", 1.0), original_max_length=longest)
    elif kind in ("yarn", "llama3", "longrope"):
        inner = said.pop("original_max_position_embeddings", None)
        original = own or inner or longest
        factor = said.pop("factor", None)
        factor = longest / original if factor is None else factor
        fields: dict[str, Any] = {"kind": kind, "factor": factor, "original_max_length": original}
        scaling = RotaryScaling(**fields, **_details(kind, factor, said))
    else:
        raise ValueError(f"rope_type must be default, linear, dynamic, yarn, llama3 or longrope; got {kind!r}")
    if said:
        raise ValueError(f"{kind} rotary scaling has no use for {', '.join(f'{k} = {v!r}' for k, v in said.items())}")
    return scaling


def _details(kind: str, factor: float, said: dict[str, Any]) -> dict[str, Any]:
    if kind == "llama3":
        return {name: said.pop(name) for name in ("low_freq_factor", "high_freq_factor") if name in said}
    found: dict[str, Any] = {"attention_factor": said.pop("attention_factor", None)}
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            factors = said.pop(name, None)
            found[f"{name}s"] = tuple(factors) if isinstance(factors, list) else factors
        return found
    over, under = said.pop("mscale", None), said.pop("mscale_all_dim", None)
    if found["attention_factor"] is None and over and under and factor > 1.0:
        found["attention_factor"] = (0.1 * over * math.log(factor) + 1.0) / (0.1 * under * math.log(factor) + 1.0)
    for name in ("beta_fast", "beta_slow"):
        value = said.pop(name, None)
        if value:
            found[name] = value
    if said.get("truncate") is True:
        said.pop("truncate")
    return found


def _written(scaling: RotaryScaling) -> dict[str, Any]:
    if scaling.kind == "ntk":
        raise ValueError("the files have no word for rotary_scaling of kind 'ntk'")
    found: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("yarn", "llama3", "longrope"):
        found["original_max_position_embeddings"] = scaling.original_max_length
    if scaling.kind == "llama3":
        found |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        found |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    if scaling.kind == "longrope":
        found |= {"short_factor": list(scaling.short_factors or ()), "long_factor": list(scaling.long_factors or ())}
    if scaling.attention_factor is not None:
        found["attention_factor"] = scaling.attention_factor
    return found


# A window of W keys counts the query's own: W - 1 to its left.
def _pair(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"sliding_window must be a positive integer or null; got {size!r}")
    return size - 1, 0


def _sizes(config: ModelConfig) -> list[int | None]:
    """Keys each layer's window holds, None for all."""
    windows = [config.block(i).window for i in range(config.layers)]
    return [None if window is None or window[0] is None else window[0] + 1 for window in windows]


def _one_size(config: ModelConfig) -> int | None:
    sizes = {size for size in _sizes(config) if size is not None}
    if len(sizes) > 1:
        raise ValueError(f"the files have one window size for all layers; got {sorted(sizes)}")
    return sizes.pop() if sizes else None


def window_everywhere(default: int | None) -> Rule:
    """`sliding_window` for every layer, or null."""

    def write(config: ModelConfig) -> dict[str, Any]:
        size = _one_size(config)
        if size is not None and None in _sizes(config):
            raise ValueError("sliding_window serves all layers or none")
        return {"sliding_window": size}

    return Rule(
        ("sliding_window",), lambda given: {"window": _pair(given.fields.get("sliding_window", default))}, write
    )


def window_by_layer(*, default: int, switch: bool, alternating: bool) -> Rule:
    """`layer_types` says which layers have the window; without it the first ones have none, or every second one.

    `switch`: only where `use_sliding_window` is true, from layer `max_window_layers` on.
    """
    names = ("sliding_window", "layer_types", *(("use_sliding_window", "max_window_layers") if switch else ()))

    def read(given: Given) -> dict[str, Any]:
        stored, layers = given.fields, given.fields["num_hidden_layers"]
        window = _pair(stored.get("sliding_window", default))
        if switch and not stored.get("use_sliding_window", False):
            window = None
        types = stored.get("layer_types")
        if types is None:
            first = stored.get("max_window_layers", 28)
            slides = [i % 2 == 0 if alternating else window is not None and i >= first for i in range(layers)]
        else:
            if len(types) != layers or not set(types) <= {"sliding_attention", "full_attention"}:
                raise ValueError(
                    f"layer_types must have {layers} of 'sliding_attention' and 'full_attention'; got {types!r}"
                )
            slides = [kind == "sliding_attention" for kind in types]
        if window is None and any(slides):
            raise ValueError("sliding_window must be given where layers have sliding attention")
        if window is None or not any(slides):
            return {"window": None, "layer_windows": None}
        return {"layer_windows": tuple(window if slide else None for slide in slides)}

    def write(config: ModelConfig) -> dict[str, Any]:
        sizes, size = _sizes(config), _one_size(config)
        types = ["full_attention" if each is None else "sliding_attention" for each in sizes]
        stored: dict[str, Any] = {"sliding_window": size, "layer_types": types}
        if switch:
            first = next((i for i, each in enumerate(sizes) if each is not None), config.layers)
            stored |= {"use_sliding_window": size is not None, "max_window_layers": first}
        return stored

    return Rule(names, read, write)
