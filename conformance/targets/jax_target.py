"""A target that takes JAX arrays; gradients by `jax.vjp`."""

from __future__ import annotations

import gc
from typing import Any

import jax
import numpy as np

from core_numpy.contract.memory import return_freed_memory

from ..functions import FUNCTIONS
from .protocol import Target

# After so many the compiled programs go: their memory stays under a gigabyte, and what all cases share compiles anew at
# no cost that shows.
CASES = 50


class JaxTarget(Target):
    framework = "jax"
    compiles = True

    def __init__(self, module: Any, name: str, device: str | None = None) -> None:
        """device: such as "cpu", "cuda" or "cuda:1"; JAX's own choice where None."""
        super().__init__(module, name)
        self.since = 0
        self.device = jax.devices()[0] if device is None else _device(device, name)
        if device is not None:
            jax.config.update("jax_default_device", self.device)

    def tidy(self) -> None:
        # Each case compiles programs that no other one calls: 20 MB of them, gigabytes at the long levels.
        self.since += 1
        if self.since == CASES:
            self.since = 0
            jax.clear_caches()
            gc.collect()
            return_freed_memory()

    def kernels(self) -> list[str]:
        # cuDNN serves no CPU: asking it for every case would only say so every time.
        return [name for name in super().kernels() if name != "cudnn" or self.device.platform == "gpu"]

    def array(self, x: np.ndarray, *, strided: str = "") -> Any:
        # JAX arrays have no strides to get wrong; the values pass through a strided buffer all the same.
        # jnp.asarray would compile a program for each shape and dtype. Of a copy, whose memory JAX may keep.
        return jax.device_put(np.array(super().array(x, strided=strided)))

    def numpy(self, x: Any) -> np.ndarray:
        return np.asarray(x) if isinstance(x, jax.Array) else super().numpy(x)

    def gradients(
        self, function: str, arguments: dict[str, Any], wrt: list[str], cotangents: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        native = {name: self.native(x) for name, x in arguments.items()}

        def apply(leaves: dict[str, Any]) -> Any:
            given = {**native, **leaves}
            positional = [given.pop(name) for name in FUNCTIONS[function].positional if name in given]
            return self._run(function, positional, given)

        outs, pull = jax.vjp(apply, {name: native[name] for name in wrt})
        given: Any
        if isinstance(outs, tuple | list):
            given = type(outs)(self.array(x).astype(o.dtype) for x, o in zip(cotangents.values(), outs, strict=True))
        else:
            given = self.array(next(iter(cotangents.values()))).astype(outs.dtype)
        (grads,) = pull(given)
        return {name: self.numpy(grads[name]) for name in wrt}

    def _optimised(
        self, config: Any, params: dict[str, np.ndarray], stream: list[dict[str, np.ndarray]]
    ) -> list[dict[str, np.ndarray]]:
        """One compiled update, called for each."""
        from backend_jax import optimizer
        from core_numpy.contract.schedule import learning_rate

        @jax.jit
        def one(now: Any, grads: Any, state: Any, t: Any, lr: Any) -> Any:
            clipped = optimizer.clip(grads, optimizer.global_norm(grads), config.clip_norm)
            return optimizer.update(config, now, clipped, state, t=t, lr=lr)

        now = {name: self.array(p) for name, p in params.items()}
        state, after = optimizer.initial_state(config, now), []
        for t, given in enumerate(stream, start=1):
            # As numbers of Python, which keep the parameters' dtype.
            now, state = one(now, {n: self.array(g) for n, g in given.items()}, state, t, learning_rate(config, t))
            found = now | {f"average of {name}": p for name, p in state.get("ema", {}).items()}
            order = [*params, *(f"average of {name}" for name in params if "ema" in state)]
            after.append({name: self.numpy(found[name]) for name in order})
        return after

    def scope(self, dtype: str) -> Any:
        return jax.enable_x64(dtype == "float64")

    def describe(self) -> dict[str, Any]:
        return {"framework": "jax", "version": jax.__version__, "device": str(self.device)}


def _device(device: str, name: str) -> Any:
    platform, _, number = device.partition(":")
    try:
        return jax.devices(platform)[int(number or 0)]
    except (RuntimeError, ValueError, IndexError) as error:
        said = str(error).strip().split("\n")[0]
        raise ImportError(f"target {name!r} cannot run on device {device!r}: {said}") from error
