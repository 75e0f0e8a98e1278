"""Devices that are not here: what they can do, and stand-ins to compile programs for.

The stand-ins are devices of compilers, in this process: a second CPU client with as
many devices as wanted (3 ms), or the topology of a TPU slice or a GPU cluster, which
the real compiler, of the extra `plan`, takes instead of hardware. Neither what JAX
computes on nor the environment is other afterwards. A strategy is put on them with
`on`, and compiles there as it does at home. So what is planned is the very program, and
models, losses and optimizers, often closures that no pickle takes, stay where they are.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import math
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax
from jax.experimental import topologies

from ..basics.hardware import HARDWARE, Hardware, hardware_of

MOST_FAKED: Final = 2048
"""XLA's CPU compiler takes more devices for those of several processes, and refuses."""


class Devices(NamedTuple):
    """Devices to compile for."""

    devices: tuple[Any, ...]
    name: str
    """For people: `"1024 x H100"`."""
    platform: str
    """`"cpu"`, `"gpu"` or `"tpu"`."""
    hardware: Hardware | None
    are_here: bool = False


def here(devices: Sequence[Any]) -> Devices:
    """Devices that programs run on."""
    first = devices[0]
    platform = "gpu" if first.platform in ("cuda", "rocm") else first.platform
    name = f"{len(devices)} x {first.device_kind}"
    return Devices(tuple(devices), name, platform, hardware_of(first), are_here=True)


@functools.lru_cache(maxsize=8)
def faked(count: int) -> Devices:
    """So many CPU devices, whatever this process was started with."""
    if not 1 <= count <= MOST_FAKED:
        raise ValueError(
            f"`devices`={count} must be 1 to {MOST_FAKED}, as many as XLA's CPU"
            " compiler takes in one process; plan for more with `topology`, such as"
            ' "v5p-8192".'
        )
    from jaxlib import xla_client

    client = xla_client.make_cpu_client(num_devices=count)
    return Devices(tuple(client.devices()), f"{count} x CPU, faked", "cpu", None)


@functools.lru_cache(maxsize=8)
def topology(name: str, count: int | None = None) -> Devices:
    """The devices of a GPU cluster or TPU slice, without any of them.

    Args:
        name: `"h100x1024"`: so many GPUs, in nodes of 8. `"v5p-2048"`, `"v5e-256"`: a
            TPU slice as Google names it (v5p counts cores, two per chip and device; the
            others chips). `"v5e:4x8"`: its shape in chips.
        count: so many devices instead.

    Raises:
        ValueError: for other names.
        ImportError: if the compiler is not installed, or does not start.
    """
    match = _NAME.fullmatch(name.lower().replace("v5litepod", "v5e"))
    if match is None:
        raise ValueError(
            f"`topology`={name!r} is not known: GPUs are written"
            f" {', '.join(f'{kind}xN' for kind in _GPUS)}, TPU slices v5e-N, v5p-N,"
            " v6e-N, or by their shape in chips, v5e:4x8."
        )
    gpu, gpus, tpu, number, lengths = match.groups()

    # GPUs, eight to a node.
    if gpu:
        count = count or int(gpus)
        per_node = math.gcd(count, 8) if count > 8 else count
        shape = f"1x{count // per_node}x{per_node}"
        target = _TARGET.format(
            *_GPUS[gpu], bandwidth=int(HARDWARE[gpu].memory_bandwidth)
        )
        devices = gpu_devices(name, target, shape)
        return Devices(devices, f"{count} x {gpu.upper()}", "gpu", HARDWARE[gpu])

    # TPUs, in a slice.
    shape = tuple(map(int, lengths.split("x"))) if lengths else ()
    if not lengths or count not in (None, math.prod(shape)):
        chips = count or int(number) // (2 if tpu == "v5p" else 1)
        shape = slice_shape(tpu, chips, name)
    devices = tpu_devices(name, tpu, shape)
    return Devices(devices, f"{len(devices)} x TPU {tpu}", "tpu", HARDWARE[tpu])


def slice_shape(kind: str, chips: int, name: str) -> tuple[int, ...]:
    """The shape of a TPU slice of so many chips: as near to a cube or square as can be.

    Those are the shapes that Google offers: 2x2x1, 2x2x2, 2x2x4, 2x4x4, 4x4x4, ...
    """
    dims = 3 if kind == "v5p" else 2
    power = chips.bit_length() - 1
    if not chips or chips != 1 << power:
        raise ValueError(
            f"`topology`={name!r} has {chips} chips; slices named by a number have a"
            f" power of 2. Name another by its shape: {kind}:"
            + ("2x2x3." if dims == 3 else "4x6.")
        )
    lengths = [1 << (power // dims + (i >= dims - power % dims)) for i in range(dims)]
    return tuple(sorted(lengths, reverse=dims == 3 and chips < 8))


# https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities for the
# limits of a capability; NVIDIA's architecture papers for cores, caches and clocks.
_HOPPER: Final = (9, 132, 128, 233472, 232448, 52428800, 1.98)
_GPUS: Final = {
    "a100": (8, 108, 64, 167936, 166912, 41943040, 1.41, 85094825984, "A100-SXM4-80GB"),
    "h100": (*_HOPPER, 84929347584, "H100 80GB HBM3"),
    "h200": (*_HOPPER, 150754820096, "H200"),
}
_TARGET: Final = """\
gpu_device_info {{
  cuda_compute_capability {{ major: {0} minor: 0 }}
  core_count: {1} fpus_per_core: {2}
  shared_memory_per_core: {3} shared_memory_per_block_optin: {4}
  l2_cache_size: {5} clock_rate_ghz: {6}
  device_memory_size: {7} memory_bandwidth: {bandwidth}
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" device_description_str: "NVIDIA {8}"
dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 12 minor: 9 }}
"""
"""XLA's GpuTargetConfigProto as text: what its compiler asks about a GPU."""

_NAME: Final = re.compile(
    rf"({'|'.join(_GPUS)})x([1-9]\d*)|(v5e|v5p|v6e)(?:-([1-9]\d*)|:(\d+(?:x\d+){{1,2}}))"
)


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
    # CUDA may be installed apart from Python, where XLA looks for it.
    ptxas = shutil.which("ptxas") or os.path.exists("/usr/local/cuda/bin/ptxas")
    if not ptxas:
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


def _line(error: Exception) -> str:
    """What an error says first, in one line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300].rstrip(".") + "."
