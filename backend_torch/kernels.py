"""Which kernel serves which arguments: a table to read down, and the choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core_numpy.contract.checks.attention import AttentionPlan
from core_numpy.contract.checks.kernels import Kernel, check_kernel, refuse_kernel

from .visibility import Visibility

KERNELS = {
    "sdpa": Kernel(
        "sdpa",
        (
            "soft cap",
            "sinks",
            "dropout",
            "lse",
            "the gradient of a bias, but for few float32 scores on the CPU",
            "on CUDA in half precision: a bias of another dtype",
        ),
        twice=False,
    ),
    "blockwise": Kernel("blockwise", (), twice=False),
    "flex": Kernel("flex", ("the CPU", "mask", "bias", "dropout", "float64"), twice=False),
    "dense": Kernel("dense", (), twice=True),
}


@dataclass(frozen=True)
class Call:
    """A checked call with its batch axes merged: q (N, H, T, D), k (N, G, S, D), v (N, G, S, Dv); sinks (H,)."""

    q: Tensor
    k: Tensor
    v: Tensor
    see: Visibility
    sinks: Tensor | None
    key: Tensor | None
    plan: AttentionPlan
    wants_lse: bool

    @property
    def bias_gradient(self) -> bool:
        return self.see.bias is not None and self.see.bias.requires_grad and torch.is_grad_enabled()


Test = Callable[[Call], bool]


# Up to so many scores torch's formula, which it takes for a bias with a gradient, is no slower than an own backward
# pass, forward and backward on one core in float32: 0.6 of its time at 2^19 scores, 0.8 at 2^21, the same at 2^23.
WRITTEN_OUT = 1 << 21


def _written_out(c: Call) -> bool:
    if c.q.device.type != "cpu" or c.q.dtype not in (torch.float32, torch.float64):
        return False
    return c.q.shape[0] * c.plan.H * c.plan.T * c.plan.S <= WRITTEN_OUT


def _half_bias(c: Call) -> bool:
    bias = c.see.bias
    return bias is not None and bias.dtype != c.q.dtype and c.q.is_cuda and c.q.dtype in (torch.float16, torch.bfloat16)


# kernel, what it cannot do, whether these arguments ask for it
CANNOT: tuple[tuple[str, str, Test], ...] = (
    ("sdpa", "torch's fused kernels have no soft cap", lambda c: c.plan.softcap is not None),
    ("sdpa", "torch's fused kernels have no sinks", lambda c: c.sinks is not None),
    (
        "sdpa",
        "torch's fused kernels draw their own dropout, not that of dropout_key",
        lambda c: c.plan.dropout_rate > 0,
    ),
    ("sdpa", "F.scaled_dot_product_attention gives no log-sum-exp", lambda c: c.wants_lse),
    ("sdpa", "torch's fused kernels have no gradient for a bias", lambda c: c.bias_gradient and not _written_out(c)),
    ("sdpa", "on CUDA torch would round the bias down to q's dtype", _half_bias),
    ("flex", "FlexAttention has no backward pass outside CUDA", lambda c: not c.q.is_cuda),
    ("flex", "a mask is a condition on indices there, not an array", lambda c: c.see.mask is not None),
    ("flex", "a bias is a function of indices there, not an array", lambda c: c.see.bias is not None),
    ("flex", "it has no dropout", lambda c: c.plan.dropout_rate > 0),
    ("flex", "it has no float64", lambda c: c.q.dtype == torch.float64),
    ("flex", "it reads features next to each other, 16 or more", lambda c: min(c.plan.D, c.plan.Dv) < 16),
)

# Up to so many scores the whole formula at once beats a registered operation and its Python. Measured on one core in
# float32, soft cap or sinks, causal or not: twice as fast at 2^13 scores, not slower at 2^17, either way at 2^18.
SMALL = 1 << 17
# From this length on, cutting a batch element's own keys out pays for one call per element.
CUT = 256


def reasons(kernel: str, call: Call) -> list[str]:
    """Why a kernel cannot serve a call; empty where it can."""
    return [why for name, why, asks in CANNOT if name == kernel and asks(call)]


def _small(c: Call) -> bool:
    return c.q.shape[0] * c.plan.H * c.plan.T * c.plan.S <= SMALL


def _thin(c: Call) -> bool:
    """Whether the band leaves out enough of the scores that skipping it beats torch's kernel with a mask."""
    see, S = c.see, c.plan.S
    if see.left is None or see.right is None:
        # One-sided: half of the scores at best, which torch's causal flag has already, and a mask has not.
        return see.banded and not (
            see.left is None and see.right == 0 and isinstance(see.offset, int) and see.offset == 0
        )
    return 2 * (see.left + see.right) < S


def _structured(c: Call) -> bool:
    return c.plan.S >= CUT and (c.see.ragged or _thin(c))


def _transformed(c: Call) -> bool:
    if c.q.is_cuda or torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None


# The first line whose condition holds and whose kernel can serve is the choice of kernel="auto".
ORDER: tuple[tuple[str, str, Test], ...] = (
    ("flex", "on CUDA it skips what band, lengths and segments leave out", lambda c: c.q.is_cuda and _structured(c)),
    ("blockwise", "it skips what band, lengths and segments leave out", lambda c: not c.q.is_cuda and _structured(c)),
    ("blockwise", "torch.func.vmap would run torch's fused CPU kernel once per element", _transformed),
    ("sdpa", "torch's fused kernel says all of it", lambda c: True),
    ("dense", "few scores: the formula at once is the shortest way", _small),
    ("flex", "on CUDA it fuses soft cap, sinks and lse", lambda c: c.q.is_cuda),
    ("blockwise", "linear memory, and nothing that it cannot serve", lambda c: True),
)


def choose(kernel: Any, call: Call) -> str:
    """The kernel that serves a call; asking for one that cannot is a ValueError that says why."""
    if kernel != "auto":
        check_kernel(kernel, KERNELS)
        refuse_kernel(kernel, reasons(kernel, call))
        return kernel
    return next(name for name, _, suits in ORDER if suits(call) and not reasons(name, call))


def explain(kernel: Any, call: Call) -> str:
    """One sentence per kernel: why it is chosen, could serve, or cannot."""
    chosen = choose(kernel, call)
    lines = []
    for name in KERNELS:
        why = reasons(name, call)
        if name == chosen:
            ours = (text for line, text, suits in ORDER if line == name and suits(call))
            lines.append(
                f"{name} is chosen: {next(ours, 'it was asked for') if kernel == 'auto' else 'it was asked for'}."
            )
        elif why:
            lines.append(f"{name} cannot serve: {'; '.join(why)}.")
        else:
            lines.append(f"{name} could serve.")
    return "\n".join(lines)
