"""The compilers of GPUs and TPUs, without any such device: what the extra `plan` has.

Neither what JAX computes on nor the environment is other afterwards.
"""

import contextlib
import importlib
import importlib.metadata
import math
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import jax


def installed() -> dict[str, str]:
    """The compilers that are, by their devices: `{"GPU": "jax-cuda12-plugin 0.10.2"}`.

    Whether or not all is there that they need.
    """
    found = {"GPU": f"jax-cuda{_cuda()}-plugin", "TPU": "libtpu"}
    return {
        what: f"{package} {_version(package)}"
        for what, package in found.items()
        if _version(package)
    }


def gpu_devices(name: str, target: str, shape: str) -> tuple[Any, ...]:
    """GPUs to compile for.

    Args:
        name: of the topology, for messages.
        target: of which kind, as XLA's GpuTargetConfigProto in text.
        shape: how many slices, hosts of each and GPUs of each, `"1x128x8"`.

    Raises:
        ImportError: if the compiler is not installed, is not of JAX's version or does
            not start.
    """
    cuda = _cuda()
    nvcc = "nvidia-cuda-nvcc" + ("" if cuda == "13" else "-cu12")
    packages = [f"jax-cuda{cuda}-plugin", f"jax-cuda{cuda}-pjrt"]
    needed = packages if _has_ptxas() else [*packages, nvcc]
    _check_there(name, "GPU", needed)
    jaxlib = importlib.metadata.version("jaxlib")
    others = [each for each in packages if not _is_same(_version(each), jaxlib)]
    if others:
        raise ImportError(
            f"`topology`={name!r}: JAX's GPU compiler must be of jaxlib's version,"
            f" {jaxlib}, and there is "
            + " and ".join(f"{each} {_version(each)}" for each in others)
            + ". Install that: pip install "
            + " ".join(f"{each}=={jaxlib}" for each in packages)
            + "."
        )
    _settle()
    from jax.experimental import topologies

    options = {"platform": "cuda", "target_config": target, "topology": shape}
    try:
        try:
            found = topologies.get_topology_desc(**options)
        except NotImplementedError:
            _register(cuda)
            found = topologies.get_topology_desc(**options)
    except Exception as error:
        raise ImportError(
            f"`topology`={name!r}: the GPU compiler is installed ({packages[0]}"
            f" {_version(packages[0])}) and does not start: {_line(error)}"
        ) from error
    return tuple(found.devices)


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
    _settle()
    from jax.experimental import topologies
    from jaxlib import xla_client

    written = "x".join(map(str, shape))
    # A host has 2x2 chips, if the slice has as many.
    chips = math.prod(shape)
    host = {"chips_per_host_bounds": (*shape, 1)[:3]} if chips < 4 else {}
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
            found = topologies.get_topology_desc(
                f"{kind}:{written}", platform="tpu", **host
            )
    except Exception as error:
        if xla_client.pjrt_plugin_initialized("tpu"):
            raise ValueError(
                f"`topology`={name!r}: the TPU compiler knows no {kind} slice of shape"
                f" {written}: {_line(error)}"
            ) from error
        there, wanted = _version("libtpu"), libtpu_wanted()
        made_for = f"; this JAX is made for libtpu {wanted}" if wanted else ""
        raise ImportError(
            f"`topology`={name!r}: the TPU compiler is installed (libtpu {there}"
            f"{made_for}) and does not start: {_line(error)}"
        ) from error
    return tuple(found.devices)


def libtpu_wanted() -> str:
    """The versions of libtpu that this JAX is made for, `"0.0.42.*"`, if it says so."""
    for requirement in importlib.metadata.requires("jax") or ():
        if found := re.match(r"libtpu *==([\w.*]+)", requirement):
            return found[1]
    return ""


def _register(cuda: str) -> None:
    """Makes the GPU compiler known to JAX where there is no driver.

    JAX's plugin looks for CUDA's libraries when JAX starts, and does not register
    without them, though to compile takes none.
    """
    plugin = importlib.import_module(f"jax_plugins.xla_cuda{cuda}")
    with _environment(JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1"):
        plugin.initialize()


def _settle() -> None:
    """Has JAX choose what it computes on, as it would without a compiler from here."""
    jax.devices()


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
        # The extra has the compiler of CUDA 12.
        is_other = what == "GPU" and _cuda() != "12"
        remedy = " ".join(missing) if is_other else "'jaxdp[plan]'"
        raise ImportError(
            f"`topology`={name!r} needs the {what} compiler, and"
            f" {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not"
            f" installed; no such device is needed. Install it: pip install {remedy}."
        )


def _cuda() -> str:
    """Of which CUDA JAX's plugin is: the newest that is installed, which JAX takes."""
    return "13" if _version("jax-cuda13-plugin") else "12"


def _version(package: str) -> str | None:
    """Its version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_ptxas() -> bool:
    """Whether CUDA is installed apart from Python, where XLA looks for it."""
    return (
        shutil.which("ptxas") is not None
        or os.path.exists("/usr/local/cuda/bin/ptxas")
        or "xla_gpu_cuda_data_dir" in os.environ.get("XLA_FLAGS", "")
    )


def _is_same(version: str | None, other: str) -> bool:
    """Whether JAX takes two versions for the same: by their numbers."""
    numbers = [re.match(r"[\d.]*", each or "") for each in (version, other)]
    return len({found and found[0].rstrip(".") for found in numbers}) == 1


def _line(error: Exception) -> str:
    """What an error says first, in one line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300].rstrip(".") + "."
