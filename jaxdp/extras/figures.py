"""Charts of curves, drawn by matplotlib for files, notebooks and pages."""

import functools
import io
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ..basics.columns import MEMBER, VALIDATION
from ..basics.files import add_path_to_errors, expand_path, write_atomically
from ..history import History
from .import_package import import_package

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]

_MAX_MARKERS: Final = 80
"""A chart of more points has lines alone."""

_MAX_POINTS_FOR_PLACING: Final = 2000
"""With more points, matplotlib takes long to find the best place of the legend."""


class Curve(NamedTuple):
    """One line of a chart. Points that are not finite are left out."""

    label: str
    points: Points
    color: str
    """As matplotlib has them: "C0", "0.5"."""
    is_rough: bool = False
    """Whether it is drawn thin under a smoothed line, as the values of steps are."""


def metric_curves(
    training: Points, validation: Points, steps: Points = ()
) -> list[Curve]:
    """Returns the curves of one metric of one run."""
    return [
        Curve("steps, smoothed", steps, "0.5", is_rough=True),
        Curve("training", training, "C0"),
        Curve("validation", validation, "C1"),
    ]


def draw(
    charts: Mapping[str, Sequence[Curve]],
    xlabel: str,
    limits: tuple[float, float] | None = None,
) -> "Figure":
    """Draws a figure with a chart for every name.

    Args:
        charts: the curves of each chart.
        xlabel: the unit of the horizontal axes, which have whole numbers.
        limits: the ends of the horizontal axes.

    Raises:
        ImportError: without matplotlib; it says how to install it.
    """
    matplotlib = functools.partial(import_package, extra="plots", who="Drawing curves")
    figure_type: Any = matplotlib("matplotlib.figure").Figure
    ticks = matplotlib("matplotlib.ticker").MaxNLocator

    class NotebookFigure(figure_type):
        """A figure that notebooks show, without matplotlib's global state."""

        def _repr_png_(self) -> bytes:
            return to_png(self)

    # Up to three in a row; of four, two.
    count = max(len(charts), 1)
    columns = 2 if count == 4 else min(count, 3)
    rows = -(-count // columns)
    figure = NotebookFigure(
        figsize=(4.6 * columns if columns > 1 else 6.0, 3.4 * rows),
        dpi=120,
        layout="constrained",
    )
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)

    # One chart each.
    for index, (name, curves) in enumerate(charts.items()):
        axes = figure.add_subplot(rows, columns, index + 1)
        _draw_chart(axes, curves)
        axes.set_xlabel(xlabel)
        axes.set_ylabel(name.replace("_", " "), parse_math=False)
        axes.xaxis.set_major_locator(
            ticks(integer=True, nbins=8, steps=[1, 2, 5, 10], min_n_ticks=1)
        )
        if limits is not None:
            low, high = limits
            margin = 0.03 * (high - low) or 0.6
            axes.set_xlim(low - margin, high + margin)
    return figure


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Saves a figure of matplotlib atomically, in the format of its suffix."""
    path = Path(expand_path(path))
    kind = path.suffix.removeprefix(".") or "png"
    with add_path_to_errors(path, "plot"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(path) as temporary:
            figure.savefig(temporary, format=kind)


def plot_history(history: History, path: Any) -> "Figure":
    """Implements `History.plot`."""
    if isinstance(path, str) and path in history:
        raise ValueError(
            f"`path`={path!r} is the name of a metric; plot() draws all of them. (A"
            " path ends with the format, such as 'curves.png'.)"
        )
    if path is not None and not Path(path).suffix:
        raise ValueError(
            f"`path`={os.fspath(path)!r} lacks the suffix that says the format, such as"
            " 'curves.png'. (plot() draws all metrics.)"
        )
    x = [float(epoch) for epoch in history.epochs]
    points = {name: list(zip(x, history[name], strict=True)) for name in history}
    means = [name for name in history if not MEMBER.search(name)]
    charts = {
        name: metric_curves(points.get(name, []), points.get(VALIDATION + name, []))
        for name in dict.fromkeys(mean.removeprefix(VALIDATION) for mean in means)
    }
    figure = draw(charts, "epoch", limits=(x[0], x[-1]) if x else None)
    if path is not None:
        save_figure(figure, path)
    return figure


def to_png(figure: "Figure") -> bytes:
    """Returns the figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_chart(axes: "Axes", curves: Sequence[Curve]) -> None:
    finite = [
        curve._replace(points=[p for p in curve.points if all(map(math.isfinite, p))])
        for curve in curves
    ]
    drawable = [curve for curve in finite if curve.points]
    count = sum(len(curve.points) for curve in drawable if not curve.is_rough)
    marker = {"marker": "o", "markersize": 4.5} if count <= _MAX_MARKERS else {}

    for curve in drawable:
        x, y = zip(*curve.points, strict=True)
        # matplotlib leaves labels that begin with "_" out.
        label = f" {curve.label}" if curve.label.startswith("_") else curve.label
        if curve.is_rough:
            axes.plot(x, y, color=curve.color, alpha=0.35, linewidth=0.8)
            smooth = _smooth(y)
            axes.plot(x, smooth, color=curve.color, linewidth=1.3, label=label)
        else:
            axes.plot(x, y, color=curve.color, label=label, **marker)

    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    values = [y for curve in drawable for _, y in curve.points]
    if values and min(values) > 0 and max(values) > 200 * min(values):
        axes.set_yscale("log")
    if values:
        legend = axes.legend(
            frameon=False,
            loc="best" if len(values) <= _MAX_POINTS_FOR_PLACING else "upper right",
            fontsize="medium" if len(drawable) <= 4 else "x-small",
        )
        for text in legend.get_texts():
            text.set_parse_math(False)


def _smooth(values: Sequence[float]) -> np.ndarray:
    """Returns means over a window of a tenth of the curve."""
    from scipy.ndimage import uniform_filter1d

    window = 2 * (len(values) // 20) + 1
    return uniform_filter1d(np.asarray(values, float), window, mode="mirror")
