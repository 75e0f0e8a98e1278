"""What a run measured, epoch by epoch, and how it is drawn."""

import csv
import functools
import io
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .basics.files import naming, replacing, write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

VALIDATION = "val_"
"""What the names of validation means begin with."""


class History(Mapping[str, list[float]]):
    """The means of every epoch, by name: `history["val_loss"][-1]`.

    A mapping from names to lists with one float for each of `history.epochs`, NaN
    where an epoch did not have that value. `dict(history)` is a plain copy, ready for
    a data frame.
    """

    def __init__(self) -> None:
        self.epochs: list[int] = []
        """Which epochs are in here, counted from 0."""
        self._values: dict[str, list[float | None]] = {}  # None: not measured

    def __getitem__(self, name: str) -> list[float]:
        if name not in self._values:
            known = ", ".join(map(repr, self._values)) or "none yet"
            raise KeyError(
                f"`history[{name!r}]`: nothing of that name was logged; known names:"
                f" {known}."
            )
        return [math.nan if v is None else v for v in self._values[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def append(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Adds the means of an epoch, or to those of the last one.

        Args:
            epoch: counted from 0; the last one again (an epoch that was interrupted
                and finished) overwrites its values.
            metrics: floats by name; names may come and go.
        """
        if self.epochs and epoch < self.epochs[-1]:
            raise ValueError(
                f"`epoch`={epoch} comes before the last one, {self.epochs[-1]}; epochs"
                " must be appended in order."
            )
        if not self.epochs or epoch > self.epochs[-1]:
            self.epochs.append(epoch)
            for values in self._values.values():
                values.append(None)
        for name, value in metrics.items():
            missing: list[float | None] = [None] * len(self.epochs)
            self._values.setdefault(name, missing)[-1] = float(value)

    def plot(self, path: str | os.PathLike[str] | None = None) -> "Figure":
        """Draws every metric, training and validation in the same axes.

        Args:
            path: where to save the picture too, as the suffix says (`curves.png`);
                missing folders are made.

        Returns:
            A `matplotlib.figure.Figure` that belongs to no window.
        """
        panels: dict[str, Panel] = {}
        x = [epoch + 1 for epoch in self.epochs]
        for name, values in self._values.items():
            points = [
                (a, b)
                for a, b in zip(x, values, strict=True)
                if b is not None and math.isfinite(b)
            ]
            panel = panels.setdefault(name.removeprefix(VALIDATION), Panel([], []))
            is_validation = name.startswith(VALIDATION)
            (panel.validation if is_validation else panel.training).extend(points)
        figure = draw(
            panels, "epoch", limits=(float(x[0]), float(x[-1])) if x else None
        )
        if path is not None:
            save_figure(figure, path)
        return figure

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Writes one row per epoch: `epoch` (from 0), then every name.

        A cell is empty where nothing was measured.
        """
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(["epoch", *self._values])
        for i, epoch in enumerate(self.epochs):
            row = [values[i] for values in self._values.values()]
            writer.writerow([epoch, *("" if v is None else v for v in row)])
        with naming(path, "History.to_csv"):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text.getvalue())

    def state_dict(self) -> dict[str, Any]:
        """The whole history as JSON values; numbers that JSON lacks are strings."""
        return {
            "epochs": list(self.epochs),
            "metrics": {
                name: [v if v is None or math.isfinite(v) else str(v) for v in values]
                for name, values in self._values.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave, in place of what is here."""
        self.epochs = [int(epoch) for epoch in state["epochs"]]
        self._values = {
            name: [None if v is None else float(v) for v in values]
            for name, values in state["metrics"].items()
        }

    def __repr__(self) -> str:
        if not self.epochs:
            return "History(no epochs yet)"
        count, best = len(self.epochs), self._best()
        title = f"History({count} {'epoch' if count == 1 else 'epochs'})"
        shown = {0: "", count - 1: ""} if count > 4 else dict.fromkeys(range(count), "")
        if best is not None:
            shown[best[1]] = f"  <- best {best[0]}"
        table = [["epoch", *self._values]]
        for i in sorted(shown):
            if i > 0 and i - 1 not in shown:
                table.append(["..."] * len(table[0]))
            values = [_short(column[i]) for column in self._values.values()]
            table.append([str(self.epochs[i]), *values])
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [title]
        for row in table:
            cells = zip(row, widths, strict=True)
            lines.append("  ".join(cell.rjust(width) for cell, width in cells))
            if row[0].isdecimal():
                lines[-1] += shown[self.epochs.index(int(row[0]))]
        return "\n".join(lines)

    def _best(self) -> tuple[str, int] | None:
        """The name that says which epoch was best, and where that one is."""
        for name in (f"{VALIDATION}loss", "loss"):
            finite = [
                (v, i)
                for i, v in enumerate(self._values.get(name, []))
                if v is not None and math.isfinite(v)
            ]
            if finite:
                return name, min(finite)[1]
        return None


class Panel(NamedTuple):
    """The curves of one metric, each a list of `(x, y)` points."""

    training: list[tuple[float, float]]
    validation: list[tuple[float, float]]
    steps: Sequence[tuple[float, float]] = ()
    """Values of single steps: drawn thin, with a smoothed curve over them."""


def draw(
    panels: Mapping[str, Panel],
    xlabel: str,
    limits: tuple[float, float] | None = None,
) -> "Figure":
    """A figure with one pair of axes for each metric."""
    figure_type, integer_ticks = _matplotlib()
    count = max(len(panels), 1)
    columns = 2 if count == 4 else min(count, 3)
    rows = -(-count // columns)
    figure = figure_type(
        figsize=(4.6 * columns if columns > 1 else 6.0, 3.4 * rows),
        dpi=120,
        layout="constrained",
    )
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    # Notebooks show what has this method, without matplotlib's global state.
    figure._repr_png_ = functools.partial(to_png, figure)
    for index, (name, panel) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, columns, index + 1)
        _draw_panel(axes, panel)
        axes.set_xlabel(xlabel)
        axes.set_ylabel(name.replace("_", " "))
        axes.xaxis.set_major_locator(integer_ticks())
        if limits is not None:
            low, high = limits
            margin = 0.03 * (high - low) or 0.6
            axes.set_xlim(low - margin, high + margin)
    return figure


def to_png(figure: "Figure") -> bytes:
    """The figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def save_figure(figure: "Figure", path: str | os.PathLike[str]) -> None:
    """Saves the figure in one piece: who looks sees the old picture or the new one."""
    path = Path(path)
    kind = path.suffix.removeprefix(".") or "png"
    with naming(path, "plot"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            figure.savefig(temporary, format=kind)


def _draw_panel(axes: "Axes", panel: Panel) -> None:
    if panel.steps:
        x, y = zip(*panel.steps, strict=True)
        axes.plot(x, y, color="0.82", linewidth=0.8)
        axes.plot(x, _smoothed(y), color="0.5", linewidth=1.3, label="steps, smoothed")
    few = len(panel.training) + len(panel.validation) <= 80
    marker = {"marker": "o", "markersize": 4.5} if few else {}
    for label, color in (("training", "C0"), ("validation", "C1")):
        if curve := getattr(panel, label):
            x, y = zip(*curve, strict=True)
            axes.plot(x, y, color=color, label=label, **marker)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    values = [y for curve in panel for _, y in curve]
    if values and min(values) > 0 and max(values) > 200 * min(values):
        axes.set_yscale("log")
    if values:
        axes.legend(frameon=False)


def _smoothed(values: Sequence[float]) -> np.ndarray:
    """Means over a window of a tenth of the curve, cut off where the curve ends."""
    count = len(values)
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    place = np.arange(count)
    first = np.maximum(place - count // 20, 0)
    last = np.minimum(place + count // 20, count - 1)
    return (sums[last + 1] - sums[first]) / (last + 1 - first)


def _matplotlib() -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError(
            "Drawing curves needs matplotlib, which is not installed; run"
            ' `pip install "jaxdp[examples]"`.'
        ) from error
    return Figure, functools.partial(
        MaxNLocator, integer=True, nbins=8, steps=[1, 2, 5, 10], min_n_ticks=1
    )


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
