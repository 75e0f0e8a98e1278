"""Changes to the process that jaxdp runs in; docs/inside.md lists them for users.

None happens at import. The first `Trainer` enables the compilation cache. The first one
on a CPU lets glibc keep freed memory. Tracing a step pauses the garbage collector.
"""

import contextlib
import ctypes
import functools
import gc
import multiprocessing
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import jax

_MAX_CACHE_SECONDS: Final = 30 * 24 * 3600
"""The age at which programs in the cache are deleted."""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


def enable_compilation_cache() -> None:
    """Switches JAX's persistent cache on, so that a script's second start is quick.

    Does nothing if JAX has a cache already, if `JAX_ENABLE_COMPILATION_CACHE=false`, or
    if the folder can't be written.
    """
    config: Any = jax.config
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return
    try:
        home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        # Machines with other processors may share it: JAX's keys name the processor.
        path = pathlib.Path(home, "jaxdp", "programs")
        # Only for the user: a program that writes into it can have code executed.
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        sweep_cache(path)
    except (OSError, RuntimeError):  # no home folder, or a read-only one
        return
    if os.access(path, os.W_OK):
        jax.config.update("jax_compilation_cache_dir", str(path))
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            # By default JAX keeps programs that took a second or more to compile.
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def sweep_cache(path: pathlib.Path) -> None:
    """Deletes the programs that were compiled more than 30 days ago."""
    for entry in path.iterdir():
        with contextlib.suppress(OSError):  # another process has deleted it
            if time.time() - entry.stat().st_mtime > _MAX_CACHE_SECONDS:
                entry.unlink()


@functools.cache
def keep_freed_memory() -> None:
    """Lets glibc keep the memory that steps free.

    By default glibc returns large blocks to the kernel, which maps and clears the same
    pages again in every step: a third of the time of LeNet's. Numbers do not depend on
    it. The process keeps its largest size. Settings of the user and
    `JAXDP_KEEP_FREED_MEMORY=0` have priority.
    """
    users = "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"
    if (
        os.environ.get("JAXDP_KEEP_FREED_MEMORY") == "0"
        or sys.platform != "linux"
        or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
        or any(name in os.environ for name in users)
    ):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):  # else another allocator
        libc.mallopt(_M_MMAP_THRESHOLD, 2**30)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


@contextlib.contextmanager
def pause_gc() -> Iterator[None]:
    """Pauses the garbage collector while a step is traced.

    Tracing makes many objects that stay. Searching all of them for cycles again and
    again takes a fifth to a third of the time (300 layers: 1.5 s instead of 1.0).
    """
    was_enabled = gc.isenabled()  # not if the user or another thread disabled it
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def is_imported_by_a_worker() -> bool:
    """Returns True if a spawned worker of a loader is importing the script."""
    return getattr(multiprocessing.current_process(), "_inheriting", False)


def refuse_to_train_in_a_worker() -> None:
    """Raises a RuntimeError if a worker of a loader is importing this script."""
    if is_imported_by_a_worker():
        raise RuntimeError(
            "a data loader worker runs the training script itself, because workers"
            ' import it; put the training under `if __name__ == "__main__":`.'
        )
