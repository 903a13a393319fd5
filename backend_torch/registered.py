"""What torch needs to know of the blockwise operation: shapes, derivative, and a batch axis of torch.func.vmap."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .blockwise import backward, forward, run_backward, run_forward
from .dense import accumulation
from .fused import second_derivative
from .visibility import readable

# Positions in the arguments of `forward`.
_SINKS, _KEY, _TENSORS = 9, 10, 11


def blockwise(call: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call: (N, H, T, Dv) in q's dtype and (N, H, T) in the accumulation dtype."""
    see, plan = call.see, call.plan
    offset, offsets = (0, see.offset) if isinstance(see.offset, Tensor) else (see.offset, None)
    key = call.key if plan.dropout_rate > 0 else None
    run: Any = forward
    if not torch.compiler.is_compiling():
        run = _Eager.apply if readable(call.q) else _Blockwise.apply
    return run(
        call.q, call.k, call.v, see.mask, see.bias, offsets, see.lengths, see.q_segments, see.kv_segments,
        call.sinks, key, see.left, see.right, offset, plan.scale, plan.softcap, plan.dropout_rate,
    )  # fmt: skip


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    shape = q.shape[:3]
    return q.new_empty((*shape, v.shape[3])), q.new_empty(shape, dtype=accumulation(q.dtype))


@backward.register_fake
def _(grad: Tensor, grad_lse: Any, out: Tensor, lse: Tensor, to_bias: bool, *args: Any) -> tuple[Tensor, ...]:
    q, k, v, bias, sinks = args[0], args[1], args[2], args[4], args[9]
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    none = q.new_empty(0)
    return (
        dq,
        dk,
        dv,
        bias.new_empty(bias.shape) if to_bias else none,
        none if sinks is None else sinks.new_empty(sinks.shape),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:_TENSORS], *output)
    ctx.numbers = inputs[_TENSORS:]


def _derivative(step: Any, ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    *tensors, out, lse = ctx.saved_tensors
    if grad is None:
        grad = torch.zeros_like(out)
    to_bias = ctx.needs_input_grad[4]
    dq, dk, dv, dbias, dsinks = step(grad, grad_lse, out, lse, to_bias, *tensors, *ctx.numbers)
    sinks = None if tensors[_SINKS] is None else dsinks
    nothing = (None,) * len(ctx.numbers)
    return (dq, dk, dv, None, dbias if to_bias else None, None, None, None, None, sinks, None, *nothing)


def _no_second(ctx: Any, *grads: Any) -> Any:
    raise second_derivative("blockwise")


# For torch.compile and torch.export, which keep the operations whole.
forward.register_autograd(partial(_derivative, backward), setup_context=_setup)
backward.register_autograd(_no_second, setup_context=lambda ctx, inputs, output: None)


class _Eager(torch.autograd.Function):
    """The same for eager work on a CPU: by far the shortest way there is, which a short call notices."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        output = run_forward(*args)
        _setup(ctx, args, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        # Recorded, it has to say that it has no derivative.
        return _derivative(_Backward.apply if torch.is_grad_enabled() else run_backward, ctx, *grads)


class _Blockwise(torch.autograd.Function):
    """The same for torch.func, which wants this form, and for devices that are not read."""

    setup_context = staticmethod(_setup)

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return forward(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return _derivative(_Backward.apply, ctx, *grads)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return _over_batch(_Blockwise.apply, info, in_dims, args, 0)


class _Backward(torch.autograd.Function):
    """The first derivative, which has none itself."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    backward = staticmethod(_no_second)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return _over_batch(_Backward.apply, info, in_dims, args, 5)


def _over_batch(op: Any, info: Any, in_dims: tuple[Any, ...], args: tuple[Any, ...], first: int) -> Any:
    """One call of op over a batch axis: merged with N where all it holds has an N, else one call per element.

    first: where the arguments of `forward` begin. Sinks and the key have no axis N, a bias's gradient sums over N,
    and dropout counts the weights of its own call.
    """
    size = info.batch_size
    to_bias = first > 0 and args[4]
    sinks, key = args[first + _SINKS], args[first + _KEY]
    if sinks is not None or key is not None or to_bias:
        calls = [
            op(*(x.select(d, b) if d is not None else x for x, d in zip(args, in_dims, strict=True)))
            for b in range(size)
        ]
        return tuple(torch.stack(parts) for parts in zip(*calls, strict=True)), (0,) * len(calls[0])
    N = args[first].shape[0] if in_dims[first] is None else args[first].movedim(in_dims[first], 0).shape[1]

    def merge(x: Any, d: int | None) -> Any:
        if not isinstance(x, Tensor):
            return x
        if d is None and x.shape[0] == 1 and N != 1:
            return x
        x = x.expand(size, *x.shape) if d is None else x.movedim(d, 0)
        if x.shape[1] == 1:
            x = x.expand(size, N, *x.shape[2:])
        return x.reshape(size * N, *x.shape[2:])

    results = op(*(merge(x, d) for x, d in zip(args, in_dims, strict=True)))
    out = tuple(x.unflatten(0, (size, N)) if x.dim() > 1 else x for x in results)
    return out, tuple(0 if x.dim() > 1 else None for x in results)
