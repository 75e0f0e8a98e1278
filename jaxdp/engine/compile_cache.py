"""Compiled programs kept on disk, so that a script's second start is a quick one.

This is JAX's own persistent cache, switched on. Without it every process compiles anew:
the steps, and first the dozens of small programs that making a model takes.
"""

import hashlib
import os
import pathlib
import platform
import time
from typing import Any, Final

import jax

_MOST_BYTES: Final = 2**30
"""What is kept, about, checked once a day: the oldest entries go."""

_DAY: Final = 24 * 3600


def switch_on() -> None:
    """Unless JAX has a cache already, or is told to have none, or nothing can be kept.

    Switched off by JAX's own `JAX_ENABLE_COMPILATION_CACHE=false`.
    """
    config: Any = jax.config
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return
    try:
        path = folder()
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


def folder() -> pathlib.Path:
    """Where programs for this machine are kept, in the user's cache folder.

    Homes are shared by machines with different processors, and what is compiled for
    one may not run on another.
    """
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor(), platform.machine()]
    kinds = sorted({line for line in lines if line.startswith(("flags", "Features"))})
    features = hashlib.sha256("\n".join(kinds or lines[:2]).encode()).hexdigest()[:12]
    return pathlib.Path(home, "jaxdp", f"programs-{platform.machine()}-{features}")


def _sweep(path: pathlib.Path) -> None:
    """Deletes the oldest entries beyond what is kept; at most once a day."""
    stamp = path / "swept"
    if stamp.exists() and 0 <= time.time() - stamp.stat().st_mtime < _DAY:
        return
    stamp.touch()
    entries = [
        (found.stat(), found.path) for found in os.scandir(path) if found.is_file()
    ]
    left = sum(status.st_size for status, _ in entries)
    for status, name in sorted(entries, key=lambda entry: entry[0].st_mtime):
        if left <= _MOST_BYTES:
            return
        pathlib.Path(name).unlink(missing_ok=True)
        left -= status.st_size
