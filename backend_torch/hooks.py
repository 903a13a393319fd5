"""Whether somebody hooked into a module: then its work goes through `__call__`, and else straight."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn


def hooked(module: nn.Module) -> bool:
    """Whether a call must go through `__call__`: somebody hooked, compiled or replaced the module's forward."""
    if "forward" in module.__dict__ or module._compiled_call_impl is not None:
        return True
    return any((
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks,
        torch.nn.modules.module._has_any_global_hook(),
    ))  # fmt: skip


def direct(module: nn.Module) -> Callable[..., Tensor]:
    """The module's work without the checks of its arguments, which the caller has made."""
    return module if hooked(module) else cast("Callable[..., Tensor]", module.run)
