"""What malloc does with the memory that a training step on a CPU frees and the next one takes again."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from functools import cache

# malloc.h of glibc.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# What a user says of them, which stays as it is.
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
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
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in VARIABLES):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    kept = all([mallopt(_M_TRIM_THRESHOLD, MOST), mallopt(_M_MMAP_THRESHOLD, MOST)])
    log.info("glibc's malloc keeps freed memory from one step to the next: %s", kept)
    return kept
