"""All that jaxdp changes in the process it runs in; docs/inside.md lists it for users.

Nothing of it happens at import. The first `Trainer` keeps programs, its first use of a
CPU keeps memory, and while it traces a step, no garbage is collected.
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
"""What is kept, about, checked once a day: the oldest entries go."""

_DAY: Final = 24 * 3600


_SWITCH: Final = "JAXDP_KEEP_FREED_MEMORY"
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


def enable_compilation_cache() -> None:
    """Keeps compiled programs on disk, so that a script's second start is a quick one.

    This is JAX's own persistent cache, switched on: unless JAX has one already, or is
    told to have none by `JAX_ENABLE_COMPILATION_CACHE=false`, or nothing can be kept.
    """
    config: Any = jax.config
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return
    try:
        path = (
            _get_cache_home() / f"programs-{_describe_processor()}"
        )  # homes are shared by machines
        # Who can write into it can have code run: it is the user's alone.
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep(path)
    except (OSError, RuntimeError):  # no home, or one that is not to be written to
        return
    if os.access(path, os.W_OK):
        jax.config.update("jax_compilation_cache_dir", str(path))
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            # A small step compiles in less than the second from which JAX would keep.
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


@functools.cache
def keep_freed_memory() -> None:
    """Has glibc keep the memory of a step's temporaries; says so, once.

    By default glibc gives large blocks back to the kernel, which then has to map and
    clear the same pages again at every step: a third of the time of LeNet's. Numbers do
    not depend on it; the process stays as large as it was at its largest. Settings of
    the user's, and `JAXDP_KEEP_FREED_MEMORY=0`, come first.
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
    """Around what makes many objects that stay, as the tracing of a step does.

    Python would look through all of them for cycles again and again, which takes a
    fifth of the time that a large step is traced.
    """
    if not gc.isenabled():  # by the user, or by a trainer in another thread
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def is_imported_by_a_worker() -> bool:
    """Whether a worker of a loader imports the script again, as spawned ones do."""
    return getattr(multiprocessing.current_process(), "_inheriting", False)


def refuse_to_train_in_a_worker() -> None:
    """Raises a RuntimeError if this process only imports a script that trains."""
    if is_imported_by_a_worker():
        raise RuntimeError(
            "a data loader worker runs the training script itself, because"
            " workers import it; put the training under `if __name__ =="
            ' "__main__":`.'
        )


def _get_cache_home() -> pathlib.Path:
    """The folder for what jaxdp keeps for this user, which may not be there yet."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home, "jaxdp")


@functools.cache
def _describe_processor() -> str:
    """What processor this is: programs for one may not run on another."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor(), platform.machine()]
    kinds = sorted({line for line in lines if line.startswith(("flags", "Features"))})
    features = hashlib.sha256("\n".join(kinds or lines[:2]).encode()).hexdigest()[:12]
    return f"{platform.machine()}-{features}"


def _sweep(path: pathlib.Path) -> None:
    """Deletes the oldest entries beyond what is kept; at most once a day."""
    stamp = path / "swept"
    if stamp.exists() and 0 <= time.time() - stamp.stat().st_mtime < _DAY:
        return
    stamp.touch()
    entries = [
        (cached.stat(), cached.path) for cached in os.scandir(path) if cached.is_file()
    ]
    left = sum(status.st_size for status, _ in entries)
    for status, name in sorted(entries, key=lambda entry: entry[0].st_mtime):
        if left <= _MAX_CACHE_BYTES:
            return
        pathlib.Path(name).unlink(missing_ok=True)
        left -= status.st_size
