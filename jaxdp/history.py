"""The history of a run: the means of each epoch."""

import csv
import io
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jaxdp

from .basics.columns import MEMBER
from .basics.console import format_columns
from .basics.files import add_path_to_errors, expand_path, write_text_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def rank(value: float, mode: str) -> tuple[bool, float]:
    """Returns a sort key that puts the best value first, by `mode`, and NaN last."""
    is_nan = math.isnan(value)
    return is_nan, 0.0 if is_nan else value if mode == "min" else -value


class History(Mapping[str, list[float]]):
    """The means of every epoch, by name: `history["val_loss"][-1]`.

    A mapping from names to lists with one float for each of `history.epochs`, NaN
    where an epoch did not have that value. `dict(history)` is a plain copy, ready for a
    data frame. Epochs count from 0 here, in files, plots, the progress bar and
    messages.
    """

    def __init__(self) -> None:
        self.epochs: list[int] = []
        """The epochs of this history, counted from 0."""
        self._values: dict[str, list[float | None]] = {}  # None: not measured

    def __getitem__(self, name: str) -> list[float]:
        if name not in self._values:
            known = ", ".join(map(repr, self._values)) or "none yet"
            raise KeyError(
                f"`history[{name!r}]`: nothing of that name was logged; known names:"
                f" {known}."
            )
        return [math.nan if v is None else v for v in self._values[name]]

    @property
    def history(self) -> dict[str, list[float]]:
        """A plain copy: the dict of lists that Keras's `History.history` is."""
        return dict(self)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def append(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Adds the means of an epoch, or updates those of the last one.

        Args:
            epoch: counted from 0, not before the last one. The last one again, which
                was interrupted and has been finished, gets new values.
            metrics: floats by name; names may come and go.
        """
        if not self.epochs or epoch > self.epochs[-1]:
            self.epochs.append(epoch)
            for values in self._values.values():
                values.append(None)
        for name, value in metrics.items():
            if name not in self._values:
                self._values[name] = [None] * len(self.epochs)
            self._values[name][-1] = float(value)

    def plot(self, path: str | os.PathLike[str] | None = None) -> "Figure":
        """Draws every metric, training and validation in the same axes.

        Of an ensemble, the means over members are drawn.

        Args:
            path: where to save the picture too, in the format of the suffix
                (`curves.png`); missing folders are made.

        Returns:
            A `matplotlib.figure.Figure` that belongs to no window.
        """
        return jaxdp.figures.plot_history(self, path)

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
        path = expand_path(path)
        with add_path_to_errors(path, "History.to_csv"):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(path, text.getvalue())

    def state_dict(self) -> dict[str, Any]:
        """Returns the history as JSON values; NaN and infinity are strings."""
        return {
            "epochs": list(self.epochs),
            "metrics": {
                name: [v if v is None or math.isfinite(v) else str(v) for v in values]
                for name, values in self._values.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces this history by one that `state_dict` returned."""
        self.epochs = [int(epoch) for epoch in state["epochs"]]
        self._values = {
            name: [None if v is None else float(v) for v in values]
            for name, values in state["metrics"].items()
        }

    def __repr__(self) -> str:
        if not self.epochs:
            return "History(no epochs yet)"
        count = len(self.epochs)
        shown = range(count) if count <= 4 else (0, *range(count - 3, count))
        cells = {"epoch": list(map(str, self.epochs))}
        # Of an ensemble, show the means and no single members: there may be hundreds.
        names = [name for name in self if not MEMBER.search(name)]
        cells |= {name: [f"{v:.4g}" for v in self[name]] for name in names}
        table = [list(cells)]
        table += [[values[i] for values in cells.values()] for i in shown]
        title = f"History({count} {'epoch' if count == 1 else 'epochs'})"
        return "\n".join([title, *format_columns(table, right=range(len(cells)))])
