"""Plans made by compiling on shapes, for devices that may not be here."""

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..basics.arguments import check_number
from ..basics.hardware import (
    find_hardware,
    float32_by_default,
    memory_of,
    usable_memory,
)
from ..basics.units import in_bytes
from ..step import BY_DEFAULT, TABLE, Batch, Picked, Table, map_rows
from ..strategies import Pipeline
from . import hardware as devices_of
from .hardware import Devices, Hardware
from .parts import Leaf
from .plan import Plan
from .reading import Reading, estimate


class Planner:
    """Compiles a train step on shapes, for devices that may not be here.

    Args:
        engine_on: `(strategy) -> engine` with shapes for a state, whose
            `compiled_for("train", packed)` compiles with that strategy.
        strategy: as it trains.
        window: one step's batches, of which only shapes and dtypes are used.
        topology: as for `jaxdp.plan.hardware.topology`; a name that ends in a number
            may be asked for other numbers.
        hardware: a profile for `estimate`; that of the devices by default.
    """

    def __init__(
        self,
        engine_on: Callable[[Any], Any],
        strategy: Any,
        window: Sequence[Batch],
        topology: str | None = None,
        hardware: str | Hardware | None = None,
    ):
        mesh = getattr(strategy, "mesh", None)
        devices = jax.devices()[:1] if mesh is None else mesh.devices.flat
        self.here = devices_of.here(list(devices))
        self.devices_per_host: int | None = None
        self.engine_on = engine_on
        self.strategy = strategy
        self.window = [_zeros(batch) for batch in window]
        self.topology = topology
        self.hardware = None if hardware is None else find_hardware(hardware)

    def spread(self, num_devices: int | None, hosts: int) -> None:
        """From now on there are as many devices on each host as `hosts` leave of these.

        Args:
            num_devices: those of the strategy by default.
            hosts: how many.
        """
        count = num_devices or len(self.here.devices)
        if count % hosts:
            raise ValueError(
                f"`hosts`={hosts} does not divide the {count} devices; each host has as"
                " many as the others."
            )
        self.devices_per_host = count // hosts

    def num_shards(self, num_devices: int) -> int:
        """Into how many parts so many devices split the rows."""
        return self._strategy_on(self._devices(num_devices)).num_shards

    def limit(self, memory: int | float | None) -> int:
        """Bytes that a program may take."""
        if memory is None:
            devices = self._devices(None)
            profile = self.hardware or devices.hardware
            has = devices.are_here and memory_of(devices.devices[0])
            has = has or profile and usable_memory(profile)
            if not has:
                raise ValueError(
                    "`memory` is needed: this device does not say how much it"
                    " has. Pass the bytes that one device may use, for example"
                    " memory=80e9, or plan with `hardware` or `topology`."
                )
            memory = 0.9 * has
        check_number("memory", memory, above=0, below=math.inf, or_else=", in bytes")
        return int(memory)

    def plan(self, num_devices: int | None = None, rows: int | None = None) -> Plan:
        """Compiles and reads.

        Args:
            num_devices: how many; those of the strategy or the topology by default.
            rows: of each batch, instead of those that the loader gave.
        """
        devices = self._devices(num_devices)
        strategy = self._strategy_on(devices)
        window = self.window
        if rows is not None:
            window = [_zeros(batch, rows) for batch in window]

        engine = self.engine_on(strategy)
        with warnings.catch_warnings():
            # Told by `not_overwritten`, with names.
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            # A compiler without its devices can't take up what it compiled before.
            warnings.filterwarnings("ignore", "Error reading persistent compilation")
            (dispatch,) = engine.dispatches([window])
            (dispatch,) = engine.prepare_training(dispatch)
        compiled = engine.compiled_for("train", dispatch).compiled
        if not isinstance(compiled, jax.stages.Compiled):
            raise TypeError(
                "`plan` reads the compiled step, and `compile` of"
                f" {type(strategy).__name__} returned a {type(compiled).__name__}."
                " Return what jax.jit returns."
            )

        per_host = self.devices_per_host
        is_faked = not devices.are_here and self.topology is None
        if per_host is None and is_faked and jax.process_count() > 1:
            per_host = jax.local_device_count()
        hosts = _hosts(devices.devices, per_host)
        return _planned(engine, devices, hosts, self.hardware or devices.hardware, self)

    def _devices(self, count: int | None) -> Devices:
        if self.topology is not None:
            return devices_of.topology(self.topology, count)
        if count is None or count == len(self.here.devices):
            return self.here
        return devices_of.faked(count)

    def _strategy_on(self, devices: Devices) -> Any:
        strategy = copy.copy(self.strategy)
        return strategy if devices.are_here else strategy.on(devices.devices)


def of_running(engine: Any) -> Plan | None:
    """The plan of the step that an engine has compiled and runs.

    Nothing is compiled or traced for it, so it can't be asked about other devices.

    Args:
        engine: one with a state.

    Returns:
        None before there is a step, and for a step that is not XLA's.
    """
    runs = engine.train_program()
    if getattr(runs and runs.compiled, "memory_analysis", lambda: None)() is None:
        return None
    mesh = getattr(engine.strategy, "mesh", None)
    held = engine.held.shapes().step.sharding.device_set
    devices = devices_of.here(list(held if mesh is None else mesh.devices.flat))
    return _planned(engine, devices, _hosts(devices.devices), devices.hardware)


def _planned(
    engine: Any,
    devices: Devices,
    hosts: Sequence[int],
    profile: Hardware | None,
    planner: Planner | None = None,
) -> Plan:
    """What the train step says that an engine has compiled.

    Args:
        engine: with the step.
        devices: those that it is compiled for, in the mesh's order.
        hosts: the number of the host of each.
        profile: what the devices can do, if it is known.
        planner: whose plan it is.
    """
    runs, count = engine.train_program(), len(hosts)
    memory = None if devices.platform == "cpu" else _memory_of(devices, profile)
    reading = Reading(engine, hosts, memory)

    products, strategy = reading.products, engine.strategy
    bubble = strategy.bubble if isinstance(strategy, Pipeline) else 0.0
    return Plan(
        planner=planner,
        device=devices.name,
        platform=devices.platform,
        num_devices=count,
        num_hosts=len(set(hosts)),
        mesh=reading.mesh,
        strategy=repr(engine.strategy),
        rows=reading.rows,
        micro_batches=reading.micro_batches,
        steps=reading.steps,
        memory=reading.memory(),
        flops=None if products is None else sum(products.values()),
        products=None if products is None else _named(products, devices),
        bubble=bubble,
        traffic=reading.traffic,
        leaves=tuple(reading.leaves),
        bounds=reading.bounds(),
        not_overwritten=reading.not_overwritten,
        estimate=profile and estimate(profile, reading),
        trace_seconds=runs.trace_seconds,
        compile_seconds=runs.compile_seconds,
        notes=_notes(reading, devices, profile),
    )


def _named(products: dict[str, float], devices: Devices) -> dict[str, float]:
    """The operations by what these devices compute them in."""
    by_default = f"{float32_by_default(devices.devices[0])} (JAX's default for float32)"
    return {
        by_default if name == BY_DEFAULT else name: count
        for name, count in products.items()
    }


def _memory_of(devices: Devices, profile: Hardware | None) -> int:
    """Bytes that JAX has of each device; 0 if that is not known."""
    if devices.are_here:
        if memory := memory_of(devices.devices[0]):
            return memory
    return 0 if profile is None else usable_memory(profile)


def _notes(
    reading: Reading, devices: Devices, profile: Hardware | None
) -> dict[str, list[str]]:
    """What of a plan is exact, what indicative and what not known."""
    batch = [leaf for leaf in reading.batch if leaf.path != "counts"]
    shapes = ", ".join(map(_shape, batch[:4]))
    exact = [
        "bytes of every leaf per device; arguments, results, temporary memory and peak,"
        " as this compiler laid them out; which inputs are overwritten; every"
        " collective of the compiled program; matrix operations as traced"
    ]
    indicative = [
        f"this is the step for the shape of the first batch, {shapes}; other"
        " shapes have programs of their own"
    ]
    kept = [leaf.bytes_per_device for leaf in batch if f"whole.{TABLE}" in leaf.path]
    if kept:
        exact.append(f"{in_bytes(sum(kept))} of the batch are arrays (`jaxdp.Arrays`)")
        exact[-1] += " that each device keeps; steps take their rows there"
    unknown = ["memory of the program itself, of collectives' libraries and of JAX"]

    # What the compiler of other devices can't tell.
    if devices.platform == "cpu" and not devices.are_here:
        indicative.append(
            "temporary memory and collectives come from XLA's CPU compiler. GPU"
            " and TPU compilers fuse more, and turn an all-reduce of which a part"
            " is used into a reduce-scatter, which the CPU compiler never does:"
            " plan with `topology`"
        )
    if any(leaf.on_host for leaf in reading.leaves):
        unknown.append("the time to move optimizer state between host and device")
    if reading.products is None:
        unknown.append("operations: this strategy hides the traced step")
    if any(traffic.times is None for traffic in reading.traffic):
        unknown.append("how often some loops run: collectives in them count once")

    # What its profile says.
    if profile is None:
        unknown.append("time: pass the hardware, such as hardware='h100'")
        return {"exact": exact, "indicative": indicative, "unknown": unknown}
    indicative.append(
        f"seconds, from the peaks of {profile.name} and ring algorithms at full"
        " bandwidth: real steps reach 30 to 60 % of peaks"
    )
    usable = usable_memory(profile)
    if usable < profile.memory:
        exact.append(
            f"memory of {profile.name}: {in_bytes(usable)} of its"
            f" {in_bytes(profile.memory)}, the share that JAX takes of a GPU;"
            " set XLA_CLIENT_MEM_FRACTION to more, such as .9, before it starts"
        )
    return {"exact": exact, "indicative": indicative, "unknown": unknown}


def _shape(leaf: Leaf) -> str:
    """A leaf of the batch, and what a device has of it if more than rows are split."""
    shape = f"{leaf.path} {leaf.shape[1:]}"
    if leaf.shape[2:] != leaf.shard[2:]:
        shape += f" (each device has {leaf.shard[1:]})"
    return shape


def _hosts(devices: Sequence[Any], each: int | None = None) -> list[int]:
    """The host of each device: as it says itself, or so many to each, in order."""
    if each is not None:
        return [place // each for place in range(len(devices))]
    indices = [device.process_index for device in devices]
    return np.unique(indices, return_inverse=True)[1].tolist()


def _zeros(batch: Batch, rows: int | None = None) -> Batch:
    """A batch like `batch` that takes no memory, perhaps with so many rows."""

    def zeros(leaf: Any) -> Any:
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)

    if isinstance(batch, Picked):
        return Picked(_zeros(batch.index, rows), Table(_zeros(batch.table.tree)))
    if rows is not None:
        batch = map_rows(lambda x: np.broadcast_to(x[:1], (rows, *x.shape[1:])), batch)
    return jax.tree.map(zeros, batch)
