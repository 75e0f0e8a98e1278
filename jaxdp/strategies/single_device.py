"""Everything on one device: the plain answer to the contract."""

from collections.abc import Sequence
from typing import Any

import jax

from ..step import DATA
from .base import DataParallel, find_devices, mesh_on


class SingleDevice(DataParallel):
    """Keeps state and batches on one device; the step is plain `jax.jit`.

    Args:
        device: the device, by default the first one.
    """

    def __init__(self, device: Any = None):
        if device is not None and not isinstance(device, jax.Device):
            raise TypeError(
                "`device` must be a jax.Device, such as jax.devices()[0]; got"
                f" {device!r}."
            )
        self.mesh = mesh_on(find_devices(1 if device is None else [device]), {DATA: 1})

    def on(self, devices: Sequence[Any]) -> "SingleDevice":
        if len(devices) != 1:
            raise ValueError(
                f"`devices`: SingleDevice uses 1 device, not {len(devices)}; plan with"
                " a strategy that splits the batch, such as Sharded()."
            )
        return SingleDevice(devices[0])

    def __repr__(self) -> str:
        return f"SingleDevice({self.mesh.devices.flat[0]})"
