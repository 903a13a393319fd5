"""Which kernel serves which arguments: a table to read down, and the choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from core_numpy.contract.checks.attention import AttentionPlan
from core_numpy.contract.checks.kernels import Kernel, check_kernel, refuse_kernel

from .visibility import Visibility, readable

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

    @property
    def gradient(self) -> bool:
        """Whether q, k, v or sinks want one."""
        arrays = (self.q, self.k, self.v, self.sinks)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arrays)

    @property
    def empty(self) -> bool:
        return self.q.numel() == 0 or self.k.numel() == 0 or self.v.numel() == 0

    @property
    def wide(self) -> bool:
        """Whether a fused CPU kernel is given half types as float32, and its result rounded once.

        float16: most CPUs have no arithmetic for it, and torch's kernel converts piece by piece and keeps the weights
        in float16; float32 throughout is faster from 16 x 16 scores on, backward by a multiple, and rounds once.
        bfloat16 only for lse: for half types the kernel takes a cheaper exponential, which leaves lse 2e-5 off.
        """
        q = self.q
        return q.device.type == "cpu" and (q.dtype == torch.float16 or (q.dtype == torch.bfloat16 and self.wants_lse))


Test = Callable[[Call], bool]


# From so many scores on, and up to so many, the formula with its own backward pass, its weights kept, beats torch's
# fused CPU kernel: with 32 queries or more it takes 0.5 to 0.8 of the time on two cores, forward as with a gradient, on
# one 0.9 to 1.0. Above, the scores leave the cache: at 2^19 0.9 to 1.2, but 0.9 to 1.0 with a bias, which costs that
# kernel more. A soft cap no kernel has: up to CAPPED it takes 0.4 to 0.7 of the formula's time.
FEWEST, FEW, FEW_BIASED, FEWEST_QUERIES = 1 << 15, 1 << 18, 1 << 19, 32
# Up to so many queries of so many heads that share keys, over so many keys: the products read every key once, where
# torch's kernel reads it for each head, and take 0.5 to 0.9 of its time on one core and on two.
STEPS, SHARING, LONG = 4, 4, 1024


def keeps(c: Call) -> bool:
    """Whether few scores are all that there is, but for j <= i, a bias, sinks or a cap: see `few`."""
    see, plan, N = c.see, c.plan, c.q.shape[0]
    if not _simple(c):
        return False
    if see.bias is not None and (see.banded or see.bias.dtype != c.q.dtype or N != 1 or plan.G != plan.H):
        return False
    if plan.T < FEWEST_QUERIES:
        return N == 1 and plan.T <= STEPS and plan.group >= SHARING and plan.S >= LONG and _scores(c) <= FEW
    if see.bias is None and plan.softcap is None:
        if c.sinks is not None and not c.gradient:
            return False  # forward alone, torch's kernel and a rescaling take 0.9 of the time
        if c.sinks is None and not c.q.is_contiguous():
            return (
                False  # heads that lie beside each other are copied first: torch's kernel takes 0.8 to 0.9 of the time
            )
    if plan.softcap is not None:
        most = CAPPED
    else:
        most = FEW if see.bias is None else WRITTEN_OUT if c.bias_gradient else FEW_BIASED
    return FEWEST <= _scores(c) <= most


def _simple(c: Call) -> bool:
    """One restriction at most that `few` knows, in float32 or float64, read on a CPU."""
    see, plan = c.see, c.plan
    if c.empty or c.wants_lse or plan.dropout_rate > 0 or plan.Dv != plan.D:
        return False
    if see.mask is not None or see.ragged or c.q.dtype not in (torch.float32, torch.float64) or not readable(c.q):
        return False
    flag = see.left is None and see.right == see.offset == 0 and plan.T >= plan.S and plan.scale > 0
    return flag or not see.banded


def joins(c: Call) -> bool:
    """Whether sinks beside torch's fused kernel are all that there is, but for its flag: one piece, see `sinks`."""
    if c.sinks is None or c.see.bias is not None or c.plan.softcap is not None or forward_ad._current_level >= 0:
        return False
    return _simple(c)


# Up to so many scores the formula is no slower than an own backward pass where a bias has a gradient, forward and
# backward on one core in float32: 0.6 of its time at 2^19 scores, 0.8 at 2^21, the same at 2^23.
WRITTEN_OUT = 1 << 21


def _written_out(c: Call) -> bool:
    if c.q.device.type != "cpu" or c.q.dtype not in (torch.float32, torch.float64):
        return False
    return _scores(c) <= WRITTEN_OUT


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

# Up to so many scores the whole formula at once beats a kernel that gives lse: measured on one core in float32.
SMALL = 1 << 17
# With a soft cap or sinks, forward and backward on two cores in float32, causal: 0.8 and 0.9 of the pieces' time at
# 2^19 and 2^21 scores; at 2^23, where pieces skip half of them, 1.8 and 2.8 times it.
CAPPED = 1 << 21
# From this length on, cutting a batch element's own keys out pays for one call per element, and from this one on a
# narrow band for one call per block of queries: below, torch's kernel with a mask takes 0.8 to 1.0 of the time.
CUT, BAND = 256, 512


def reasons(kernel: str, call: Call) -> list[str]:
    """Why a kernel cannot serve a call; empty where it can."""
    return [why for name, why, asks in CANNOT if name == kernel and asks(call)]


def _small(c: Call) -> bool:
    capped = not c.wants_lse and not c.q.is_cuda and (c.plan.softcap is not None or c.sinks is not None)
    return _scores(c) <= (CAPPED if capped else SMALL)


def _scores(c: Call) -> int:
    return c.q.shape[0] * c.plan.H * c.plan.T * c.plan.S


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
    return (c.plan.S >= CUT and _uneven(c)) or (c.plan.S >= BAND and _thin(c))


def _uneven(c: Call) -> bool:
    """Whether batch elements may differ in structure; a single one's length, where it can be read, any kernel cuts."""
    see = c.see
    if not see.ragged or see.q_segments is not None or isinstance(see.offset, Tensor):
        return see.ragged
    return c.q.shape[0] != 1 or not readable(c.q)


def _transformed(c: Call) -> bool:
    if c.q.is_cuda or torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None


def _unlooked(c: Call) -> bool:
    """Whether a bias may put a row so far off that torch's derivative is wrong, with nobody there to look: `ENOUGH`."""
    compiled = torch.compiler.is_compiling() and c.q.device.type == "cpu"
    return compiled and c.see.bias is not None and c.gradient and not c.bias_gradient


# The first line whose condition holds and whose kernel can serve is the choice of kernel="auto".
ORDER: tuple[tuple[str, str, Test], ...] = (
    ("flex", "on CUDA it skips what band, lengths and segments leave out", lambda c: c.q.is_cuda and _structured(c)),
    ("blockwise", "it skips what band, lengths and segments leave out", lambda c: not c.q.is_cuda and _structured(c)),
    ("blockwise", "torch.func.vmap would run torch's fused CPU kernel once per element", _transformed),
    ("blockwise", "compiled, torch's kernel would not be asked whether its derivative holds", _unlooked),
    ("dense", "few scores: keeping the weights is the shortest way", keeps),
    ("dense", "few scores: torch too writes a bias's gradient out", lambda c: c.bias_gradient and _written_out(c)),
    ("sdpa", "torch's fused kernel says all of it", lambda c: True),
    ("blockwise", "torch's fused kernel is all but the sinks, which rescale its results", joins),
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
