"""What the devices that are here say of themselves: memory, kinds, float32."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax


def get_memory_limit(device: Any) -> int | None:
    """Bytes that a device gives programs; None if it does not say, as CPUs, or can't be
    asked, as those of other processes and of plans."""
    statistics = getattr(device, "memory_stats", None)
    if statistics is None or device.process_index != jax.process_index():
        return None
    return (statistics() or {}).get("bytes_limit")


def get_smallest_memory(devices: Iterable[Any]) -> int | None:
    """The memory of the smallest device of those that say it, or None."""
    return min(filter(None, map(get_memory_limit, devices)), default=None)


def get_product_precision(device: Any) -> str:
    """What a device computes products of float32 arrays in, unless it is told.

    Returns:
        `"TF32"` for NVIDIA's GPUs from Ampere on, `"bfloat16"` for TPUs, else
        `"float32"`.
    """
    if device.platform == "tpu":
        return "bfloat16"
    if device.platform not in ("gpu", "cuda"):
        return "float32"
    capability = str(getattr(device, "compute_capability", ""))
    if re.fullmatch(r"\d+\.\d+", capability):
        return "TF32" if float(capability) >= 8 else "float32"
    return "TF32" if "nvidia" in device.device_kind.lower() else "float32"


def describe_mixed_kinds(devices: Iterable[Any]) -> str | None:
    """What to say of devices that are not all of one kind."""
    counts = Counter(device.device_kind for device in devices)
    if len(counts) < 2:
        return None
    listed = ", ".join(f"{count} x {kind}" for kind, count in sorted(counts.items()))
    return (
        f"the devices are of several kinds ({listed}): every step waits for the slowest"
        " of them, the one with the least memory limits the batch, and their kernels"
        " round differently. To use one kind, pass those devices to the strategy"
        " (`devices=[...]`), or choose them by CUDA_VISIBLE_DEVICES"
    )
