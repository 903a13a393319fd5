"""What malloc does with the memory that a training step on a CPU frees and the next one takes again."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from functools import cache

# malloc.h of glibc.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
# What a user says of them, which stays as it is.
VARIABLES = (
    "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES",
)  # fmt: skip
MOST = 1 << 30

log = logging.getLogger(__name__)


def return_freed_memory() -> None:
    """Have glibc's malloc give all that is free back to the system; elsewhere nothing. Source: malloc_trim(3)."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


@cache
def keep_freed_memory() -> bool:
    """Let glibc's malloc keep up to 1 GiB of freed memory for the next step; whether it does. Once in a process.

    By itself it gives large arrays back to the system as soon as they are freed, and a step then waits for thousands
    of page faults: up to a tenth of its time. Where a variable of `VARIABLES` is set, or malloc is another's, nothing
    is changed. Source: mallopt(3).
    """
    if not _free_to_say():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    kept = all([mallopt(_M_TRIM_THRESHOLD, MOST), mallopt(_M_MMAP_THRESHOLD, MOST)])
    log.info("glibc's malloc keeps freed memory from one step to the next: %s", kept)
    return kept


def share_one_arena() -> bool:
    """Let all threads that come take memory from one arena of glibc's malloc; whether they will.

    Only the first arena keeps more than 64 MiB, and XLA takes memory in threads of its own: a step of 20 million
    numbers waits for 100,000 page faults without it, an eighth of its time on two cores. For programs of our own, at
    their start: threads that are there keep their arenas, and it is not a library's to say. Source: mallopt(3).
    """
    return _free_to_say() and bool(ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1))


def _free_to_say() -> bool:
    return platform.libc_ver()[0] == "glibc" and not any(name in os.environ for name in VARIABLES)
