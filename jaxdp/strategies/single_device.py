"""Everything on one device: the plain answer to the contract."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from ..step import Collectives, TrainState
from .base import DataParallel, Role, changed, find_devices, place_copy
from .offload import jitted, optimizer_on_host


class SingleDevice(DataParallel):
    """Keeps state and batches on one device; the step is plain `jax.jit`.

    Args:
        device: the device, by default the first one.
    """

    num_shards = 1

    def __init__(self, device: Any = None):
        if device is not None and not isinstance(device, jax.Device):
            raise TypeError(
                "`device` must be a jax.Device, such as jax.devices()[0]; got"
                f" {device!r}."
            )
        self.device = find_devices(1 if device is None else [device])[0]

    def place(self, state: TrainState) -> TrainState:
        return place_copy(state, self.state_shardings(state))

    def state_shardings(self, state: TrainState) -> TrainState:
        sharding = SingleDeviceSharding(self.device)
        shardings = jax.tree.map(lambda _: sharding, state)
        return optimizer_on_host(shardings, state) if self.offloads else shardings

    def with_offload(self) -> "SingleDevice":
        return changed(self, offloads=True)

    def on(self, devices: Sequence[Any]) -> "SingleDevice":
        if len(devices) != 1:
            raise ValueError(
                f"`devices`: SingleDevice uses 1 device, not {len(devices)}; plan with"
                " a strategy that splits the batch, such as Sharded()."
            )
        return changed(self, device=devices[0])

    def compile(
        self,
        step: Callable[..., Any],
        arguments: tuple[Any, ...],
        roles: tuple[Role, ...],
        results: Role | tuple[Role, ...],
        *,
        donate: tuple[int, ...] = (),
        split: bool = True,
    ) -> jax.stages.Compiled:
        here = SingleDeviceSharding(self.device)
        program = jitted(
            functools.partial(step, Collectives()),
            arguments,
            roles,
            results,
            [here] * len(arguments),
            here if isinstance(results, str) else (here,) * len(results),
            donate,
        )
        return self.build(program, arguments)

    def __repr__(self) -> str:
        return f"SingleDevice({self.device})"
