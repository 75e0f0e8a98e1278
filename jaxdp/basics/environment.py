"""Versions and hardware of this process."""

import contextlib
import functools
import importlib.metadata
import os
import platform
from typing import Any, Final

import jax

from .console import warn

DISTRIBUTION: Final = "jaxdp-trainer"

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


@functools.cache  # reading the files takes milliseconds
def get_versions() -> dict[str, str]:
    """Returns the versions of Python and of packages that decide a run's numbers."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            distribution = DISTRIBUTION if name == "jaxdp" else name
            versions[name] = importlib.metadata.version(distribution)
    return versions


def describe_hardware() -> dict[str, Any]:
    """Describes the devices that JAX sees, and the machine that they are in."""
    devices = jax.devices()
    return {
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "num_devices": len(devices),
        "num_processes": jax.process_count(),
        "cpus": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def warn_of_other_jaxdp() -> None:
    """Warns if the package index's `jaxdp`, which is another library, is installed.

    Both are imported as `jaxdp`, so their files would lie in one folder.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        other = importlib.metadata.metadata("jaxdp")
        if other["Author"] == "The jaxdp authors":  # this one, under its former name
            return
        warn(
            f"the distribution `jaxdp` {other['Version']} is installed beside this"
            f" library, which is named {DISTRIBUTION!r} and imported as `jaxdp`, too."
            " Run `pip uninstall jaxdp`, and then install this one again"
        )
