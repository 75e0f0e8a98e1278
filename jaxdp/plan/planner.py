"""Plans made by compiling on shapes, for devices that may not be here."""

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..basics.arguments import check_number
from ..step import Batch
from . import hardware as devices_of
from .hardware import Hardware, StandIns
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
        self.devices_per_host: int | None = None
        self.engine_on = engine_on
        self.strategy = strategy
        self.window = [_zeros(batch) for batch in window]
        self.topology = topology
        self.hardware = None if hardware is None else devices_of.find_hardware(hardware)
        here = getattr(strategy, "mesh", None)
        self.here = (
            list(np.ravel(here.devices))
            if here is not None
            else [getattr(strategy, "device", jax.devices()[0])]
        )

    def spread(self, num_devices: int | None, hosts: int) -> None:
        """From now on there are as many devices on each host as `hosts` leave of these.

        Args:
            num_devices: those of the strategy by default.
            hosts: how many.
        """
        count = len(self.here) if num_devices is None else num_devices
        if count % hosts:
            raise ValueError(
                f"`hosts`={hosts} does not divide the {count} devices; each host has as"
                " many as the others."
            )
        self.devices_per_host = count // hosts

    def num_shards(self, num_devices: int | None) -> int:
        """Into how many parts so many devices split the rows."""
        if num_devices is None or num_devices == len(self.here):
            return self.strategy.num_shards
        stand_ins = self._stand_ins(num_devices)
        assert stand_ins is not None
        return self.strategy.on(stand_ins.devices).num_shards

    def limit(self, memory: int | float | None) -> int:
        """Bytes that a program may take."""
        if memory is None:
            found = self.topology is None and devices_of.memory_of(self.here[0])
            profile = self._profile(self._stand_ins(None))
            if not found and profile is not None:
                found = profile.memory
            if not found:
                raise ValueError(
                    "`memory` is needed: this device does not say how much it has. Pass"
                    " the bytes that one device may use, memory=80e9 say, or plan with"
                    " `hardware` or `topology`."
                )
            memory = 0.9 * found
        check_number("memory", memory, above=0, below=math.inf, or_else=", in bytes")
        return int(memory)

    def plan(self, num_devices: int | None = None, rows: int | None = None) -> Plan:
        """Compiles and reads.

        Args:
            num_devices: how many; those of the strategy or the topology by default.
            rows: of each batch, instead of those that the loader gave.
        """
        stand_ins = self._stand_ins(num_devices)
        strategy = copy.copy(self.strategy)
        if stand_ins is not None:
            strategy = strategy.on(stand_ins.devices)
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
        compiled = engine.compiled_for("train", dispatch)
        if not isinstance(compiled, jax.stages.Compiled):
            raise TypeError(
                "`plan` reads the compiled step, and `compile` of"
                f" {type(strategy).__name__} returned a {type(compiled).__name__}."
                " Return what `build` returns."
            )

        devices = self.here if stand_ins is None else list(stand_ins.devices)
        hosts = _hosts(devices, self._devices_on_a_host(stand_ins))
        profile = self._profile(stand_ins)
        return _planned(engine, devices, hosts, profile, stand_ins, self)

    def _devices_on_a_host(self, stand_ins: StandIns | None) -> int | None:
        """None if the devices say themselves on which host they are."""
        is_faked = stand_ins is not None and self.topology is None
        if self.devices_per_host is None and is_faked and jax.process_count() > 1:
            return jax.local_device_count()
        return self.devices_per_host

    def _stand_ins(self, count: int | None) -> StandIns | None:
        """None for the devices that are here."""
        if self.topology is not None:
            found = devices_of.topology(self.topology)
            if count is None or count == len(found.devices):
                return found
            return devices_of.topology(devices_of.resized(self.topology, count))
        if count is None or count == len(self.here):
            return None
        return devices_of.faked(count)

    def _profile(self, stand_ins: StandIns | None) -> Hardware | None:
        if self.hardware is not None:
            return self.hardware
        if stand_ins is not None:
            return stand_ins.hardware
        return devices_of.hardware_of(self.here[0])


def of_running(engine: Any) -> Plan | None:
    """The plan of the step that an engine has compiled and runs.

    Nothing is compiled or traced for it, so it can't be asked about other devices.

    Args:
        engine: one with a state.

    Returns:
        None before there is a step, and for a step that is not XLA's.
    """
    runs = engine.programs.of_training()
    if getattr(runs and runs.compiled, "memory_analysis", lambda: None)() is None:
        return None
    mesh = getattr(engine.strategy, "mesh", None)
    held = engine.held.shapes().step.sharding.device_set
    here = list(held if mesh is None else mesh.devices.flat)
    return _planned(engine, here, _hosts(here), devices_of.hardware_of(here[0]))


def _planned(
    engine: Any,
    devices: Sequence[Any],
    hosts: Sequence[int],
    profile: Hardware | None,
    stand_ins: StandIns | None = None,
    planner: Planner | None = None,
) -> Plan:
    """What an engine's train step says.

    Args:
        engine: one that has compiled it.
        devices: those that it is compiled for, in the mesh's order.
        hosts: the number of the host of each.
        profile: what the devices can do, if it is known.
        stand_ins: what the devices are, if they are not here.
        planner: whose plan it is.
    """
    runs, count = engine.programs.of_training(), len(devices)
    reading = Reading(
        engine.held.shapes(), engine.held.places(), engine.strategy, hosts, runs
    )
    name = f"{count} x {devices[0].device_kind}"
    platform = devices[0].platform
    platform = "gpu" if platform in ("cuda", "rocm") else platform
    if stand_ins is not None:
        name, platform = stand_ins.name, stand_ins.platform

    traced, compiled = reading.flops, _compiled_flops(runs.compiled)
    operations = compiled or 0 if traced is None else traced / count
    return Plan(
        planner=planner,
        device=name,
        platform=platform,
        num_devices=count,
        num_hosts=len(set(hosts)),
        mesh=reading.mesh,
        strategy=repr(engine.strategy),
        rows=reading.rows,
        micro_batches=reading.micro_batches,
        steps=reading.steps,
        memory=reading.memory(),
        flops=traced,
        flops_compiled=compiled,
        bubble=engine.strategy.bubble,
        traffic=reading.traffic,
        leaves=tuple(reading.leaves),
        bounds=reading.bounds(),
        not_overwritten=reading.not_overwritten,
        could_split=reading.could_split(),
        estimate=profile and estimate(profile, reading, operations),
        trace_seconds=runs.built and runs.built.trace_seconds,
        compile_seconds=runs.built.compile_seconds if runs.built else runs.seconds,
        notes=_notes(reading, platform, stand_ins, profile),
    )


def _notes(
    reading: Reading,
    platform: str,
    stand_ins: StandIns | None,
    profile: Hardware | None,
) -> dict[str, list[str]]:
    exact = [
        "bytes of parameters, optimizer state, batch and all other leaves, per device,"
        " from their shapes and layout",
        "arguments, results, temporary memory and peak, as this compiler has laid them"
        " out; allocators add fragmentation and libraries their workspaces",
        "which inputs are overwritten, and every collective of the compiled program",
    ]
    indicative, unknown = [], []
    if reading.flops is not None:
        exact.append("matrix operations, of products and convolutions as traced")
    indicative.append(
        "compiled operations: the compiler counts the bodies of loops once, and what"
        " libraries compute perhaps not at all"
    )
    if stand_ins is not None and platform == "cpu":
        indicative.append(
            "temporary memory and collectives are those of XLA's CPU compiler. GPU and"
            " TPU compilers fuse more, and turn an all-reduce of which a part is used"
            " into a reduce-scatter, which the CPU's never does: plan with `topology`"
        )
    if platform == "gpu" and stand_ins is not None:
        indicative.append(
            "without a GPU the compiler can't try kernels out, nor ask cuDNN and cuBLAS"
            " for their workspaces"
        )
    if profile is not None:
        indicative.append(
            f"seconds, from the peaks of {profile.name} and ring algorithms at full"
            " bandwidth: real steps reach 30 to 60 % of peaks. Efficiency counts no"
            " latency and no slow neighbour"
        )
    else:
        unknown.append(
            "time: no hardware profile for these devices; pass hardware="
            + " or ".join(repr(name) for name in ("h100", "v5e"))
        )
    if reading.program.unknown_loops:
        unknown.append(
            f"how often {len(reading.program.unknown_loops)} loops with collectives"
            " run; these are counted once"
        )
    if any(each.axes is None for each in reading.traffic):
        unknown.append("the mesh axes of collectives between other groups of devices")
    unknown.append("memory of the program itself, of collectives' libraries and of JAX")
    return {"exact": exact, "indicative": indicative, "unknown": unknown}


def _hosts(devices: Sequence[Any], each: int | None = None) -> list[int]:
    """The host of each device: as it says itself, or so many to each, in order."""
    if each is not None:
        return [place // each for place in range(len(devices))]
    indices = [getattr(device, "process_index", 0) for device in devices]
    numbers = {index: number for number, index in enumerate(sorted(set(indices)))}
    return [numbers[index] for index in indices]


def _zeros(batch: Batch, rows: int | None = None) -> Batch:
    """A batch like `batch` that takes no memory, perhaps with so many rows."""

    def zeros(leaf: Any) -> Any:
        shape = leaf.shape if rows is None else (rows, *leaf.shape[1:])
        return np.broadcast_to(np.zeros((), leaf.dtype), shape)

    return jax.tree.map(zeros, batch)


def _compiled_flops(compiled: Any) -> float | None:
    """Operations by XLA's cost analysis, where a backend has one."""
    try:
        costs = compiled.cost_analysis()
    except Exception:  # Not all backends have it, and each says so in its own way.
        return None
    if isinstance(costs, list):
        costs = costs[0] if costs else {}
    value = (costs or {}).get("flops")
    return None if value is None or value <= 0 else float(value)
