"""Peak rates of known devices."""

from typing import Any, Final, NamedTuple


class Hardware(NamedTuple):
    """The peak rates of one device, as its manufacturer states them."""

    name: str
    flops: float
    """Dense bfloat16 matrix operations per second."""
    flops_float32: float
    """The same on float32 arrays in JAX's default precision: TF32 on GPUs, bfloat16
    on TPUs."""
    memory: int
    """Bytes. Of a GPU's JAX takes a share, see `usable_memory`."""
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
    profile.name: profile
    for profile in (
        Hardware("a100", 312e12, 156e12, 80 * 10**9, 2.039e12, 300e9, 8, 25e9),
        Hardware("h100", 989e12, 494e12, 80 * 10**9, 3.35e12, 450e9, 8, 50e9),
        Hardware("h200", 989e12, 494e12, 141 * 10**9, 4.8e12, 450e9, 8, 50e9),
        Hardware("v4", 275e12, 275e12, 32 * 2**30, 1.228e12, 300e9, None, 300e9),
        Hardware("v5e", 197e12, 197e12, 16 * 10**9, 0.819e12, 200e9, None, 200e9),
        Hardware("v5p", 459e12, 459e12, 95 * 10**9, 2.765e12, 600e9, None, 600e9),
        Hardware("v6e", 918e12, 918e12, 32 * 10**9, 1.64e12, 448e9, None, 448e9),
    )
}

_KINDS: Final = {
    **{name: name for name in ("a100", "h100", "h200")},
    **{f"tpu {name}": name for name in ("v4", "v5e", "v5p")},
    "tpu v5 lite": "v5e",
    "tpu v5": "v5p",
    "tpu v6": "v6e",
}
"""Profiles by parts of `device.device_kind`, in lower case; the first that fits."""


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
    profiles = (HARDWARE[name] for part, name in _KINDS.items() if part in kind)
    return next(profiles, None)
