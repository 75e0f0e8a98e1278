"""Changes to the process that jaxdp runs in; docs/inside.md lists them for users.

None happens at import. The first `Trainer` enables the compilation cache, its first use
of a CPU keeps freed memory, and tracing a step pauses the garbage collector.
"""

import contextlib
import ctypes
import functools
import gc
import hashlib
import multiprocessing
import os
import pathlib
import platform
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import jax

from .console import log_debug

_MAX_CACHE_BYTES: Final = 2**30
"""The approximate limit of the cache, checked once a day: the oldest entries go."""

_DAY: Final = 24 * 3600


_SWITCH: Final = "JAXDP_KEEP_FREED_MEMORY"
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
        # Machines with other processors may share the home folder.
        path = _get_cache_home() / f"programs-{_describe_processor()}"
        # Only for the user: a program that writes into it can have code executed.
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep(path)
    except (OSError, RuntimeError):  # no home folder, or a read-only one
        return
    if os.access(path, os.W_OK):
        jax.config.update("jax_compilation_cache_dir", str(path))
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            # By default JAX keeps programs that took a second or more to compile.
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


@functools.cache
def keep_freed_memory() -> None:
    """Lets glibc keep the memory that steps free; logs that once.

    By default glibc returns large blocks to the kernel, which maps and clears the same
    pages again in every step: a third of the time of LeNet's. Numbers do not depend on
    it. The process keeps its largest size. Settings of the user and
    `JAXDP_KEEP_FREED_MEMORY=0` have priority.
    """
    users = "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"
    tuned = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if (
        os.environ.get(_SWITCH) == "0"
        or tuned
        or sys.platform != "linux"
        or any(name in os.environ for name in users)
    ):
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version") or not hasattr(libc, "mallopt"):
        return  # another allocator
    done = libc.mallopt(_M_MMAP_THRESHOLD, 2**30)
    done = libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1) and done
    if done:
        log_debug(
            "memory that steps free on the CPU is kept for the next step"
            f" ({_SWITCH}=0 switches this off)"
        )


@contextlib.contextmanager
def pause_gc() -> Iterator[None]:
    """Pauses the garbage collector while a step is traced.

    Tracing makes many objects that stay. Searching all of them for cycles again and
    again takes a fifth to a third of the time (300 layers: 1.5 s instead of 1.0).
    """
    if not gc.isenabled():  # the user or a trainer in another thread disabled it
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def is_imported_by_a_worker() -> bool:
    """Returns True in a spawned worker of a loader, which imports the script again."""
    return getattr(multiprocessing.current_process(), "_inheriting", False)


def refuse_to_train_in_a_worker() -> None:
    """Raises a RuntimeError if a worker of a loader only imports this script."""
    if is_imported_by_a_worker():
        raise RuntimeError(
            "a data loader worker runs the training script itself, because"
            " workers import it; put the training under `if __name__ =="
            ' "__main__":`.'
        )


def _get_cache_home() -> pathlib.Path:
    """Returns the cache folder of this user, which may not exist yet."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home, "jaxdp")


@functools.cache
def _describe_processor() -> str:
    """Returns an id of the processor: programs for one may not run on another."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor(), platform.machine()]
    kinds = sorted({line for line in lines if line.startswith(("flags", "Features"))})
    features = hashlib.sha256("\n".join(kinds or lines[:2]).encode()).hexdigest()[:12]
    return f"{platform.machine()}-{features}"


def _sweep(path: pathlib.Path) -> None:
    """Deletes the oldest entries beyond the limit; at most once a day."""
    stamp = path / "swept"
    if stamp.exists() and 0 <= time.time() - stamp.stat().st_mtime < _DAY:
        return
    stamp.touch()
    entries = [
        (cached.stat(), cached.path) for cached in os.scandir(path) if cached.is_file()
    ]
    size = sum(status.st_size for status, _ in entries)
    for status, name in sorted(entries, key=lambda entry: entry[0].st_mtime):
        if size <= _MAX_CACHE_BYTES:
            return
        pathlib.Path(name).unlink(missing_ok=True)
        size -= status.st_size
