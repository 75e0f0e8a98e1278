"""A plan in words."""

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from ..basics.console import columns
from ..basics.units import in_bytes, in_seconds, in_short
from .parts import GROUPS, Memory, Row, Traffic

_LABELS: Final = GROUPS | {"other": "step, key, sums"}
_NOTES: Final = {"exact": "Exact", "indicative": "Indicative", "unknown": "Not known"}

_MOST: Final = 10
"""How many leaves a section lists."""


class Section(NamedTuple):
    """A part of the report: a table, and sentences."""

    title: str
    rows: Sequence[Sequence[str]] = ()
    lines: Sequence[str] = ()


def text(plan: Any) -> str:
    """The report for a terminal."""
    parts = [f"Plan for {plan.device}: {headline(plan)}"]
    for section in sections(plan):
        lines = [*columns(section.rows), *section.lines]
        parts.append("\n".join([section.title, *(f"  {line}" for line in lines)]))
    return "\n\n".join(parts)


def headline(plan: Any) -> str:
    """What is planned, in one line."""
    hosts = f" on {plan.num_hosts} hosts" if plan.num_hosts > 1 else ""
    batches = f" in {plan.micro_batches} batches" if plan.micro_batches > 1 else ""
    steps = f", {plan.steps} steps at a time" if plan.steps > 1 else ""
    return f"{plan.strategy}{hosts}, {plan.rows} rows per step{batches}{steps}"


def sections(plan: Any) -> Iterator[Section]:
    """All that a plan has to say, the most important first."""
    # What it holds, sends and copies.
    yield _memory(plan.memory)

    yield Section(
        f"Communication: a device sends {in_bytes(plan.wire_bytes)} per step",
        [_traffic(entry) for entry in plan.traffic],
        ["Nothing is sent."] * (not plan.traffic),
    )
    yield Section(
        "Lower bounds of this layout",
        [
            (
                f"{entry.ratio:.3f} x",
                in_bytes(entry.found),
                f"of {in_bytes(entry.least)}",
                entry.what,
            )
            for entry in plan.bounds
        ],
    )
    yield Section("Donation", lines=[_donation(plan)])

    # What it computes, and how long that takes.
    yield Section("Operations", lines=_operations(plan))
    if plan.estimate is not None:
        yield _estimate(plan)
    traced, took = plan.trace_seconds, f"compiled in {plan.compile_seconds:.1f} s."
    begin = "Traced and " if traced is None else f"Traced in {traced:.1f} s, "
    yield Section("Compilation", lines=[begin + took])
    for kind, notes in plan.notes.items():
        if notes:
            yield Section(_NOTES[kind], lines=[f"- {note}" for note in notes])


def scaling_table(scaling: Any) -> str:
    """A line per number of devices."""
    names = "devices rows peak/device sent/device step rows/s efficiency"
    rows = [names.split(), *map(_scaling_row, scaling.rows)]
    return "\n".join(columns(rows, right=range(len(rows[0]))))


def _memory(memory: Memory) -> Section:
    """What the peak is made of; alignment goes to the smallest of what is held."""
    held = {label: getattr(memory, name) for name, label in _LABELS.items()}
    held[_LABELS["other"]] += memory.arguments - sum(held.values())
    held["new results"] = memory.results - memory.overwritten
    held["temporary"] = memory.temporary
    held["batches that wait"] = memory.in_flight
    shown = {label: size for label, size in held.items() if size}
    shown["peak"] = memory.peak
    moved = []
    if memory.host:
        shown["optimizer state on the host"] = memory.host
        moved = [
            "Each step moves it to the device and back. The compiler moves it as"
            " early as the device's memory allows; it then counts as temporary."
        ]
    return Section(
        "Memory per device",
        [(label, in_bytes(size), f"{size:,}") for label, size in shown.items()],
        [
            f"All gradients together take {in_bytes(memory.gradients)}. The"
            " compiler decides how many of them exist at a time; the peak"
            " includes them.",
            *moved,
        ],
    )


def _traffic(each: Traffic) -> tuple[str, ...]:
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
        in_bytes(each.operand_bytes),
        in_bytes(each.wire_bytes),
        each.part + (f" ({remarks})" if remarks else ""),
    )


def _donation(plan: Any) -> str:
    state = [leaf for leaf in plan.leaves if leaf.group != "batch" and leaf.bytes]
    over = [leaf for leaf in state if leaf.overwritten]
    size = in_bytes(sum(leaf.bytes_per_device for leaf in over))
    sentence = (
        f"{len(over)} of {len(state)} leaves of the state are overwritten, {size}."
    )
    if plan.not_overwritten:
        listed = ", ".join(plan.not_overwritten[:_MOST])
        more = len(plan.not_overwritten) - _MOST
        listed += f" and {more} more" if more > 0 else ""
        sentence += f" Donated but copied anyway: {listed}."
    elif not over:
        sentence += " Nothing is donated, so a step needs the memory of two states."
    return sentence


def _operations(plan: Any) -> list[str]:
    count, lines = plan.flops, []
    if count is not None:
        lines += [
            f"{in_short(count)}FLOP per step in matrix products and convolutions, as"
            f" traced: {in_short(count / plan.num_devices)}FLOP per device,"
            f" {in_short(count / plan.rows)}FLOP per row."
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


def _estimate(plan: Any) -> Section:
    estimate = plan.estimate
    fits = "fits" if estimate.fits else "does NOT fit"
    return Section(
        f"Time on {estimate.hardware} at its peaks",
        lines=[
            f"{in_seconds(estimate.best)} to {in_seconds(estimate.worst)} per step,"
            f" {in_short(plan.rows / estimate.worst)} rows/s: computing"
            f" {in_seconds(estimate.compute)}, memory {in_seconds(estimate.memory)},"
            f" communication {in_seconds(estimate.communication)}; efficiency"
            f" {estimate.efficiency:.0%} or more of one device.",
            f"The peak {fits} into what JAX takes of its memory.",
        ],
    )


def _scaling_row(row: Row) -> tuple[str, ...]:
    return (
        str(row.devices),
        str(row.rows),
        in_bytes(row.peak),
        in_bytes(row.wire_bytes),
        "-" if row.step is None else in_seconds(row.step),
        "-" if row.rows_per_second is None else in_short(row.rows_per_second),
        "-" if row.efficiency is None else f"{row.efficiency:.0%}",
    )
