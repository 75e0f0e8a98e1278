"""What a run will cost, read from its compiled train step before any of it runs."""

import copy
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..basics.arguments import check_number
from ..basics.files import write_whole
from ..step import Batch, matmul_flops
from ..strategies.cpu_options import options_for
from . import hardware as devices_of
from . import hosts as hosts_of
from . import reading as readings
from .hardware import Hardware
from .hosts import Hosts
from .reading import Bound, Estimate, Leaf, Memory, Reading, Split, Traffic


class Row(NamedTuple):
    """A line of `Plan.scaling`."""

    devices: int
    rows: int
    """Of the global batch."""
    peak: int
    wire_bytes: float
    step: float | None
    """Seconds, the worst case of the roofline; None without a hardware profile."""
    rows_per_second: float | None
    efficiency: float | None


class Plan:
    """What a train step takes: memory, communication, operations, per device.

    `str(plan)` is the report for people, `to_dict()` the same for programs, and
    `to_html(path)` a page with pictures that needs no network.

    Attributes:
        device: what it is for: `"8 x cpu"`.
        platform: whose compiler: `"cpu"`, `"gpu"` or `"tpu"`.
        num_devices: how many.
        mesh: sizes of the mesh's axes by name.
        strategy: as it prints.
        rows: rows of the global batch that a step computes, padding included.
        micro_batches: how many batches a step takes.
        steps: how many steps the program takes at a time. Its batch is theirs together;
            operations and collectives are a step's.
        memory: bytes per device.
        flops: matrix operations, those of the products and convolutions in a step, on
            all devices together, as traced; None if the strategy does not let one look.
        flops_compiled: compiled operations: those of all kinds that the compiler counts
            in a device's program, loop bodies once; None where it does not tell.
        bubble: what share of the time in split layers devices wait for one another's
            results, by the strategy's schedule; the operations count it as work.
        traffic: collectives, the most bytes first.
        hosts: what each host loads, sends to others and writes. A host is a process.
        leaves: every leaf of the state and the batch.
        bounds: lower bounds beside what was found.
        not_overwritten: paths of leaves that were donated and are copied all the same.
        could_split: leaves that are whole everywhere and could be split over the
            devices that rows are split over, the largest first.
        estimate: seconds, if the hardware is known.
        trace_seconds, compile_seconds: what it took; the first is None when the second
            is both together.
        notes: what is exact, what is indicative and what is not known.
    """

    device: str
    platform: str
    num_devices: int
    mesh: dict[str, int]
    strategy: str
    rows: int
    micro_batches: int
    steps: int
    memory: Memory
    flops: float | None
    flops_compiled: float | None
    bubble: float
    traffic: tuple[Traffic, ...]
    hosts: Hosts
    leaves: tuple[Leaf, ...]
    bounds: tuple[Bound, ...]
    not_overwritten: tuple[str, ...]
    could_split: tuple[Split, ...]
    estimate: Estimate | None
    trace_seconds: float | None
    compile_seconds: float
    notes: dict[str, list[str]]

    def __init__(self, planner: "Planner | None", **found: Any):
        self._planner = planner
        self.__dict__.update(found)

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends per step."""
        return sum(each.wire_bytes for each in self.traffic)

    def scaling(
        self,
        counts: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
        *,
        keep: str = "rows_per_device",
    ) -> "Scaling":
        """The same step planned for other numbers of devices.

        Args:
            counts: numbers of devices. Each is compiled.
            keep: `"rows_per_device"`: the global batch grows with the devices, from
                what this plan has per device; `"rows"`: it stays.
        """
        if keep not in ("rows_per_device", "rows"):
            raise ValueError(
                f"`keep` must be 'rows_per_device' or 'rows'; got {keep!r}."
            )
        planner = self._compiling()
        shards = planner.num_shards(self.num_devices)
        each = math.ceil(self.rows / self.micro_batches / shards)
        found = []
        for count in counts:
            rows = each * planner.num_shards(count)
            if keep == "rows":
                rows = self.rows // self.micro_batches
            plan = planner.plan(count, rows)
            time = plan.estimate.worst if plan.estimate else None
            found.append(
                Row(
                    count,
                    plan.rows,
                    plan.memory.peak,
                    plan.wire_bytes,
                    time,
                    None if time is None else plan.rows / time,
                    plan.estimate.efficiency if plan.estimate else None,
                )
            )
        return Scaling(tuple(found))

    def largest_batch(self, memory: int | float | None = None) -> int:
        """The largest global batch whose peak fits: found by compiling, not crashing.

        Args:
            memory: bytes per device that may be used; by default what the device or the
                hardware's profile has, less a tenth for what no program knows of.

        Returns:
            Rows; 0 if not even one row per shard fits.
        """
        planner = self._compiling()
        limit = planner.limit(memory)
        shards = planner.num_shards(self.num_devices)

        def peak(per_shard: int) -> float:
            try:
                plan = planner.plan(self.num_devices, per_shard * shards)
            except jax.errors.JaxRuntimeError as error:
                # TPU's compiler refuses what the chip's memory does not hold.
                if "RESOURCE_EXHAUSTED" in str(error):
                    return math.inf
                raise
            return plan.memory.peak

        start = max(1, math.ceil(self.rows / self.micro_batches / shards))
        return largest(peak, limit, start) * shards

    def _compiling(self) -> "Planner":
        if self._planner is None:
            raise RuntimeError(
                "this plan was read from the step that runs, and can't be asked about"
                " others; make one with `trainer.plan(loader)`."
            )
        return self._planner

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON takes it."""
        plain = {
            "device": self.device,
            "platform": self.platform,
            "num_devices": self.num_devices,
            "mesh": self.mesh,
            "strategy": self.strategy,
            "rows": self.rows,
            "micro_batches": self.micro_batches,
            "steps": self.steps,
            "memory": self.memory._asdict(),
            "flops": self.flops,
            "flops_compiled": self.flops_compiled,
            "bubble": self.bubble,
            "wire_bytes": self.wire_bytes,
            "traffic": [each._asdict() for each in self.traffic],
            "hosts": self.hosts._asdict(),
            "bounds": [each._asdict() | {"ratio": each.ratio} for each in self.bounds],
            "not_overwritten": self.not_overwritten,
            "could_split": [each._asdict() for each in self.could_split],
            "estimate": self.estimate and self.estimate._asdict(),
            "trace_seconds": self.trace_seconds,
            "compile_seconds": self.compile_seconds,
            "leaves": [each._asdict() for each in self.leaves],
            "notes": self.notes,
        }
        return json.loads(json.dumps(plain))

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the report with pictures into one file that needs no network."""
        from .page import page

        write_whole(path, page(self))

    def __str__(self) -> str:
        from .page import text

        return text(self)

    def __repr__(self) -> str:
        return f"Plan({self.device}, peak {self.memory.peak:,} bytes per device)"


class Scaling(NamedTuple):
    """A plan per number of devices. `str` of it is a table."""

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        from .page import scaling_text

        return scaling_text(self)

    def to_dict(self) -> list[dict[str, Any]]:
        """A dict per number of devices."""
        return [row._asdict() for row in self.rows]

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Writes an SVG: memory, communication and speed over the number of devices."""
        from .page import scaling_svg

        write_whole(path, scaling_svg(self))


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
        self.window = [jax.tree.map(_no_memory, batch) for batch in window]
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
            window = [_with_rows(batch, rows) for batch in window]

        traced: list[Any] = []
        compile_seconds = 0.0

        def build(
            program: Any, arguments: tuple[Any, ...], options: Any = None
        ) -> jax.stages.Compiled:
            nonlocal compile_seconds
            traced.append(strategy.trace(program, arguments))
            options = options_for(traced[-1].jaxpr, arguments, options)
            lowered = traced[-1].lower()
            strategy.rewrite(lowered)
            begun = time.perf_counter()
            compiled = lowered.compile(options)
            compile_seconds = time.perf_counter() - begun
            return compiled

        strategy.build = build
        started = time.perf_counter()
        engine = self.engine_on(strategy)
        with warnings.catch_warnings():
            # Told by `not_overwritten`, with names.
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            # A compiler without its devices can't take up what it compiled before.
            warnings.filterwarnings("ignore", "Error reading persistent compilation")
            (block,) = engine.blocks([window])
            (block,) = engine.prepare_training(block)
            compiled = engine.compiled_for("train", block.packed)
            if not isinstance(compiled, jax.stages.Compiled):
                raise TypeError(
                    "`plan` reads the compiled step, and `compile` of"
                    f" {type(strategy).__name__} returned a {type(compiled).__name__}."
                    " Return what `build` returns."
                )
            trace_seconds = time.perf_counter() - started - compile_seconds
            # Its inputs tell the leaves apart. The step that runs takes small ones
            # joined, which needs some other bytes.
            engine.join_small_leaves()
            engine.compiled_for("train", block.packed)
        devices = self.here if stand_ins is None else stand_ins.devices
        program = engine.programs.of_training()
        owner = self._owners(devices, stand_ins)
        reading = Reading(engine.shapes(), strategy, owner, program, compiled)
        return _planned(
            self,
            reading,
            devices,
            stand_ins,
            self._profile(stand_ins),
            strategy=repr(strategy),
            flops=float(matmul_flops(traced[-1].jaxpr)) if traced else None,
            trace_seconds=trace_seconds,
            compile_seconds=compile_seconds,
        )

    def _owners(
        self, devices: Sequence[Any], stand_ins: devices_of.StandIns | None
    ) -> dict[Any, int]:
        """The host of each device."""
        per_host = self.devices_per_host
        if per_host is None and stand_ins is not None and self.topology is None:
            per_host = jax.local_device_count() if jax.process_count() > 1 else None
        return hosts_of.owners(devices, per_host)

    def _stand_ins(self, count: int | None) -> devices_of.StandIns | None:
        """None for the devices that are here."""
        if self.topology is not None:
            found = devices_of.topology(self.topology)
            if count is None or count == len(found.devices):
                return found
            return devices_of.topology(devices_of.resized(self.topology, count))
        if count is None or count == len(self.here):
            return None
        return devices_of.faked(count)

    def _profile(self, stand_ins: devices_of.StandIns | None) -> Hardware | None:
        if self.hardware is not None:
            return self.hardware
        if stand_ins is not None:
            return stand_ins.hardware
        return devices_of.hardware_of(self.here[0])


def of_running(engine: Any) -> Plan | None:
    """The plan of the step that an engine has compiled and runs.

    Nothing is compiled or traced for it, so it has the compiler's count of operations
    alone, and can't be asked about other devices.

    Args:
        engine: one with a state.

    Returns:
        None before there is a step, and for a step that is not XLA's.
    """
    runs = engine.programs.of_training()
    if getattr(runs and runs.compiled, "memory_analysis", lambda: None)() is None:
        return None
    state, strategy = engine.shapes(), engine.strategy
    mesh = getattr(strategy, "mesh", None)
    here = list(state.step.sharding.device_set if mesh is None else mesh.devices.flat)
    owner = hosts_of.owners(here)
    reading = Reading(state, strategy, owner, runs, places=engine.places())
    return _planned(
        None,
        reading,
        here,
        None,
        devices_of.hardware_of(here[0]),
        strategy=repr(engine.strategy),
        flops=None,
        trace_seconds=None,
        compile_seconds=runs.seconds,
    )


def _planned(
    planner: Planner | None,
    reading: Reading,
    devices: Sequence[Any],
    stand_ins: devices_of.StandIns | None,
    profile: Hardware | None,
    *,
    flops: float | None,
    **found: Any,
) -> Plan:
    """What a reading says, as a plan."""
    count = len(devices)
    if stand_ins is None:
        name = f"{count} x {devices[0].device_kind}"
        platform = _platform(devices[0])
    else:
        name, platform = stand_ins.name, stand_ins.platform
    flops_compiled = _cost(reading.compiled, "flops")
    estimate = None
    if profile is not None:
        estimate = readings.estimate(
            profile,
            reading,
            (flops or (flops_compiled or 0) * count) / count,
        )
    return Plan(
        planner,
        device=name,
        platform=platform,
        num_devices=count,
        mesh=reading.mesh,
        rows=reading.rows,
        micro_batches=reading.micro_batches,
        steps=reading.steps,
        memory=reading.memory(),
        flops=flops,
        flops_compiled=flops_compiled,
        bubble=reading.bubble,
        traffic=reading.traffic,
        hosts=reading.hosts(),
        leaves=tuple(reading.leaves),
        bounds=reading.bounds(),
        not_overwritten=reading.not_overwritten,
        could_split=reading.could_split(),
        estimate=estimate,
        notes=_notes(reading, platform, stand_ins, flops, profile),
        **found,
    )


def largest(peak: Callable[[int], float], limit: int, start: int = 1) -> int:
    """The largest number whose peak is within the limit, if peaks grow with it.

    A peak is nearly a constant and a part in proportion, so the line through two of
    them leads close, and a few more compilations decide.
    """
    known: dict[int, float] = {}

    def fits(number: int) -> bool:
        if number not in known:
            known[number] = peak(number)
        return known[number] <= limit

    low, high = 0, None
    number = start
    while True:
        if fits(number):
            low = number
        else:
            high = number
        if high == low + 1:
            return low
        guess = _on_the_line(known, limit)
        if high is None:
            # Never more than 16 times at once, lest a program takes long to compile.
            number = max(low + 1, min(2 * low if guess is None else guess, 16 * low))
        else:
            middle = (low + high) // 2
            number = middle if guess is None else min(max(guess, low + 1), high - 1)
            if len(known) > 8:
                number = middle
            # A peak that moves in steps (of padding, of tiles) may lie off the line.
            if number in known:
                number = middle
        if high is None and number >= 1 << 40:
            return number


def _on_the_line(known: Mapping[int, float], limit: int) -> int | None:
    """Where the line through the two last known peaks around the limit reaches it."""
    if len(known) < 2:
        return None
    below = sorted(n for n in known if known[n] <= limit)
    above = sorted(n for n in known if limit < known[n] < math.inf)
    pair = (below + above)[-2:] if not above else (below[-1:] + above[:2])[:2]
    if len(pair) < 2:
        return None
    (x, y), (u, v) = ((n, known[n]) for n in pair)
    if v <= y:
        return None
    return int(x + (limit - y) * (u - x) / (v - y))


def _notes(
    reading: Reading,
    platform: str,
    stand_ins: devices_of.StandIns | None,
    flops: float | None,
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
    if flops is not None:
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


def _no_memory(leaf: Any) -> Any:
    """An array of zeros like `leaf` that takes no memory."""
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


def _with_rows(batch: Batch, rows: int) -> Batch:
    return jax.tree.map(
        lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), (rows, *leaf.shape[1:])),
        batch,
    )


def _cost(compiled: Any, name: str) -> float | None:
    """Of XLA's cost analysis, where a backend has one."""
    try:
        costs = compiled.cost_analysis()
    except Exception:  # Not all backends have it, and each says so in its own way.
        return None
    if isinstance(costs, list):
        costs = costs[0] if costs else {}
    value = (costs or {}).get(name)
    return None if value is None or value <= 0 else float(value)


def _platform(device: Any) -> str:
    return "gpu" if device.platform in ("cuda", "rocm") else device.platform
