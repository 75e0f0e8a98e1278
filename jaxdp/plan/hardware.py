"""Devices that are not here: what they can do, and stand-ins to compile programs for.

The stand-ins are devices of compilers, in this process: a second CPU client with as
many devices as wanted (3 ms), or the topology of a TPU slice or a GPU cluster, which
the real compiler takes instead of hardware. A strategy is put on them with `on`, and
compiles there as it does at home. So what is planned is the very program, and models,
losses and optimizers, often closures that no pickle takes, stay where they are.
"""

import functools
import math
import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ..basics.hardware import HARDWARE, Hardware, hardware_of
from .device_compilers import gpu_devices, tpu_devices

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
