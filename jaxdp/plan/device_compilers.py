"""The compilers of GPUs and TPUs, without any such device: what the extra `plan` has.

Neither what JAX computes on nor the environment is other afterwards.
"""

import contextlib
import importlib
import importlib.metadata
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.experimental import topologies


def gpu_devices(name: str, target: str, shape: str) -> tuple[Any, ...]:
    """GPUs to compile for.

    Args:
        name: of the topology, for messages.
        target: of which kind, as XLA's GpuTargetConfigProto in text.
        shape: how many slices, hosts of each and GPUs of each, `"1x128x8"`.

    Raises:
        ImportError: if the compiler is not installed or does not start.
    """
    cuda = _cuda()
    packages = [f"jax-cuda{cuda}-plugin", f"jax-cuda{cuda}-pjrt"]
    if not _has_ptxas():
        packages.append("nvidia-cuda-nvcc" + ("-cu12" if cuda == "12" else ""))
    _check_there(name, "GPU", packages)

    jax.devices()  # JAX chooses what it computes on without this compiler
    options = {"platform": "cuda", "target_config": target, "topology": shape}
    try:
        try:
            topology = topologies.get_topology_desc(**options)
        except NotImplementedError:
            # JAX's plugin looks for CUDA's libraries when JAX starts, and does not
            # register without them, though to compile takes none.
            plugin = importlib.import_module(f"jax_plugins.xla_cuda{cuda}")
            with _environment(JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1"):
                plugin.initialize()
            topology = topologies.get_topology_desc(**options)
    except Exception as error:
        raise _unusable(name, "GPU", packages[:2], error) from error
    return tuple(topology.devices)


def tpu_devices(name: str, kind: str, shape: Sequence[int]) -> tuple[Any, ...]:
    """TPU chips to compile for.

    Args:
        name: of the topology, for messages.
        kind: `"v5e"`.
        shape: of the slice, in chips.

    Raises:
        ImportError: if the compiler is not installed or does not start.
        ValueError: if it knows no such slice.
    """
    _check_there(name, "TPU", ["libtpu"])
    from jaxlib import xla_client

    jax.devices()  # as for GPUs
    written = "x".join(map(str, shape))
    # A host has 2x2 chips, if the slice has as many.
    is_small = math.prod(shape) < 4
    host = {"chips_per_host_bounds": (*shape, 1)[:3]} if is_small else {}
    try:
        # Read while the library starts. It would look for TPUs, ask Google's metadata
        # server, which answers on Google's machines only, write files of its log, and
        # lock out the library in other processes.
        with _environment(
            TPU_SKIP_MDS_QUERY="1",
            TPU_WORKER_HOSTNAMES="localhost",
            TPU_ACCELERATOR_TYPE="v5litepod-8",
            TPU_MIN_LOG_LEVEL="3",
            ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        ):
            topology = topologies.get_topology_desc(
                f"{kind}:{written}", platform="tpu", **host
            )
    except Exception as error:
        if xla_client.pjrt_plugin_initialized("tpu"):
            raise ValueError(
                f"`topology`={name!r}: the TPU compiler knows no {kind} slice of shape"
                f" {written}: {_line(error)}"
            ) from error
        raise _unusable(name, "TPU", ["libtpu"], error) from error
    return tuple(topology.devices)


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Sets variables that the user has not set, for as long."""
    ours = {key: text for key, text in variables.items() if key not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for key in ours:
            os.environ.pop(key, None)


def _check_there(name: str, what: str, packages: list[str]) -> None:
    missing = [package for package in packages if _version(package) is None]
    if missing:
        raise _unusable(name, what, missing)


def _unusable(
    name: str, what: str, packages: list[str], error: Exception | None = None
) -> ImportError:
    """The error of a compiler whose packages are missing, or that does not start."""
    why = f"is not installed whole; missing: {', '.join(packages)}."
    if error is not None:
        there = [f"{package} {_version(package)}" for package in (*packages, "jaxlib")]
        why = f"is installed ({', '.join(there)}) and does not start: {_line(error)}"
    is_in_extra = what == "TPU" or _cuda() == "12"
    install = "'jaxdp[plan]'" if is_in_extra else " ".join(packages)
    return ImportError(
        f"`topology`={name!r} needs the {what} compiler, which {why} No such device is"
        f" needed. Run pip install {install} --upgrade."
    )


def _cuda() -> str:
    """The CUDA version of JAX's plugin: the newest installed, which JAX takes."""
    return "13" if _version("jax-cuda13-plugin") else "12"


def _version(package: str) -> str | None:
    """Its version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_ptxas() -> bool:
    """Whether CUDA is installed apart from Python, where XLA looks for it."""
    return bool(shutil.which("ptxas")) or os.path.exists("/usr/local/cuda/bin/ptxas")


def _line(error: Exception) -> str:
    """What an error says first, in one line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300].rstrip(".") + "."
