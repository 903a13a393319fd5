"""Linear layers of the same rows: torch's own, or oneDNN's product where that is the faster one.

    y = x W.T + b;  dx = sum_i dy_i W_i;  dW = dy.T x;  db = sum dy

torch multiplies float32 matrices on a CPU by MKL, which does not use the whole of other makers' processors. oneDNN,
which torch brings along, does: on an AMD processor with AVX-512 it takes 0.8 to 0.95 of the time forward and for dx, on
one core and on two, from 2^24 multiplications on; for dW it is slower. It adds the bias, and the gradients of layers
that read the same rows, on the way. On other processors nothing was measured, and torch's own serves.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from .hooks import hooked
from .visibility import traced

# From so many multiplications on, over so many features at least, and from so many rows on. A compiled program calls
# the operation through Python: from more on.
LEAST, LEAST_COMPILED, NARROWEST, FEWEST = 1 << 24, 1 << 26, 128, 64


def _vendor() -> str:
    """Who made the processor, as Linux tells it; elsewhere unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


# Whether oneDNN's float32 product is known to beat torch's own here.
FASTER = (
    torch.backends.mkldnn.is_available()
    and torch.backends.mkl.is_available()
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
    and _vendor() == "AuthenticAMD"
)

Joined = Callable[[Tensor], tuple[Tensor, ...]]


def project(x: Tensor, *layers: nn.Module, joint: Joined | None = None) -> tuple[Tensor, ...]:
    """layer(x) of each layer; x (..., K). joint: the same by one product, where a trainer has one."""
    if joint is not None:
        return joint(x)
    if FASTER and x.shape[-1] >= NARROWEST and x.numel() >= FEWEST * NARROWEST:
        pieces: list[Tensor | None] = []
        for layer in layers:
            if type(layer) is not nn.Linear or hooked(layer) or not _suits(x, layer.weight, layer.bias):
                break
            pieces += [layer.weight, layer.bias]
        else:
            if _plain(x):
                if torch.compiler.is_compiling():
                    return tuple(_opaque(x, layer.weight, layer.bias) for layer in layers)
                return _Products.apply(x, *pieces)  # type: ignore[no-any-return]
    return tuple(layer(x) for layer in layers)


def _plain(x: Tensor) -> bool:
    """Whether nobody exports, transforms or casts what is called: then the product is as good as torch's own."""
    if x.dtype != torch.float32 or x.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return False
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting()
    return type(x) is Tensor and not traced() and forward_ad._current_level < 0 and bool(torch._C._get_mkldnn_enabled())


def _suits(x: Tensor, weight: Any, bias: Any) -> bool:
    """Whether a layer is large enough, and plain."""
    outputs, inputs = weight.shape
    least = LEAST_COMPILED if torch.compiler.is_compiling() else LEAST
    if outputs < NARROWEST // 2 or x.numel() * outputs < least or inputs != x.shape[-1]:
        return False
    return all(
        p is None or (type(p) in (Tensor, nn.Parameter) and p.dtype == torch.float32 and p.device == x.device)
        for p in (weight, bias)
    )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, more: Tensor | None = None) -> Tensor:
    """x W.T (+ b, or + more); x (..., K), weight (N, K) of any strides."""
    if more is None:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
    return torch.ops.mkldnn._linear_pointwise.binary(x, more, weight, None, "add")  # type: ignore[no-any-return]


@torch.library.custom_op("backend_torch::product", mutates_args=())
def _opaque(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One layer as an operation that no compiler takes apart: torch's own knows oneDNN's with packed weights only."""
    return _product(x, weight, bias)


@_opaque.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _derivative(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    g, wanted = grad.flatten(0, -2), ctx.needs_input_grad
    return (
        _opaque(grad, weight.mT, None) if wanted[0] else None,
        g.mT @ x.flatten(0, -2) if wanted[1] else None,
        g.sum(0) if wanted[2] else None,
    )


_opaque.register_autograd(_derivative, setup_context=_keep)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *pieces: Tensor | None) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *pieces[::2])
        return tuple(_product(x, w, b) for w, b in zip(pieces[::2], pieces[1::2], strict=True))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        wanted, found = ctx.needs_input_grad, []
        rows, flat = x.reshape(-1, x.shape[-1]), [g.reshape(-1, g.shape[-1]) for g in grads]
        for i, g in enumerate(flat):
            found += [g.mT @ rows if wanted[1 + 2 * i] else None, g.sum(0) if wanted[2 + 2 * i] else None]
        if not wanted[0]:
            return None, *found
        if torch.is_grad_enabled():  # recorded: operations that have a derivative
            return sum(g @ w for g, w in zip(flat, weights, strict=True)).view(x.shape), *found  # type: ignore[union-attr]
        dx = None
        for g, w in zip(flat, weights, strict=True):
            dx = _product(g, w.mT, None, dx)
        return dx.view(x.shape), *found  # type: ignore[union-attr]
