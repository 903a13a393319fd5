"""Into torch, out of torch, and what can be read on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from core_numpy.contract.checks.common import refuse_foreign
from core_numpy.contract.checks.model import no_device
from core_numpy.contract.tensor_file import numpy_dtype

from .visibility import traced


def from_numpy(x: Any, *, dtype: str | None = None, device: Any = None) -> torch.Tensor:
    """A tensor with a copy of x's values; bfloat16 arrays (ml_dtypes) keep their bits.

    x: anything NumPy takes. dtype: a name such as "float32", or None for x's own. device: None for the CPU.
    """
    array = np.asarray(x)
    if array.dtype.name == "bfloat16":
        tensor = torch.from_numpy(np.array(array).view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(np.array(array))  # a copy: the tensor never shares the caller's memory
    place = None if device is None else find_device(device)
    return tensor.to(device=place, dtype=None if dtype is None else getattr(torch, dtype))


def find_device(device: Any) -> torch.device:
    """A device of torch's own, or of a name such as "cpu" or "cuda:1"; None is torch's current default."""
    if device is None:
        return torch.get_default_device()
    if not isinstance(device, str | int | torch.device) or isinstance(device, bool):
        raise TypeError(f"device must be None, a name such as 'cpu' or a torch.device; got {device!r}")
    try:
        found = torch.device(device)
        if found.type not in ("cpu", "meta"):
            torch.empty(0, device=found)  # nothing else asks whether it is there
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch raises each of them
        raise no_device("torch", device, error) from error
    return found


def borrow(x: np.ndarray) -> torch.Tensor:
    """A tensor on x's own memory, to be read at once; a copy only where torch cannot address it."""
    if not x.flags.aligned:
        x = np.array(x)
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def to_numpy(x: torch.Tensor) -> np.ndarray:
    """The values as a NumPy array on the host; bfloat16 becomes ml_dtypes.bfloat16, bit for bit."""
    x = x.detach()
    if hasattr(x, "full_tensor"):  # spread over processes, all of which ask for it
        x = x.full_tensor()
    host = x.cpu().resolve_conj().resolve_neg()
    if host.dtype == torch.bfloat16:
        return host.contiguous().view(torch.int16).numpy().view(numpy_dtype("bfloat16")).copy()
    # torch turns a transposed matrix in blocks, NumPy element by element.
    return host.numpy().copy() if host.is_contiguous() else host.contiguous().numpy()


def wait(x: Any) -> Any:
    """Return x once the device that holds it has finished; a clock may be read after it.

    x: a tensor, or lists, tuples and dicts of them.
    """
    if isinstance(x, torch.Tensor):
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        elif x.device.type == "mps":
            torch.mps.synchronize()
    elif isinstance(x, dict):
        wait(list(x.values()))
    elif isinstance(x, list | tuple):
        for item in x:
            wait(item)
    return x


def describe() -> dict[str, Any]:
    """Framework, version, device and threads, as a report prints them."""
    cuda = torch.cuda.is_available()
    return {
        "framework": "torch",
        "version": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "threads": torch.get_num_threads(),
    }


def require_tensors(**arrays: Any) -> None:
    """Refuse arrays of another framework by the argument's name: checks of shapes and dtypes would let them by."""
    for name, x in arrays.items():
        if x is not None and not isinstance(x, torch.Tensor):
            refuse_foreign(name, x, "a tensor of torch")


def values(x: torch.Tensor) -> np.ndarray | None:
    """x on the host for a check, or None where there is nothing to read yet or reading would wait for a device.

    None for meta and fake tensors, tensors under torch.func transforms, tensors on an accelerator, and while
    torch.compile or torch.export traces.
    """
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.device.type != "cpu" or traced():
        return None
    x = x.detach()
    if not x.dtype.is_floating_point:
        return x.numpy()
    # `numpy()` would pin the memory of a parameter, which `fully_shard` gives back between uses, and no tensor tells
    # that it is a view of one: those that a backward pass is handed do not.
    return np.from_dlpack(x.float() if x.dtype == torch.bfloat16 else x)
