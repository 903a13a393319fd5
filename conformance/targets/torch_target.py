"""A target that takes torch tensors; gradients by autograd."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

from ..functions import FUNCTIONS
from .protocol import NotOffered, Target


class TorchTarget(Target):
    framework = "torch"

    def __init__(self, module: Any, name: str, device: str = "cpu") -> None:
        super().__init__(module, name)
        try:
            self.device = torch.device(device)
            torch.empty(0, device=self.device)  # said once, and not by every case
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            said = str(error).strip().split("\n")[0]
            raise ImportError(f"target {name!r} cannot run on device {device!r}: {said}") from error
        if self.device.type != "cpu":
            torch.set_default_device(self.device)  # where modules, keys and caches are made that are told nothing

    def kernels(self) -> list[str]:
        # FlexAttention's backward exists on CUDA alone; elsewhere it would only say so, every time.
        return [name for name in super().kernels() if name != "flex" or self.device.type == "cuda"]

    def array(self, x: np.ndarray, *, strided: str = "") -> torch.Tensor:
        if x.dtype == ml_dtypes.bfloat16:
            tensor = torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(np.array(x))
        tensor = tensor.to(self.device)  # before it is strided: the way there makes some arrays contiguous
        return strided_tensor(tensor, strided) if strided and tensor.ndim else tensor

    def numpy(self, x: Any) -> np.ndarray:
        if not isinstance(x, torch.Tensor):
            return super().numpy(x)
        x = x.detach().cpu().contiguous()
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()

    def _bytes(self, x: Any) -> Any:
        return super()._bytes(self.numpy(x) if isinstance(x, torch.Tensor) else x)

    def gradients(
        self, function: str, arguments: dict[str, Any], wrt: list[str], cotangents: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        native = {name: self.native(x) for name, x in arguments.items()}
        leaves = {name: native[name].requires_grad_() for name in wrt}
        positional = [native.pop(name) for name in FUNCTIONS[function].positional if name in native]
        got = self._run(function, positional, native)
        outs = got if isinstance(got, tuple | list) else (got,)
        if not all(out.requires_grad for out in outs):
            raise NotOffered(f"{function} has no gradient")
        given = [self.array(x).to(out.dtype) for x, out in zip(cotangents.values(), outs, strict=True)]
        watched = leaves | dict(zip((f"grad_{name}" for name in cotangents), given, strict=True))
        with self.watching(f"the gradient of {function}", watched):
            grads = torch.autograd.grad(outs, list(leaves.values()), given, allow_unused=True)
        return {
            name: np.zeros(leaf.shape) if grad is None else self.numpy(grad)
            for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
        }

    def describe(self) -> dict[str, Any]:
        return {
            "framework": "torch",
            "version": torch.__version__,
            "device": str(self.device),
            "threads": torch.get_num_threads(),
        }

    def _optimised(
        self, config: Any, params: dict[str, np.ndarray], stream: list[dict[str, np.ndarray]]
    ) -> list[dict[str, np.ndarray]]:
        """torch keeps all parameters in one buffer and updates it in place."""
        from backend_torch import optimizer
        from core_numpy.contract.schedule import learning_rate

        flat = optimizer.Flat.of({name: torch.nn.Parameter(self.array(p)) for name, p in params.items()})
        state, after = optimizer.initial_state(config, flat), []
        for t, given in enumerate(stream, start=1):
            grads = flat.like()
            for name, view in flat.views(grads).items():
                view.copy_(self.array(given[name]))
            clipped = optimizer.clip(grads, float(optimizer.global_norm(grads)), config.clip_norm)
            optimizer.update(config, flat, clipped, state, t=t, lr=learning_rate(config, t))
            now = flat.views(flat.data)
            averages = flat.views(state["ema"]) if "ema" in state else {}
            found = {n: now[n] for n in params} | {f"average of {n}": averages[n] for n in params if averages}
            after.append({name: self.numpy(p).copy() for name, p in found.items()})
        return after


def strided_tensor(x: torch.Tensor, way: str) -> torch.Tensor:
    """`protocol.strided_copy` on the tensor's device."""
    if way == "transposed" and x.ndim > 2:
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    wide = x.new_zeros((*x.shape[:-1], 2 * x.shape[-1]))
    part = wide[..., : x.shape[-1]] if way == "transposed" else wide[..., ::2]
    part.copy_(x)
    return part
