"""Draws the curves of a run while it trains."""

import os
import time
from pathlib import Path
from typing import Any, Final

from ..basics.arguments import check_number, checks_arguments
from ..basics.columns import EPOCH, VALIDATION
from ..callbacks.base import Trainer
from ..callbacks.logger import Logger
from ..callbacks.monitor import is_in_notebook
from ..record import Number
from .figures import draw, metric_curves, save_figure, to_png

_MAX_SHARE: Final = 0.05
"""The maximum share of the time that drawing may take."""


class LivePlot(Logger):
    """Draws the curves of a run while it trains: into a PNG file or a notebook cell.

    It draws what loggers write, every `trainer.log_every_n_steps` steps. The loss of
    single steps is a thin line, with a smoothed line over it; means of epochs and
    validations are points. The file is always complete. It is redrawn every few seconds
    (less often if drawing would take more than a twentieth of the time), and at the end
    of the fit. The device never waits for it.

    Args:
        path: the PNG file; None means `curves.png` in `trainer.default_root_dir`.
        every_n_seconds: the shortest time between two pictures.
    """

    @checks_arguments
    def __init__(
        self, path: str | os.PathLike[str] | None = None, every_n_seconds: float = 5.0
    ):
        check_number("every_n_seconds", every_n_seconds, minimum=0)
        super().__init__(None if path is None else Path(path).parent)
        self._name = "curves.png" if path is None else Path(path).name
        self.every_n_seconds = every_n_seconds
        self._columns: dict[str, list[tuple[float, float]]] = {"loss": []}

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.is_global_zero:
            draw({}, "")  # Raises when matplotlib is missing, before anything is lost.

    def open(self, trainer: Trainer, folder: Path) -> None:
        self._path, self._step = folder / self._name, trainer.global_step
        self._display: Any = None
        self._due = time.monotonic() + self.every_n_seconds
        self._columns = {
            name: [point for point in points if point[0] <= self._step]
            for name, points in self._columns.items()
        }

    def log(self, epoch: int, step: int, values: dict[str, Number]) -> None:
        self._step = step
        for name, value in values.items():
            if name == "loss" or name.startswith((EPOCH, VALIDATION)):
                self._columns.setdefault(name, []).append((step, value))
        if time.monotonic() > self._due:
            self._draw()

    def close(self) -> None:
        self._draw()

    def _draw(self) -> None:
        start = time.monotonic()
        names = [n.removeprefix(EPOCH).removeprefix(VALIDATION) for n in self._columns]
        charts = {
            name: metric_curves(
                *(
                    self._columns.get(prefix + name, [])
                    for prefix in (EPOCH, VALIDATION, "")
                )
            )
            for name in dict.fromkeys(names)
        }
        figure = draw(charts, "optimizer step", (0.0, float(self._step)))
        save_figure(figure, self._path)
        if is_in_notebook():
            self._show(to_png(figure))
        end = time.monotonic()
        self._due = end + max(self.every_n_seconds, (end - start) / _MAX_SHARE)

    def _show(self, png: bytes) -> None:
        """Replaces the picture in the notebook cell."""
        from IPython.core.display import Image
        from IPython.display import display

        image = Image(data=png, format="png")
        if self._display is None:
            self._display = display(image, display_id=True)
        else:
            self._display.update(image)
