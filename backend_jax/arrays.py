"""Into JAX, out of JAX, and what can be read on the host."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from core_numpy.contract.checks.common import refuse_foreign, require_x64
from core_numpy.contract.checks.model import no_device


def from_numpy(x: Any, *, dtype: str | None = None, device: Any = None) -> jax.Array:
    """A JAX array with a copy of x's values; bfloat16 arrays (ml_dtypes) keep their bits.

    x: anything NumPy takes. dtype: a name such as "float32", or None for x's own. device: None for JAX's default.
    64-bit floats are refused while x64 is off, instead of becoming float32.
    """
    array = np.array(x)  # a copy: JAX may use the memory of an aligned NumPy array as it is
    wanted = jnp.dtype(array.dtype if dtype is None else dtype)
    require_x64("dtype" if dtype is not None else "x", wanted.name, jax.config.jax_enable_x64)  # type: ignore[attr-defined]
    return jax.device_put(array.astype(wanted), find_device(device))


def find_device(device: Any) -> Any:
    """A device or sharding of JAX's own, or of a name such as "cpu" or "gpu:1"; None is JAX's default."""
    if device is None or isinstance(device, jax.Device | jax.sharding.Sharding):
        return device
    if not isinstance(device, str):
        raise TypeError(f"device must be None, a name such as 'cpu' or a jax.Device; got {device!r}")
    platform, _, index = device.partition(":")
    try:
        if not platform or not (index or "0").isdecimal():
            raise ValueError("expected NAME or NAME:NUMBER")
        return jax.devices(platform)[int(index or 0)]
    except (RuntimeError, ValueError, IndexError) as error:  # no such platform, no number, no such number
        raise no_device("JAX", device, error) from error


def place_of(x: jax.Array) -> Any:
    """Where x was put, for `from_numpy`; None where JAX chose, so that a jitted function is not compiled again."""
    return x.sharding if x.committed else None


def to_numpy(x: jax.Array) -> np.ndarray:
    """The values as a NumPy array on the host, waited for; bfloat16 becomes ml_dtypes.bfloat16, bit for bit."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        # Spread over processes, all of which ask for it.
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.array(x)


def wait(x: Any) -> Any:
    """Return x once the device that holds it has finished; a clock may be read after it. x: any pytree."""
    return jax.block_until_ready(x)


def describe() -> dict[str, Any]:
    """Framework, version, device and threads, as a report prints them."""
    device = jax.devices()[0]
    return {
        "framework": "jax",
        "version": jax.__version__,
        "device": device.device_kind,
        # XLA has no public count of its threads: on a CPU it takes one for each core this process may use.
        "threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    }


def require_arrays(**arrays: Any) -> None:
    """Refuse arrays of another framework by the argument's name; JAX takes its own and NumPy's."""
    for name, x in arrays.items():
        if x is not None and not isinstance(x, jax.Array | np.ndarray) and not hasattr(x, "__jax_array__"):
            refuse_foreign(name, x, "an array of JAX or NumPy")


def values(x: Any) -> np.ndarray | None:
    """x on the host for a check, or None where there is nothing to read yet or reading would wait for a device.

    None for tracers (under jit, grad, vmap and their like), for arrays on an accelerator and for arrays of which
    this process holds only a part.
    """
    if isinstance(x, np.ndarray | np.generic):
        return np.asarray(x)
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array):
        return None
    if not x.is_fully_addressable or any(device.platform != "cpu" for device in x.devices()):
        return None
    return np.asarray(x)
