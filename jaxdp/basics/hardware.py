"""Properties of the devices of this process: memory, kinds, precision of products."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax


def get_memory_limit(device: Any) -> int | None:
    """Returns the bytes that a device gives programs, or None if that is unknown.

    CPUs do not report it, nor do devices of other processes and of plans.
    """
    statistics = getattr(device, "memory_stats", None)
    if statistics is None or device.process_index != jax.process_index():
        return None
    return (statistics() or {}).get("bytes_limit")


def get_smallest_memory(devices: Iterable[Any]) -> int | None:
    """Returns the smallest known memory of the devices, or None."""
    return min(filter(None, map(get_memory_limit, devices)), default=None)


def get_product_precision(device: Any) -> str:
    """Returns the default precision of products of float32 arrays on a device.

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
    """Returns a message if the devices are not all of one kind."""
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
