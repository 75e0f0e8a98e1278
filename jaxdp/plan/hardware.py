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
from typing import Any, Final, NamedTuple

from .device_compilers import gpu_devices, tpu_devices

MOST_FAKED: Final = 2048
"""XLA's CPU compiler takes more devices for those of several processes, and refuses."""


class Hardware(NamedTuple):
    """What one device can do at best, as its maker says."""

    name: str
    flops: float
    """Dense bfloat16 matrix operations per second."""
    flops_float32: float
    """The same on float32 arrays in JAX's default precision: TF32 on GPUs, bfloat16
    on TPUs."""
    memory: int
    """Bytes."""
    memory_bandwidth: float
    """Bytes per second."""
    link_bandwidth: float
    """Bytes per second that a device can send to those of its own domain."""
    domain: int | None
    """How many devices such links join; None for as many as there are."""
    far_bandwidth: float
    """Bytes per second that a device can send beyond its domain."""


# Peaks without sparsity; NVLink in one direction. Node to node: the adapters of DGX
# systems, 200 Gbit/s per A100, 400 Gbit/s per H100.
# https://www.nvidia.com/en-us/data-center/a100/
# https://www.nvidia.com/en-us/data-center/h100/ and .../h200/
# https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html
# TPU: per chip, and one JAX device each; all links of a chip together.
# https://cloud.google.com/tpu/docs/v4, .../v5e, .../v5p, .../v6e
HARDWARE: Final = {
    each.name: each
    for each in (
        Hardware("a100", 312e12, 156e12, 80 * 10**9, 2.039e12, 300e9, 8, 25e9),
        Hardware("h100", 989e12, 494e12, 80 * 10**9, 3.35e12, 450e9, 8, 50e9),
        Hardware("h200", 989e12, 494e12, 141 * 10**9, 4.8e12, 450e9, 8, 50e9),
        Hardware("v4", 275e12, 275e12, 32 * 2**30, 1.228e12, 300e9, None, 300e9),
        Hardware("v5e", 197e12, 197e12, 16 * 10**9, 0.819e12, 200e9, None, 200e9),
        Hardware("v5p", 459e12, 459e12, 95 * 10**9, 2.765e12, 600e9, None, 600e9),
        Hardware("v6e", 918e12, 918e12, 32 * 10**9, 1.64e12, 448e9, None, 448e9),
    )
}

_KINDS: Final = (
    ("a100", "a100"),
    ("h100", "h100"),
    ("h200", "h200"),
    ("tpu v4", "v4"),
    ("tpu v5 lite", "v5e"),
    ("tpu v5e", "v5e"),
    ("tpu v5p", "v5p"),
    ("tpu v5", "v5p"),
    ("tpu v6", "v6e"),
)
"""Parts of `device.device_kind`, in lower case."""


class StandIns(NamedTuple):
    """Devices to compile for."""

    devices: tuple[Any, ...]
    name: str
    """For people: `"1024 x h100"`."""
    platform: str
    hardware: Hardware | None


def find_hardware(hardware: str | Hardware) -> Hardware:
    """A profile by name, or the one that was given."""
    if isinstance(hardware, Hardware):
        return hardware
    if hardware not in HARDWARE:
        raise ValueError(
            f"`hardware` must be one of {', '.join(map(repr, HARDWARE))}, or a"
            f" jaxdp.plan.hardware.Hardware(...) of your own; got {hardware!r}."
        )
    return HARDWARE[hardware]


def hardware_of(device: Any) -> Hardware | None:
    """The profile of a device that is here, if it is a known one."""
    kind = device.device_kind.lower()
    for part, name in _KINDS:
        if part in kind:
            return HARDWARE[name]
    return None


@functools.lru_cache(maxsize=8)
def faked(count: int) -> StandIns:
    """So many CPU devices, whatever this process was started with."""
    if not 1 <= count <= MOST_FAKED:
        raise ValueError(
            f"`devices`={count} must be 1 to {MOST_FAKED}, as many as XLA's CPU"
            " compiler takes in one process; plan for more with `topology`, such as"
            ' "v5p-8192".'
        )
    from jaxlib import xla_client

    client = xla_client.make_cpu_client(num_devices=count)
    return StandIns(tuple(client.devices()), f"{count} x CPU, faked", "cpu", None)


@functools.lru_cache(maxsize=8)
def topology(name: str) -> StandIns:
    """The devices of a GPU cluster or TPU slice, without any of them.

    Args:
        name: `"h100x1024"`: so many GPUs, in nodes of 8. `"v5p-2048"`, `"v5e-256"`: a
            TPU slice as Google names it (v5p counts cores, two per chip and device; the
            others chips). `"v5e:4x8"`: its shape in chips.

    Raises:
        ValueError: for other names.
        ImportError: if the compiler is not installed, or does not start.
    """
    text = name.lower().replace("v5litepod", "v5e")
    if match := re.fullmatch(r"([a-z]+\d+)x(\d+)", text):
        kind, count = match[1], int(match[2])
        if kind in _GPUS and count >= 1:
            return _gpus(name, kind, count)
    elif match := re.fullmatch(r"(v5e|v5p|v6e)-(\d+)", text):
        kind, count = match[1], int(match[2])
        chips = count // 2 if kind == "v5p" else count
        return _tpus(name, kind, slice_shape(kind, chips, name))
    elif match := re.fullmatch(r"(v5e|v5p|v6e):(\d+(?:x\d+){1,2})", text):
        return _tpus(name, match[1], tuple(map(int, match[2].split("x"))))
    raise ValueError(
        f"`topology`={name!r} is not known: GPUs are written"
        f" {', '.join(f'{kind}xN' for kind in _GPUS)}, TPU slices v5e-N, v5p-N, v6e-N,"
        " or by their shape in chips, v5e:4x8."
    )


def resized(name: str, count: int) -> str:
    """The name of the same topology with so many devices."""
    text = name.lower().replace("v5litepod", "v5e")
    if match := re.fullmatch(r"([a-z]+\d+)x\d+", text):
        return f"{match[1]}x{count}"
    kind = re.split("[-:]", text)[0]
    if kind == "v5p" and count < 4:
        # A v5p slice has four chips or more; nothing smaller can be rented.
        return f"v5p:{count}x1x1"
    if kind in ("v5e", "v6e") and count in (1, 2):
        return f"{kind}:1x{count}"
    return f"{kind}-{count * 2 if kind == 'v5p' else count}"


def slice_shape(kind: str, chips: int, name: str) -> tuple[int, ...]:
    """The shape of a TPU slice of so many chips: as near to a cube or square as can be.

    Those are the shapes that Google offers: 2x2x1, 2x2x2, 2x2x4, 2x4x4, 4x4x4, ...
    """
    dims = 3 if kind == "v5p" else 2
    power = chips.bit_length() - 1
    if chips < 4 and not (dims == 2 and chips == 1) or chips != 1 << power:
        raise ValueError(
            f"`topology`={name!r} has {chips} chips; slices named by a number have 4,"
            f" 8, 16, ... of them. Name another by its shape: {kind}:"
            + ("2x2x3." if dims == 3 else "4x6.")
        )
    if dims == 3 and chips == 4:
        return (2, 2, 1)
    lengths = [power // dims + (place >= dims - power % dims) for place in range(dims)]
    return tuple(1 << length for length in lengths)


def _tpus(name: str, kind: str, shape: tuple[int, ...]) -> StandIns:
    devices = tpu_devices(name, kind, shape)
    return StandIns(devices, f"{len(devices)} x TPU {kind}", "tpu", HARDWARE[kind])


def _gpus(name: str, kind: str, count: int) -> StandIns:
    per_node = math.gcd(count, 8) if count > 8 else count
    shape = f"1x{count // per_node}x{per_node}"
    devices = gpu_devices(name, _target(kind), shape)
    return StandIns(devices, f"{count} x {kind.upper()}", "gpu", HARDWARE[kind])


class _Gpu(NamedTuple):
    """What XLA's GPU compiler asks about a chip."""

    capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    shared_memory_per_core: int
    l2_cache: int
    clock_ghz: float
    memory: int
    description: str


# https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities for the
# limits of a capability; NVIDIA's architecture papers for cores, caches and clocks.
_GPUS: Final = {
    "a100": _Gpu(
        (8, 0), 108, 64, 167936, 41943040, 1.41, 85094825984, "A100-SXM4-80GB"
    ),
    "h100": _Gpu(
        (9, 0), 132, 128, 233472, 52428800, 1.98, 84929347584, "H100 80GB HBM3"
    ),
    "h200": _Gpu((9, 0), 132, 128, 233472, 52428800, 1.98, 150754820096, "H200"),
}


def _target(kind: str) -> str:
    """XLA's GpuTargetConfigProto as text."""
    gpu = _GPUS[kind]
    major, minor = gpu.capability
    info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": gpu.shared_memory_per_core,
        "shared_memory_per_block_optin": gpu.shared_memory_per_core - 1024,
        "threads_per_core_limit": 2048,
        "core_count": gpu.cores,
        "fpus_per_core": gpu.fpus_per_core,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": int(HARDWARE[kind].memory_bandwidth),
        "l2_cache_size": gpu.l2_cache,
        "clock_rate_ghz": gpu.clock_ghz,
        "device_memory_size": gpu.memory,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    fields = " ".join(f"{key}: {value}" for key, value in info.items())
    return (
        f"gpu_device_info {{ {fields}"
        f" cuda_compute_capability {{ major: {major} minor: {minor} }} }}"
        ' platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 }'
        " runtime_version { major: 12 minor: 9 }"
        f' device_description_str: "NVIDIA {gpu.description}"'
    )


def memory_of(device: Any) -> int | None:
    """Bytes that a device that is here gives a program, or None if it does not say."""
    stats = getattr(device, "memory_stats", lambda: None)()
    return None if not stats else stats.get("bytes_limit")
