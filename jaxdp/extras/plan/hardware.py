"""Peak rates of known devices, by the names that they have."""

import functools
import os
import re
from typing import Any, Final, NamedTuple

from ...basics.hardware import get_memory_limit

_PCIE4, _PCIE5 = 32e9, 64e9


class Hardware(NamedTuple):
    """The peak rates of one device, as its manufacturer states them."""

    name: str
    flops: float
    """Dense bfloat16 matrix operations per second."""
    flops_float32: float
    """The rate on float32 arrays in JAX's default precision.

    That is TF32 on GPUs, and bfloat16 on TPUs."""
    memory: int
    """Bytes of the device. JAX takes a share of a GPU's; see `get_usable_memory`."""
    memory_bandwidth: float
    """Bytes per second."""
    link_bandwidth: float
    """Bytes per second that a device can send to those of its own domain."""
    domain: int | None
    """The number of devices that such links join; None for all."""
    far_bandwidth: float
    """Bytes per second that a device can send beyond its domain."""
    flops_highest: float | None = None
    """The rate on float32 arrays under `precision="32-highest"`.

    None if it is not known; plans then take `flops_float32`."""
    is_gpu: bool = False

    def rate(self, computed_in: str) -> float:
        """Operations per second of products by a name in `products.Products`."""
        if computed_in in ("float32", "float64", "complex64", "complex128"):
            return self.flops_highest or self.flops_float32
        return self.flops_float32 if "float32" in computed_in else self.flops


def _gpu(
    name: str,
    teraflops: tuple[float, float, float],
    gigabytes: int,
    gigabytes_per_s: float,
    link: float = _PCIE4,
    far: float = 25e9,
) -> Hardware:
    bfloat16, tf32, float32 = (rate * 1e12 for rate in teraflops)
    size, bandwidth = gigabytes * 10**9, gigabytes_per_s * 1e9
    near = link, 8, far
    return Hardware(name, bfloat16, tf32, size, bandwidth, *near, float32, is_gpu=True)


def _tpu(
    name: str, teraflops: float, memory: int, bandwidth: float, link: float
) -> Hardware:
    rate = teraflops * 1e12
    # Six passes in bfloat16 make a product in float32.
    return Hardware(name, rate, rate, memory, bandwidth, link, None, link, rate / 6)


# Peaks without sparsity, in bfloat16, TF32 and float32; NVLink in one direction. Node
# to node: the adapters of DGX systems, 200 Gbit/s per A100, 400 Gbit/s per H100.
# https://www.nvidia.com/en-us/data-center/a100/, .../h100/, .../h200/, and so on
# https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html
# Cards without bfloat16 or TF32 (V100, T4, 2080) have their rates of float16 and
# float32. GeForce cards: the whitepapers of Turing, Ampere, Ada and Blackwell.
# TPU: per chip, and one JAX device each; all links of a chip together.
# https://cloud.google.com/tpu/docs/v4, .../v5e, .../v5p, .../v6e
HARDWARE: Final = {
    profile.name: profile
    for profile in (
        _gpu("a100", (312, 156, 19.5), 80, 2039, 300e9),
        _gpu("a100 40gb", (312, 156, 19.5), 40, 1555, 300e9),
        _gpu("a100 pcie", (312, 156, 19.5), 80, 1935),
        _gpu("a100 pcie 40gb", (312, 156, 19.5), 40, 1555),
        _gpu("h100", (989, 494, 67), 80, 3350, 450e9, 50e9),
        _gpu("h100 pcie", (756, 378, 51), 80, 2000, _PCIE5, 50e9),
        _gpu("h100 nvl", (835, 417, 60), 94, 3900, _PCIE5, 50e9),
        _gpu("h200", (989, 494, 67), 141, 4800, 450e9, 50e9),
        _gpu("h200 nvl", (835, 417, 60), 141, 4800, _PCIE5, 50e9),
        _gpu("gh200", (989, 494, 67), 96, 4000, 450e9, 50e9),
        _gpu("h20", (148, 74, 44), 96, 4000, 450e9, 50e9),
        _gpu("b200", (2250, 1125, 75), 180, 7700, 900e9, 50e9),
        _gpu("gb200", (2500, 1250, 80), 186, 8000, 900e9, 50e9),
        _gpu("b300", (2250, 1125, 75), 270, 8000, 900e9, 100e9),
        _gpu("gb300", (2500, 1250, 80), 278, 8000, 900e9, 100e9),
        _gpu("a30", (165, 82, 10.3), 24, 933),
        _gpu("a40", (150, 75, 37.4), 48, 696),
        _gpu("a10", (125, 62.5, 31.2), 24, 600),
        _gpu("a10g", (70, 35, 31.5), 24, 600),
        _gpu("l4", (121, 60, 30.3), 24, 300),
        _gpu("l40", (181, 90.5, 90.5), 48, 864),
        _gpu("l40s", (362, 183, 91.6), 48, 864),
        _gpu("v100", (125, 15.7, 15.7), 16, 900, 150e9, 12.5e9),
        _gpu("t4", (65, 8.1, 8.1), 16, 320),
        _gpu("rtx a4000", (76.7, 38.3, 19.2), 16, 448),
        _gpu("rtx a5000", (111, 55.5, 27.8), 24, 768),
        _gpu("rtx a6000", (155, 77.4, 38.7), 48, 768),
        _gpu("rtx 6000 ada", (364, 182, 91.1), 48, 960),
        _gpu("rtx pro 6000 blackwell", (503, 252, 126), 96, 1792, _PCIE5),
        _gpu("rtx 2080 ti", (53.8, 13.4, 13.4), 11, 616),
        _gpu("rtx 3080", (59.5, 29.8, 29.8), 10, 760),
        _gpu("rtx 3090", (71, 35.6, 35.6), 24, 936),
        _gpu("rtx 3090 ti", (80, 40, 40), 24, 1008),
        _gpu("rtx 4080", (97.5, 48.7, 48.7), 16, 717),
        _gpu("rtx 4090", (165, 82.6, 82.6), 24, 1008),
        _gpu("rtx 5090", (210, 105, 105), 32, 1792, _PCIE5),
        _tpu("v4", 275, 32 * 2**30, 1.228e12, 300e9),
        _tpu("v5e", 197, 16 * 10**9, 0.819e12, 200e9),
        _tpu("v5p", 459, 95 * 10**9, 2.765e12, 600e9),
        _tpu("v6e", 918, 32 * 10**9, 1.64e12, 448e9),
    )
}

_TPUS: Final = {
    "tpu v4": "v4",
    "tpu v5 lite": "v5e",
    "tpu v5e": "v5e",
    "tpu v5": "v5p",
    "tpu v5p": "v5p",
    "tpu v6 lite": "v6e",
    "tpu v6e": "v6e",
}
"""JAX's names of devices that have other names here."""

_OTHER_CARDS: Final = {"ti", "super", "d", "laptop", "mobile", "max", "nvl", "grid"}
"""Words that make a card another one than that of the same number."""


def find_hardware(hardware: str | Hardware) -> Hardware:
    """Returns the profile of a name, or the given profile."""
    if isinstance(hardware, Hardware):
        return hardware
    if str(hardware).lower() not in HARDWARE:
        raise ValueError(
            f"`hardware` must be one of {', '.join(map(repr, HARDWARE))}, or a"
            f" jaxdp.plan.Hardware(...) of your own; got {hardware!r}."
        )
    return HARDWARE[hardware.lower()]


def hardware_of(device: Any) -> Hardware | None:
    """Returns the profile of a local device, or None if its kind is unknown.

    Its memory is the one that the device reports, where it reports any.
    """
    profile = find_profile(device.device_kind)
    limit = get_memory_limit(device)
    if profile is None or limit is None:
        return profile
    memory = limit / get_gpu_share() if profile.is_gpu else limit
    return profile._replace(memory=int(memory))


@functools.cache
def find_profile(kind: str) -> Hardware | None:
    """Finds the profile of a `device.device_kind`, by its words.

    Of all known names whose words are in `kind`, it takes the longest. Returns None for
    cards that only look alike, such as those of laptops, and for slices of a GPU.
    """
    words = _split_words(kind)
    if any(re.fullmatch(r"mig|\d+[abcq]", word) for word in words):
        return None  # a share of a card, by NVIDIA's MIG or vGPU
    names = {name: name for name in HARDWARE if HARDWARE[name].is_gpu} | _TPUS
    fitting = [name for name in names if set(name.split()) <= set(words)]
    name = max(fitting, key=lambda name: len(name.split()), default=None)
    if name is None or (set(words) & _OTHER_CARDS) - set(name.split()):
        return None
    profile = HARDWARE[names[name]]
    if not profile.is_gpu:
        return profile

    sizes = re.findall(r"\b(\d+)gb\b", kind.lower())
    if sizes and not name.startswith("g"):  # a Grace's is that of the CPU
        profile = profile._replace(memory=int(sizes[0]) * 10**9)
    return profile


def get_usable_memory(profile: Hardware) -> int:
    """Returns the bytes that JAX gives programs: a share of a GPU's memory."""
    return int(profile.memory * get_gpu_share()) if profile.is_gpu else profile.memory


def get_gpu_share() -> float:
    """Returns JAX's share of a GPU, by its variable, which has an older name too."""
    names = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
    return float(next(filter(None, map(os.environ.get, names)), 0.75))


def _split_words(kind: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", kind.lower())
