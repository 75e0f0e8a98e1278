"""The costs of a run, read from its compiled train step before it runs."""

import dataclasses
import html
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax

from ...basics.console import format_columns, log_info
from ...basics.units import format_bytes, format_seconds, format_short
from .estimate import (
    GROUPS,
    Bound,
    Estimate,
    Memory,
    PlanLeaf,
    Remedy,
    ScalingRow,
    Traffic,
)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """The costs of a train step: memory, communication and operations, per device.

    `str(plan)` is the report for people, `to_dict()` the same for programs;
    `trainer.report(path, plan)` puts it on the page of a run.

    Attributes:
        device: the devices it is for: `"8 x cpu"`.
        platform: whose compiler: `"cpu"`, `"gpu"` or `"tpu"`.
        num_devices: how many there are.
        num_hosts: how many hosts have them. Each process counts as a host.
        mesh: sizes of the mesh's axes by name.
        strategy: its `repr`.
        rows: rows of the global batch that a step computes, padding included.
        micro_batches: how many batches a step takes.
        steps: how many steps the program takes per call. The batch is that of all of
            them; operations and collectives are counted per step.
        memory: bytes per device.
        flops: operations in the matrix products and convolutions of a step, summed over
            all devices, as traced; None if the strategy hides the traced step.
        products: the same by what they are computed in: `"bfloat16"`, `"TF32 (JAX's
            default for float32)"`.
        bubble: the share of the time in split layers that devices spend waiting for
            each other, by the strategy's schedule; `flops` counts it as work.
        traffic: the collectives, those with the most bytes first.
        leaves: every leaf of the state and of the batch.
        bounds: lower bounds, each with the value that was found.
        not_overwritten: paths of leaves that were donated but are copied anyway.
        estimate: the time of a step in seconds, if the hardware is known.
        compile_seconds: time to trace and compile the step.
        notes: what is exact, what is an estimate and what is unknown.
        limit: bytes per device that JAX gives programs, if they are known.
        remedies: up to three changes that need less memory, where the peak exceeds it.
        planner: compiles for other devices; None for the step in use.
    """

    device: str
    platform: str
    num_devices: int
    num_hosts: int
    mesh: dict[str, int]
    strategy: str
    rows: int
    micro_batches: int
    steps: int
    memory: Memory
    flops: float | None
    products: dict[str, float] | None
    bubble: float
    traffic: tuple[Traffic, ...]
    leaves: tuple[PlanLeaf, ...]
    bounds: tuple[Bound, ...]
    not_overwritten: tuple[str, ...]
    estimate: Estimate | None
    compile_seconds: float
    notes: dict[str, list[str]]
    limit: int | None = None
    remedies: tuple[Remedy, ...] = ()
    planner: Any = None

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits into what JAX gives programs; None if unknown."""
        return None if self.limit is None else self.memory.peak <= self.limit

    @property
    def wire_bytes(self) -> float:
        """The bytes that a device sends per step."""
        return sum(traffic.wire_bytes for traffic in self.traffic)

    def scaling(
        self,
        counts: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
    ) -> "Scaling":
        """Plans the same step for other numbers of devices, with as many rows on each.

        Args:
            counts: numbers of devices; each means one compilation.
        """
        planner = self._get_planner()
        per_shard = math.ceil(self._batch / planner.num_shards(self.num_devices))
        lines = []
        for count in counts:
            plan = planner.plan(count, per_shard * planner.num_shards(count))
            row = ScalingRow(count, plan.rows, plan.memory.peak, plan.wire_bytes)
            if (estimate := plan.estimate) is not None:
                row = row._replace(
                    step=estimate.worst,
                    rows_per_second=plan.rows / estimate.worst,
                    efficiency=estimate.efficiency,
                )
            lines.append(row)
        return Scaling(tuple(lines))

    def largest_batch(self, memory: int | float | None = None) -> int:
        """Finds the largest global batch that fits into memory, without running it.

        Compiles six to ten programs, and says how much memory each of them needs.

        Args:
            memory: bytes per device that may be used. Default: the memory that JAX
                takes of the device or of the plan's hardware (three quarters of a GPU,
                or XLA_CLIENT_MEM_FRACTION), less a tenth as a reserve.

        Returns:
            The number of rows; 0 if not even one row per shard fits.
        """
        planner = self._get_planner()
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
            log_info(
                f"{plan.rows} rows in a step need {format_bytes(plan.memory.peak)}"
            )
            return plan.memory.peak

        return find_largest(peak, limit, math.ceil(self._batch / shards)) * shards

    @property
    def _batch(self) -> int:
        return self.rows // self.micro_batches

    def _get_planner(self) -> Any:
        if self.planner is None:
            raise RuntimeError(
                "this plan was read from the running step, so it has no answer"
                " for other devices or batches; make one with"
                " `trainer.plan(loader)`."
            )
        return self.planner

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as JSON values."""
        names = [field.name for field in dataclasses.fields(self)]
        values = {name: _to_json(getattr(self, name)) for name in names[:-1]}
        for plain, bound in zip(values["bounds"], self.bounds, strict=True):
            plain["ratio"] = bound.ratio
        return values | {"wire_bytes": self.wire_bytes, "fits": self.fits}

    def __str__(self) -> str:
        parts = [f"Plan for {self.device}: {format_headline(self)}"]
        for title, lines in format_sections(self):
            parts.append("\n".join([title, *(f"  {line}" for line in lines)]))
        return "\n\n".join(parts)

    def __repr__(self) -> str:
        unfit = ", does not fit" if self.fits is False else ""
        return f"Plan({self.device}, peak {self.memory.peak:,} bytes per device{unfit})"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


class Scaling(NamedTuple):
    """A plan for each number of devices; `str` makes a table of it."""

    rows: tuple[ScalingRow, ...]

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        names = "devices rows peak/device sent/device step rows/s efficiency"
        rows = [names.split(), *map(_format_scaling_row, self.rows)]
        return "\n".join(format_columns(rows, right=range(len(rows[0]))))


def find_largest(peak: Callable[[int], float], limit: int, start: int = 1) -> int:
    """Finds the largest number whose peak is within the limit, if peaks grow with it.

    A peak is nearly a linear function of the number. So the line through two peaks
    leads close to the result, and a few more compilations find it.
    """
    known: dict[int, float] = {}
    low, high, number = 0, 1 << 40, start
    while high - low > 1:
        known[number] = peak(number)
        low, high = (number, high) if known[number] <= limit else (low, number)

        number = (low + high) // 2 if high in known else 2 * low
        nearest = sorted(known.items(), key=lambda each: abs(each[1] - limit))[:2]
        if len(nearest) == 2 and len(known) <= 8:
            (x, y), (u, v) = nearest
            slope = (v - y) / (u - x)
            if 0 < slope < math.inf:
                guess = max(low + 1, int(x + (limit - y) / slope))
                # Never 16 times as many at once, lest a program takes long to compile.
                number = min(guess, high - 1 if high in known else 16 * low)
    return low


def _to_json(value: Any) -> Any:
    """Returns a part of a plan as JSON values."""
    if hasattr(value, "_asdict"):
        return _to_json(value._asdict())
    if isinstance(value, dict):
        return {key: _to_json(part) for key, part in value.items()}
    return list(map(_to_json, value)) if isinstance(value, list | tuple) else value


_LABELS: Final = GROUPS | {"other": "step, key, sums"}
_NOTES: Final = {"exact": "Exact", "indicative": "Indicative", "unknown": "Not known"}

_MAX_LEAVES: Final = 10
"""The number of leaves that a section lists."""


def format_headline(plan: Any) -> str:
    """Returns the subject of a plan in one line."""
    hosts = f" on {plan.num_hosts} hosts" if plan.num_hosts > 1 else ""
    batches = f" in {plan.micro_batches} batches" if plan.micro_batches > 1 else ""
    steps = f", {plan.steps} steps at a time" if plan.steps > 1 else ""
    return f"{plan.strategy}{hosts}, {plan.rows} rows per step{batches}{steps}"


def format_sections(plan: Any) -> Iterator[tuple[str, list[str]]]:
    """Yields the sections of a plan, the most important first: titles, and lines."""
    # What it holds, sends and copies.
    yield "Memory per device", [*_format_memory(plan.memory), *_format_limit(plan)]
    if plan.remedies:
        rows = [
            (remedy.change, format_bytes(remedy.peak), "fits" * remedy.fits)
            for remedy in plan.remedies
        ]
        yield "Peaks with one change, compiled", format_columns(rows)
    sent = f"a device sends {format_bytes(plan.wire_bytes)} per step"
    traffic = format_columns(map(_format_traffic, plan.traffic)) or ["Nothing is sent."]
    yield f"Communication: {sent}", traffic
    bounds = [
        (
            f"{entry.ratio:.3f} x",
            format_bytes(entry.found),
            f"of {format_bytes(entry.least)}",
            entry.what,
        )
        for entry in plan.bounds
    ]
    yield "Lower bounds of this layout", format_columns(bounds)
    yield "Donation", [_format_donation(plan)]

    # What it computes, and how long that takes.
    yield "Operations", _format_operations(plan)
    if (estimate := plan.estimate) is not None:
        yield f"Time on {estimate.hardware} at its peaks", _format_estimate(plan)
    yield "Compilation", [f"Traced and compiled in {plan.compile_seconds:.1f} s."]
    for kind, notes in plan.notes.items():
        if notes:
            yield _NOTES[kind], [f"- {note}" for note in notes]


def _format_memory(memory: Memory) -> list[str]:
    """Lists the parts of the peak; alignment counts for the smallest group."""
    held = {label: getattr(memory, name) for name, label in _LABELS.items()}
    held[_LABELS["other"]] += memory.arguments - sum(held.values())
    held["new results"] = memory.results - memory.overwritten
    held["temporary"] = memory.temporary
    held["batches that wait"] = memory.in_flight
    parts = {label: size for label, size in held.items() if size}
    parts["peak"] = memory.peak
    moved = []
    if memory.host:
        parts["optimizer state on the host"] = memory.host
        moved = [
            "Each step moves it to the device and back. The compiler moves it as"
            " early as the device's memory allows; it then counts as temporary."
        ]
    rows = [(label, format_bytes(size), f"{size:,}") for label, size in parts.items()]
    return [*format_columns(rows), *moved]


def _format_limit(plan: Any) -> list[str]:
    if plan.limit is None:
        return []
    fits = "fits" if plan.fits else "does NOT fit"
    return [f"The peak {fits} into the {format_bytes(plan.limit)} that JAX takes."]


def _format_traffic(each: Traffic) -> tuple[str, ...]:
    axes = "other groups" if each.axes is None else ", ".join(each.axes) or "-"
    times = f"{each.count} x ?" if each.times is None else str(each.count * each.times)
    extras = {
        "between hosts": each.crosses,
        "behind matrix products": each.hidden,
        "beside computation": each.overlapped and not each.hidden,
        "in a branch": each.optional,
        "in a loop of unknown length": each.times is None,
    }
    remarks = ", ".join(words for words, is_so in extras.items() if is_so)
    return (
        each.kind,
        f"{axes} ({each.group_size})",
        each.dtype,
        f"{times} x",
        format_bytes(each.operand_bytes),
        format_bytes(each.wire_bytes),
        each.part + (f" ({remarks})" if remarks else ""),
    )


def _format_donation(plan: Any) -> str:
    state = [leaf for leaf in plan.leaves if leaf.group != "batch" and leaf.bytes]
    over = [leaf for leaf in state if leaf.overwritten]
    size = format_bytes(sum(leaf.bytes_per_device for leaf in over))
    sentence = (
        f"{len(over)} of {len(state)} leaves of the state are overwritten, {size}."
    )
    if plan.not_overwritten:
        listed = ", ".join(plan.not_overwritten[:_MAX_LEAVES])
        more = len(plan.not_overwritten) - _MAX_LEAVES
        listed += f" and {more} more" if more > 0 else ""
        sentence += f" Donated but copied anyway: {listed}."
    elif not over:
        sentence += " Nothing is donated, so a step needs the memory of two states."
    return sentence


def _format_operations(plan: Any) -> list[str]:
    count, lines = plan.flops, []
    if count is not None:
        lines += [
            f"{format_short(count)}FLOP per step in matrix products and convolutions,"
            f" as traced: {format_short(count / plan.num_devices)}FLOP per device,"
            f" {format_short(count / plan.rows)}FLOP per row."
        ]
        shares = [
            f"{number / count:.0%} in {name}"
            for name, number in plan.products.items()
            if number
        ]
        lines += [f"Computed {', '.join(shares)}."] * bool(shares)
    if plan.bubble:
        lines += [f"Stages wait for {plan.bubble:.1%} of the blocks' time."]
    return lines or ["Not known for this strategy."]


def _format_estimate(plan: Any) -> list[str]:
    estimate = plan.estimate
    return [
        f"{format_seconds(estimate.best)} to {format_seconds(estimate.worst)} per step,"
        f" {format_short(plan.rows / estimate.worst)} rows/s: computing"
        f" {format_seconds(estimate.compute)}, memory"
        f" {format_seconds(estimate.memory)}, communication"
        f" {format_seconds(estimate.communication)}; efficiency"
        f" {estimate.efficiency:.0%} or more of one device.",
    ]


def _format_scaling_row(row: ScalingRow) -> tuple[str, ...]:
    return (
        str(row.devices),
        str(row.rows),
        format_bytes(row.peak),
        format_bytes(row.wire_bytes),
        "-" if row.step is None else format_seconds(row.step),
        "-" if row.rows_per_second is None else format_short(row.rows_per_second),
        "-" if row.efficiency is None else f"{row.efficiency:.0%}",
    )
