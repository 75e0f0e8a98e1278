"""Turns rounds of measurements into ratios, a Markdown table and a chart."""

import importlib.metadata
import math
import os
import platform
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .peers import PEERS
from .works import WORKS

Rounds = Sequence[dict[str, Any]]

BUSY = 0.1
"""The part of the cores' time that others may take while something is measured."""

PACKAGES = (
    *("jax", "jaxlib", "equinox", "optax", "numpy", "torch"),
    *("keras", "flax", "lightning", "jaxdp"),
)


def describe_machine() -> dict[str, Any]:
    """Describes the machine that the figures belong to."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


def is_quiet(one: dict[str, Any], *peers: str) -> bool:
    """Returns True if other programs left the machine idle while `peers` were
    measured.
    """
    return all(one["busy"].get(peer, 0.0) <= BUSY for peer in peers)


def _measured(rounds: Rounds, work: str, *peers: str) -> list[list[float]]:
    """Returns the times of `peers` in rounds that have all of them; quiet rounds if
    any.
    """
    found = [
        one
        for one in rounds
        if one["work"] == work and {*peers} <= one["seconds_per_step"].keys()
    ]
    found = [one for one in found if is_quiet(one, *peers)] or found
    return [[one["seconds_per_step"][peer] for peer in peers] for one in found]


def seconds(rounds: Rounds, work: str, peer: str) -> float | None:
    """Returns the median time of a step, or None if it was not measured."""
    found = [time for (time,) in _measured(rounds, work, peer)]
    return statistics.median(found) if found else None


def ratio(rounds: Rounds, work: str, peer: str) -> float | None:
    """Returns the median ratio of times to the expert's of the same round, or None."""
    found = [
        time / experts for time, experts in _measured(rounds, work, peer, "expert")
    ]
    return statistics.median(found) if found else None


def ratios(rounds: Rounds) -> dict[str, dict[str, float]]:
    """Returns the ratios by work and peer."""
    table: dict[str, dict[str, float]] = {}
    for work in _works(rounds):
        found = {peer: ratio(rounds, work, peer) for peer in PEERS}
        table[work] = {peer: r for peer, r in found.items() if r is not None}
    return table


def markdown(rounds: Rounds) -> str:
    """Formats a table of ratios, with a row per peer and a column per work."""
    works, table = _works(rounds), ratios(rounds)
    lines = [f"| loop | {' | '.join(works)} |", f"|---|{'---|' * len(works)}"]
    for name, peer in PEERS.items():
        row = [table[work].get(name) for work in works]
        if name == "expert":
            cells = [f"1 ({_time(seconds(rounds, work, name))})" for work in works]
        elif any(value is not None for value in row):
            cells = ["" if value is None else f"{value:.2f}" for value in row]
        else:
            continue
        title = f"**{peer.title}**" if name.startswith("jaxdp") else peer.title
        lines.append(f"| {title} | {' | '.join(cells)} |")
    counts = ", ".join(
        f"{work} {sum(one['work'] == work for one in rounds)}" for work in works
    )
    titles = "; ".join(f"{work}: {WORKS[work].title}" for work in works)
    lines += ["", f"{titles}.", "", f"Rounds: {counts}."]
    loud = sum(not is_quiet(one, *one["busy"]) for one in rounds)
    if loud:
        lines += [
            f"In {loud} rounds of {len(rounds)} other programs took more than a tenth"
            " of the cores' time; they count only where there is no quiet one."
        ]
    lines += [f"Not run: {note}." for note in sorted(_notes(rounds))]
    return "\n".join(lines) + "\n"


def draw(rounds: Rounds, path: Path) -> None:
    """Draws bars of the ratios, one panel for each work, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    works, table = _works(rounds), ratios(rounds)
    columns = min(2, len(works))
    rows = math.ceil(len(works) / columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4.7 * columns, 3.4 * rows), squeeze=False
    )
    for axis in axes.flat[len(works) :]:
        axis.set_visible(False)
    for work, axis in zip(works, axes.flat, strict=False):
        found = table[work]
        # The chart omits peers that do only part of the work; the table has them.
        names = [name for name in found if name not in ("loading", "computing")]
        names.sort(key=lambda name: -found[name])
        colors = [
            "#c2410c" if name.startswith("jaxdp") else "#94a3b8" for name in names
        ]
        colors = [
            "#334155" if name == "expert" else color
            for name, color in zip(names, colors, strict=True)
        ]
        titles = [PEERS[name].title for name in names]
        values = [found[name] for name in names]
        bars = axis.barh(titles, values, color=colors)
        axis.axvline(1, color="#334155", linewidth=0.8)
        # Labels have white boxes, so that the line at 1 does not run through them.
        axis.bar_label(
            bars,
            [f"{value:.2f}" for value in values],
            padding=3,
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )
        axis.set_xscale("log")
        axis.set_xlim(min(0.5, 0.7 * min(values)), 2.2 * max(values))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        axis.tick_params(labelsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        title = textwrap.fill(f"{work}: {WORKS[work].title}", 36)
        expert = _time(seconds(rounds, work, "expert"))
        axis.set_title(f"{title}\nE takes {expert}", fontsize=10)
    figure.suptitle("Time of a step over that of E, a loop by hand (shorter is faster)")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    pyplot.close(figure)


def _works(rounds: Rounds) -> list[str]:
    measured = {one["work"] for one in rounds if one["seconds_per_step"]}
    return [name for name in WORKS if name in measured]


def _notes(rounds: Rounds) -> set[str]:
    """Returns why peers are missing: their reason, or the end of their output."""
    return {
        f"{PEERS[peer].title} on {one['work']} ({' '.join(reason.split())[-200:]})"
        for one in rounds
        for peer, reason in {**one["skipped"], **one["failed"]}.items()
        if seconds(rounds, one["work"], peer) is None
    }


def _time(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value * 1e6:.0f} us" if value < 1e-3 else f"{value * 1e3:.3g} ms"
