"""The CPU's memory between steps: what a step frees is kept for the next one."""

import ctypes
import functools
import os
import sys
from typing import Final

from .console import say

_SWITCH: Final = "JAXDP_KEEP_FREED_MEMORY"
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


@functools.cache
def keep_freed_memory() -> bool:
    """Has glibc keep the memory of a step's temporaries; says so, once.

    By default glibc gives large blocks back to the kernel, which then has to map and
    clear the same pages again at every step: a third of the time of LeNet's. Numbers do
    not depend on it; the process stays as large as it was at its largest.

    Returns:
        Whether it was done: not with another allocator, where the user has made
        settings for glibc's, or with `JAXDP_KEEP_FREED_MEMORY=0`.
    """
    users = "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"
    tuned = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if (
        os.environ.get(_SWITCH) == "0"
        or tuned
        or sys.platform != "linux"
        or any(name in os.environ for name in users)
    ):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version") or not hasattr(libc, "mallopt"):
        return False
    done = libc.mallopt(_M_MMAP_THRESHOLD, 2**30)
    done = libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1) and done
    if done:
        say(
            "memory that steps free on the CPU is kept for the next step"
            f" ({_SWITCH}=0 switches this off)"
        )
    return bool(done)
