"""Versions and hardware of this process, and packages that not everybody has."""

import functools
import importlib
import importlib.metadata
import os
import platform
import warnings
from typing import Any, Final

import jax

PACKAGES: Final = (
    "jaxdp",
    "jax",
    "jaxlib",
    "equinox",
    "optax",
    "numpy",
    "torch",
    "orbax-checkpoint",
)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the numbers of a run."""
    return dict(_found())


@functools.cache  # of files, which take milliseconds to read
def _found() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def hardware() -> dict[str, Any]:
    """The devices that JAX sees, and the machine that they are in."""
    devices = jax.devices()
    return {
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "num_devices": len(devices),
        "num_processes": jax.process_count(),
        "cpus": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def import_extra(module: str, who: str, extra: str) -> Any:
    """A module that `who` needs, of a package that an extra of this one installs."""
    try:
        with warnings.catch_warnings():
            # Of their own dependencies; nobody here can do anything about it.
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{who} needs {module.partition('.')[0]}, which is not installed; run"
            f' `pip install "jaxdp[{extra}]"`.'
        ) from error
