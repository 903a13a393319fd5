"""Memory that a pass gives back is there for the next one."""

from __future__ import annotations

from functools import cache

import numpy as np

# Of bytes: glibc learns from sizes below 32 MiB only.
LARGEST = 31 << 20


@cache
def keep_freed_memory() -> None:
    """Make and free one large array, which is never touched: C's library then keeps what is freed. Once is enough.

    glibc gives a freed array of 128 KiB or more back to the system, to ask for the next one page by page, until it
    has seen one as large being freed (mallopt(3), M_MMAP_THRESHOLD). Page faults are a third of a small model's pass.
    Another library's rules are its own; there this does nothing.
    """
    np.empty(LARGEST, dtype=np.uint8)
