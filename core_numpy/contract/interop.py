"""Modules of other libraries, as a configuration of ours and parameters under canonical names.

Nothing is imported here: a source is known by the names of its classes, and its arrays come out as NumPy's, so each of
the three packages can take the modules of every framework. `docs/porting.md` has the conversions side by side.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from .config import BlockConfig, ModelConfig
from .tensor_file import require_package


class Imported(NamedTuple):
    """What `import_params` gives: `Module(config)` takes `params` by `set_params`."""

    config: BlockConfig
    params: dict[str, np.ndarray]


def import_params(source: Any) -> Imported:
    """The configuration and the parameters of another library's module: `config, params = import_params(source)`.

    source: torch.nn.MultiheadAttention, TransformerEncoderLayer, TransformerDecoderLayer or Transformer,
    flax.nnx.MultiHeadAttention, the variables of flax.linen's, keras.layers.MultiHeadAttention; they are for our
    MultiHeadAttention, Block (norm first or last) and Transformer. Attention is not causal: those modules take their
    masks as arguments, and so do ours. A `nn.Transformer` has no embeddings: its config has vocab=1 and the params
    lack both tables, for the caller to put in.

    Refused by name (ValueError): what our modules cannot say, such as bias_k, add_zero_attn, a kdim or vdim that is
    not the width; TypeError: any other source.
    """
    if isinstance(source, Mapping):
        return _linen(source)
    for cls in type(source).__mro__:
        convert = _SOURCES.get((cls.__module__.split(".")[0], cls.__name__))
        if convert is not None:
            return convert(source)
    known = ", ".join(sorted(f"{package}'s {name}" for package, name in _SOURCES))
    raise TypeError(
        f"source must be one of {known} or flax.linen's variables; got {type(source).__name__}{_within(source)}"
    )


def _within(source: Any) -> str:
    """Which modules that can be read a torch module of another kind holds, outermost ones: they go one by one."""
    found: list[str] = []
    for name, module in source.named_modules() if hasattr(source, "named_modules") else ():
        readable = any((cls.__module__.split(".")[0], cls.__name__) in _SOURCES for cls in type(module).__mro__)
        if readable and not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    shown = ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
    return f", which holds some: give them one by one ({shown})" if found else ""


def _refuse(name: str, value: Any, reason: str) -> None:
    raise ValueError(f"{name} must not be {value!r}: {reason}")


def host(x: Any) -> np.ndarray:
    """An array of any framework as NumPy's; of torch one that has a gradient too, and bfloat16."""
    return _torch(x) if hasattr(x, "detach") else np.asarray(x)


def _torch(x: Any) -> np.ndarray:
    """A copy of a torch tensor."""
    if x.is_meta:
        raise ValueError("source must have values; got a module on the meta device")
    x = x.detach().cpu()
    if str(x.dtype) == "torch.bfloat16":
        bits = x.contiguous().view(require_package("torch").int16).numpy()
        return bits.view(require_package("ml_dtypes").bfloat16).copy()
    return x.numpy().copy()


def _torch_linear(name: str, weight: Any, bias: Any) -> dict[str, np.ndarray]:
    """(out, in) -> (in, out)."""
    found = {f"{name}.weight": np.ascontiguousarray(_torch(weight).T)}
    return found if bias is None else found | {f"{name}.bias": _torch(bias)}


def _torch_norm(name: str, module: Any) -> dict[str, np.ndarray]:
    found = {f"{name}.weight": _torch(module.weight)}
    return found if module.bias is None else found | {f"{name}.bias": _torch(module.bias)}


def _torch_attention_params(source: Any) -> dict[str, np.ndarray]:
    """The fused projection holds the rows of query, key and value one after the other."""
    width = source.embed_dim
    if source.bias_k is not None or source.bias_v is not None:
        _refuse("bias_k and bias_v", "given (add_bias_kv=True)", "our keys and values come from the input alone")
    if source.add_zero_attn:
        _refuse("add_zero_attn", True, "our keys and values come from the input alone")
    for name in ("kdim", "vdim"):
        if getattr(source, name) != width:
            _refuse(name, getattr(source, name), f"a context here has the width of the input ({width})")
    if source.in_proj_weight is not None:
        weights = np.split(_torch(source.in_proj_weight), 3)
    else:
        weights = [_torch(source.q_proj_weight), _torch(source.k_proj_weight), _torch(source.v_proj_weight)]
    params = {}
    names = ("query", "key", "value")
    for name, weight in zip(names, weights, strict=True):
        params[f"{name}.weight"] = np.ascontiguousarray(weight.T)
    if source.in_proj_bias is not None:
        for name, bias in zip(names, np.split(_torch(source.in_proj_bias), 3), strict=True):
            params[f"{name}.bias"] = bias.copy()
    return params | _torch_linear("output", source.out_proj.weight, source.out_proj.bias)


def _torch_attention(source: Any) -> Imported:
    config = BlockConfig(
        width=source.embed_dim, heads=source.num_heads, causal=False, dropout=float(source.dropout),
        attention_bias=source.in_proj_bias is not None, output_bias=source.out_proj.bias is not None,
    )  # fmt: skip
    return Imported(config, _torch_attention_params(source))


def _torch_activation(source: Any) -> str:
    """`relu`, `gelu` and `silu` of torch.nn.functional, bare or with `approximate` in a partial, or their modules."""
    activation = bare = source.activation
    tanh = getattr(activation, "approximate", "none") == "tanh"
    if (
        isinstance(activation, functools.partial)
        and not activation.args
        and set(activation.keywords) == {"approximate"}
    ):
        bare, tanh = activation.func, activation.keywords["approximate"] == "tanh"
    name = getattr(bare, "__name__", type(bare).__name__).lower()
    if name not in ("relu", "gelu", "silu"):
        _refuse("activation", activation, "known are relu, gelu and silu")
    return "gelu_tanh" if tanh else name


def _torch_block(source: Any) -> Imported:
    """An encoder or decoder layer; the norm of the cross-attention is torch's norm2 and our norm3."""
    cross = hasattr(source, "multihead_attn")
    attentions = {"attention": source.self_attn} | ({"cross": source.multihead_attn} if cross else {})
    norms = {"norm1": "norm1", "norm3": "norm2", "norm2": "norm3"} if cross else {"norm1": "norm1", "norm2": "norm2"}
    eps = {getattr(source, theirs).eps for theirs in norms.values()}
    if len(eps) != 1:
        _refuse("eps", sorted(eps), "one number serves all norms of a block")
    params: dict[str, np.ndarray] = {}
    for name, attention in attentions.items():
        params |= {f"{name}.{key}": x for key, x in _torch_attention_params(attention).items()}
    params |= _torch_linear("ffn.up", source.linear1.weight, source.linear1.bias)
    params |= _torch_linear("ffn.down", source.linear2.weight, source.linear2.bias)
    for ours, theirs in norms.items():
        params |= _torch_norm(ours, getattr(source, theirs))
    own = source.self_attn
    config = BlockConfig(
        width=own.embed_dim, heads=own.num_heads, hidden=source.linear1.out_features, causal=False,
        activation=_torch_activation(source), norm_place="pre" if source.norm_first else "post", norm_eps=eps.pop(),
        attention_bias=own.in_proj_bias is not None, output_bias=own.out_proj.bias is not None,
        ffn_bias=source.linear1.bias is not None, norm_bias=source.norm1.bias is not None, cross_attention=cross,
        dropout=_rate([module.p for module in source.children() if type(module).__name__ == "Dropout"]
                      + [float(attention.dropout) for attention in attentions.values()]),
    )  # fmt: skip
    return Imported(config, params)


def _rate(rates: list[float]) -> float:
    if len(set(rates)) == 1:
        return float(rates[0])
    warnings.warn(f"dropout is set to 0: one rate serves a whole block here, and the source has {sorted(set(rates))}",
                  UserWarning, stacklevel=2)  # fmt: skip
    return 0.0


def _torch_transformer(source: Any) -> Imported:
    """Both stacks and their final norms; the decoder of ours is causal, as with `generate_square_subsequent_mask`."""
    params: dict[str, np.ndarray] = {}
    configs = []
    for side in ("encoder", "decoder"):
        stack = getattr(source, side)
        for i, layer in enumerate(stack.layers):
            block = _torch_block(layer)
            configs.append(block.config.replace(cross_attention=False))
            params |= {f"{side}.blocks.{i}.{name}": x for name, x in block.params.items()}
        if stack.norm is None:
            _refuse(f"{side}.norm", None, "both stacks end in a norm here")
        params |= _torch_norm(f"{side}.norm", stack.norm)
    first, layers = configs[0], len(source.encoder.layers)
    if len(source.decoder.layers) != layers:
        _refuse("num_decoder_layers", len(source.decoder.layers), f"both stacks have as many layers here ({layers})")
    if any(config != first for config in configs):
        raise ValueError("source must have layers of one kind in both stacks: one configuration serves them all")
    eps = {source.encoder.norm.eps, source.decoder.norm.eps, first.norm_eps}
    if len(eps) != 1:
        _refuse("eps", sorted(eps), "one number serves all norms of a model")
    fields = {name: getattr(first, name) for name in first.__dataclass_fields__}
    config = ModelConfig(**fields | {"causal": None}, vocab=1, layers=layers, kind="encoder_decoder", positions="none",
                         head="none")  # fmt: skip
    return Imported(config, params)


def _by_head(kernels: Mapping[str, tuple[np.ndarray, np.ndarray | None]], facts: Mapping[str, Any]) -> Imported:
    """Kernels (in, heads, size) and (heads, size, out), biases (heads, size): heads are flattened, head by head."""
    params: dict[str, np.ndarray] = {}
    for name, (kernel, bias) in kernels.items():
        kernel, bias = np.array(kernel), None if bias is None else np.array(bias)
        params[f"{name}.weight"] = kernel.reshape((-1, kernel.shape[-1]) if name == "output" else (len(kernel), -1))
        if bias is not None:
            params[f"{name}.bias"] = bias.reshape(-1)
    query, key, value = (np.shape(kernels[name][0]) for name in ("query", "key", "value"))
    width = query[0]
    for name, size in (("keys", key[0]), ("values", value[0]), ("output", np.shape(kernels["output"][0])[-1])):
        if size != width:
            _refuse(f"the width of the {name}", size, f"it is the input's here ({width})")
    biased = {name: bias is not None for name, (_, bias) in kernels.items()}
    if len({biased["query"], biased["key"], biased["value"]}) != 1:
        _refuse("bias", biased, "query, key and value have one each or none here")
    config = BlockConfig(
        width=width, heads=query[1], kv_heads=key[1], head_dim=query[2], value_dim=value[2], causal=False,
        attention_bias=biased["query"], output_bias=biased["output"], **facts,
    )  # fmt: skip
    return Imported(config, params)


def _nnx(source: Any) -> Imported:
    if source.normalize_qk:
        _refuse("normalize_qk", True, "its norm of queries and keys is a layer norm, ours is an RMS norm")
    parts = {"query": source.query, "key": source.key, "value": source.value, "output": source.out}
    kernels = {name: (np.asarray(part.kernel[...]), None if part.bias is None else np.asarray(part.bias[...]))
               for name, part in parts.items()}  # fmt: skip
    return _by_head(kernels, {"dropout": float(source.dropout_rate)})


def _linen(source: Mapping[str, Any]) -> Imported:
    """{"params": {"query": {"kernel", "bias"}, "key", "value", "out"}}, or what is under "params"."""
    inner = source.get("params", source)
    if inner and all(hasattr(x, "detach") for x in inner.values()):
        raise ValueError("source must be a module of torch itself; got a state_dict, which does not say its heads")
    expected = {"query", "key", "value", "out"}
    if not isinstance(inner, Mapping) or set(inner) != expected:
        names = sorted(map(str, inner)) if isinstance(inner, Mapping) else type(inner).__name__
        raise ValueError(
            "source must hold query, key, value and out, the parts of flax.linen's attention without normalize_qk; "
            f"got {names}"
        )
    parts = {"query": inner["query"], "key": inner["key"], "value": inner["value"], "output": inner["out"]}
    kernels = {name: (np.asarray(part["kernel"]), None if part.get("bias") is None else np.asarray(part["bias"]))
               for name, part in parts.items()}  # fmt: skip
    return _by_head(kernels, {})


def _keras(source: Any) -> Imported:
    facts = source.get_config()
    if not source.built:
        raise ValueError("source must have been built: call it once, it has no weights before")
    for name in ("use_gate", "sliding_window"):
        if facts.get(name):
            _refuse(name, facts[name], "what it adds has no counterpart here")
    if len(source.query_dense.kernel.shape) != 3 or tuple(facts.get("attention_axes") or (1,)) != (1,):
        _refuse("attention_axes", facts.get("attention_axes"), "attention is over the axis of positions here")
    parts = {"query": source.query_dense, "key": source.key_dense, "value": source.value_dense,
             "output": source.output_dense}  # fmt: skip
    kernels: dict[str, tuple[np.ndarray, np.ndarray | None]] = {}
    for name, part in parts.items():
        kernels[name] = _keras_array(part.kernel), None if part.bias is None else _keras_array(part.bias)
    return _by_head(kernels, {"dropout": float(facts["dropout"])})


def _keras_array(variable: Any) -> np.ndarray:
    """The value, whichever framework Keras computes with."""
    value = variable.value
    return _torch(value) if hasattr(value, "detach") else np.array(value)


_SOURCES: dict[tuple[str, str], Callable[[Any], Imported]] = {
    ("torch", "MultiheadAttention"): _torch_attention,
    ("torch", "TransformerEncoderLayer"): _torch_block,
    ("torch", "TransformerDecoderLayer"): _torch_block,
    ("torch", "Transformer"): _torch_transformer,
    ("flax", "MultiHeadAttention"): _nnx,
    ("keras", "MultiHeadAttention"): _keras,
}
