"""How the blocks of a model are made faulty: their norms, projections, activations, and what their attention is given.

Each starts from the reference's Transformer and changes that one instance: its configuration as the call reads it, or
one part's method. The reference's own classes stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import MethodType
from typing import Any

import numpy as np

import core_numpy as core

Change = Callable[[Any], None]


def stacks(model: Any) -> list[Any]:
    """The stacks of a model: itself, or encoder and decoder."""
    return [model.encoder, model.decoder] if model.config.kind == "encoder_decoder" else [model]


def altered(change: Change) -> dict[str, Any]:
    """The Transformer whose stacks are changed, one by one, once they are made."""

    class Altered(core.Transformer):
        def __init__(self, config: Any, *, seed: int = 0, dtype: str = "float32", device: Any = None) -> None:
            super().__init__(config, seed=seed, dtype=dtype, device=device)
            for stack in stacks(self):
                change(stack)

    return {"Transformer": Altered}


def attentions(model: Any) -> Iterator[Any]:
    return (block.attention for block in model.blocks)


def norms(model: Any) -> Iterator[Any]:
    for owner, names in [(model, ("embedding_norm", "norm"))] + [
        (block, ("norm1", "norm2", "norm3", "norm1_post", "norm2_post")) for block in model.blocks
    ]:
        yield from (norm for name in names if (norm := getattr(owner, name)) is not None)
    for one in attentions(model):
        yield from (norm for norm in (one.query_norm, one.key_norm) if norm is not None)


def identity(x: np.ndarray) -> np.ndarray:
    return x


def of_norms(**fields: Any) -> dict[str, Any]:
    def change(model: Any) -> None:
        for norm in norms(model):
            for name, value in fields.items():
                setattr(norm, name, value)

    return altered(change)


def without_bias(*names: str) -> dict[str, Any]:
    """Linear parts that do not add their bias."""

    def run(self: Any, x: np.ndarray) -> np.ndarray:
        return x @ self.weight.astype(np.float64)

    def change(model: Any) -> None:
        for block in model.blocks:
            parts = {"query": block.attention.query, "key": block.attention.key, "value": block.attention.value,
                     "output": block.attention.output, "up": block.ffn.up, "down": block.ffn.down}  # fmt: skip
            for name in names:
                parts[name].run = MethodType(run, parts[name])

    return altered(change)


def activation(of: dict[str, str]) -> dict[str, Any]:
    def change(model: Any) -> None:
        for block in model.blocks:
            block.ffn.config = block.ffn.config.replace(activation=of.get(block.config.activation, "silu"))

    return altered(change)


def norm_method(name: str, run: Callable[[Any, np.ndarray], np.ndarray]) -> dict[str, Any]:
    """The norm `name` of the model or of every block runs otherwise."""

    def change(model: Any) -> None:
        for owner in (model, *model.blocks, *attentions(model)):
            norm = getattr(owner, name, None)
            if norm is not None and hasattr(norm, "run"):
                norm.run = MethodType(run, norm)

    return altered(change)


def identity_norm(self: Any, x: np.ndarray) -> np.ndarray:
    return x


def norm_without_bias(self: Any, x: np.ndarray) -> np.ndarray:
    return core.rms_norm(x, self.gain, eps=self.eps) if self.kind == "rms" else core.layer_norm(
        x, self.gain, None, eps=self.eps)  # fmt: skip


def no_norm_bias(model: Any) -> None:
    for norm in norms(model):
        norm.run = MethodType(norm_without_bias, norm)


def gate_swapped(model: Any) -> None:
    for block in model.blocks:
        if block.ffn.gate is not None:
            up, gate = block.ffn.up.run, block.ffn.gate.run
            block.ffn.up.run, block.ffn.gate.run = gate, up


def arguments(alter: Callable[[Any, dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """The keywords of each attention, altered: alter(module, keywords)."""

    def change(model: Any) -> None:
        for block in model.blocks:
            for module in (block.attention, block.cross):
                if module is not None:
                    own = module._arguments
                    module._arguments = lambda *call, own=own, module=module: alter(module, own(*call))

    return altered(change)


def cut(*names: str) -> Callable[[Any, dict[str, Any]], dict[str, Any]]:
    return lambda module, given: {name: None if name in names else x for name, x in given.items()}


def sinks_off(module: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Sinks that are there and weigh nothing, so that they keep a gradient, which is 0."""
    return given if given["sinks"] is None else {**given, "sinks": np.full_like(given["sinks"], -1e4)}


def scene(alter: Callable[[int, Any], Any]) -> dict[str, Any]:
    """What block i is called with, altered."""

    def change(model: Any) -> None:
        own = model.of_block
        model.of_block = lambda i, scene, key: (alter(i, own(i, scene, key)[0]), own(i, scene, key)[1])

    return altered(change)


def block_key(alter: Callable[[int, Any], Any]) -> dict[str, Any]:
    """alter(i, the model's key) -> the key of block i."""

    def change(model: Any) -> None:
        own = model.of_block
        model.of_block = lambda i, scene, key: (own(i, scene, key)[0], None if key is None else alter(i, key))

    return altered(change)


def norm_after_rotation(model: Any) -> None:
    """q/k norm where the rotated queries and keys arrive: the norm of a rotation with a gain per feature differs."""
    for one in attentions(model):
        if one.query_norm is None:
            continue
        own_run, q_norm, k_norm = one.run, one.query_norm, one.key_norm

        def run(x: Any, scene: Any, key: Any, *, cross: bool = False, own_run: Any = own_run, q_norm: Any = q_norm,
                k_norm: Any = k_norm, one: Any = one) -> Any:  # fmt: skip
            # Rotate, then normalise, then rotate back, so that the rotation that follows is undone.
            def wrap(norm: Any) -> Callable[[np.ndarray], np.ndarray]:
                def apply(z: np.ndarray) -> np.ndarray:
                    cos, sin = scene.rotary
                    turned = core.apply_rotary(z, cos, sin, layout=one.layout)
                    return core.apply_rotary(type(norm).run(norm, turned), cos, -sin, layout=one.layout)

                return apply

            q_norm.run, k_norm.run = (wrap(n) if scene.rotary is not None else (lambda z, n=n: type(n).run(n, z))
                                      for n in (q_norm, k_norm))  # fmt: skip
            return own_run(x, scene, key, cross=cross)

        one.run = run


def heads_interleaved(model: Any) -> None:
    """Column c belongs to head c mod H, not to head c // D."""
    for one in attentions(model):
        for part, heads in ((one.query, one.config.heads), (one.key, one.config.groups)):
            own = part.run
            part.run = lambda x, own=own, heads=heads: np.swapaxes(
                own(x).reshape(*x.shape[:2], -1, heads), -1, -2).reshape(*x.shape[:2], -1)  # fmt: skip


def place(was: str, now: str) -> Change:
    """Blocks whose norms stand elsewhere, where their parameters allow it."""

    def change(model: Any) -> None:
        for block in model.blocks:
            if block.config.norm_place == was and block.norm2 is not None:
                block.config = block.config.replace(norm_place=now)

    return change


def first_window(model: Any) -> None:
    """The first layer's window for all."""
    for block in model.blocks:
        block.attention.config = block.attention.config.replace(window=model.blocks[0].config.window)


def layer_for_rms(model: Any) -> None:
    for norm in norms(model):
        norm.kind = "layer"


def rms_for_layer(model: Any) -> None:
    def run(self: Any, x: np.ndarray) -> np.ndarray:
        return core.rms_norm(x, self.gain, eps=self.eps) + (0.0 if self.bias is None else self.bias)

    for norm in norms(model):
        norm.run = MethodType(run, norm)


def final_norm_lost(model: Any) -> None:
    if model.norm is not None:
        model.norm.run = identity


def bias_lost(kind: str) -> Change:
    def change(model: Any) -> None:
        if model.config.positions == kind:
            model._bias = lambda T, past: None

    return change


def layout(name: str) -> dict[str, Any]:
    def change(model: Any) -> None:
        for one in attentions(model):
            one.layout = name

    return altered(change)


def changed(scene: Any, **fields: Any) -> Any:
    return replace(scene, **fields)


def values_rotated(model: Any) -> None:
    for one in attentions(model):
        own = one.run

        def run(x: Any, scene: Any, key: Any, *, cross: bool = False, own: Any = own, one: Any = one) -> Any:
            plain = type(one.value).run
            D, groups = one.config.value_size, one.config.groups

            def turned(v: np.ndarray) -> np.ndarray:
                y = plain(one.value, v).reshape(*v.shape[:2], groups, D).swapaxes(1, 2)
                if scene.rotary is not None and 2 * scene.rotary[0].shape[-1] <= D:
                    y = core.apply_rotary(y, *scene.rotary, layout=one.layout)
                return y.swapaxes(1, 2).reshape(*v.shape[:2], groups * D)

            one.value.run = turned
            return own(x, scene, key, cross=cross)

        one.run = run


def cross_arguments(alter: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    def change(model: Any) -> None:
        for block in model.blocks:
            if block.cross is not None:
                own = block.cross._arguments
                block.cross._arguments = lambda *call, own=own: alter(own(*call))

    return altered(change)


def post_norms_lost(model: Any) -> None:
    for block in model.blocks:
        for norm in (block.norm1_post, block.norm2_post):
            if norm is not None:
                norm.run = identity


def norms_swapped(model: Any) -> None:
    for block in model.blocks:
        if block.norm2 is not None:
            block.norm1.run, block.norm2.run = block.norm2.run, block.norm1.run


def no_residual(model: Any) -> None:
    """The second branch's input is left out of its output."""
    for block in model.blocks:
        own = block.run
        block.run = lambda x, scene, key, own=own: (lambda got: (got[0] - x, got[1]))(own(x, scene, key))
