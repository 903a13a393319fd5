"""Memory that a pass gives back is there for the next one."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

# The numbers of mallopt(3), and the largest values that glibc takes: arrays up to 32 MiB come out of the heap, and of
# what is free at its end up to 2 GiB stay.
M_TRIM_THRESHOLD, MOST_FREE = -1, 2**31 - 1
M_MMAP_THRESHOLD, LARGEST = -3, 32 << 20


@cache
def keep_freed_memory() -> None:
    """Ask C's library, once, to keep what is freed.

    By itself glibc gives an array of 128 KiB or more, or what is free at the end of the heap, back to the system, to
    ask for it again page by page in the next pass: a third of a pass's time. Another library's rules are its own.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST)
        mallopt(M_TRIM_THRESHOLD, MOST_FREE)
