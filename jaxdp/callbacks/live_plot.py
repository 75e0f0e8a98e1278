"""Curves that grow while the run goes."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..basics.arguments import check_number
from ..basics.columns import EPOCH, VALIDATION
from ..basics.figures import draw, metric_curves, to_png
from ..basics.files import save_figure
from .base import Callback, Trainer
from .logger import check_writable, epoch_means
from .monitor import LateReads, in_notebook

_MAX_POINTS: Final = 1000
"""Steps kept for drawing; with more, every second one is dropped."""
_MAX_SHARE: Final = 0.05
"""Of the time, that may go into drawing."""


class LivePlot(Callback):
    """Draws the curves of a run while it trains: into a PNG file or a notebook cell.

    The loss of single steps is a thin line, with a smoothed line over it; means of
    epochs and validations are points. The file is always complete. It is redrawn every
    few seconds (less often if drawing would take more than a twentieth of the time),
    and at the end of each epoch and of the fit. The device never waits for it.

    Args:
        path: the PNG file; None means `curves.png` in `trainer.default_root_dir`.
        every_n_seconds: the shortest time between two pictures.
    """

    looks_inside_blocks = False
    only_in_training = True
    reads_logged = True
    skip_in_fast_dev_run = True

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        every_n_seconds: float = 5.0,
    ):
        check_number("every_n_seconds", every_n_seconds, least=0)
        self.path = path
        self.every_n_seconds = every_n_seconds
        self._late = LateReads()
        self._forget()
        self._drawn = 0.0
        self._pause = every_n_seconds
        self._display: Any = None
        self._fitting = False

    def setup(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            check_writable(self._file(trainer).parent, "LivePlot")
            draw({}, "")  # Raises when matplotlib is missing, before anything is lost.

    def on_fit_start(self, trainer: Trainer) -> None:
        self._fitting = bool(trainer.is_global_zero)
        self._late = LateReads()
        self._display = None
        self._drawn = time.monotonic()
        if any(step > trainer.global_step for step, _ in self._columns["loss"][-1:]):
            self._forget()

    def on_train_batch_end(
        self, trainer: Trainer, metrics: Mapping[str, Any], batch_idx: int
    ) -> None:
        if not self._fitting:
            return
        step = trainer.global_step
        if step % self._stride == 0:
            self._late.push(step, step, metrics)
        is_due = time.monotonic() > self._drawn + self._pause
        if is_due or len(self._late) > 64:
            self._read(self._late.ready(step))
        if is_due:
            self._draw(trainer)

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        self._add(trainer, metrics)

    def on_train_epoch_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        if not self._fitting:
            return
        self._read(self._late.drain())
        self._add(trainer, epoch_means(trainer, metrics))
        # Epochs of a few milliseconds share a picture.
        if time.monotonic() > self._drawn + 0.2 * self._pause:
            self._draw(trainer)

    def on_exception(self, trainer: Trainer, exception: BaseException) -> None:
        try:
            self._read(self._late.drain())
        finally:
            self._late = LateReads()  # the device may be what failed

    def on_fit_end(self, trainer: Trainer) -> None:
        if self._fitting:
            self._read(self._late.drain())
            self._draw(trainer)
        self._fitting = False

    def _file(self, trainer: Trainer) -> Path:
        return Path(
            self.path or Path(trainer.default_root_dir) / "curves.png"
        ).expanduser()

    def _forget(self) -> None:
        # The loss of steps and the means, by the names that loggers give them.
        self._columns: dict[str, list[tuple[float, float]]] = {}
        self._columns |= {"loss": [], EPOCH + "loss": []}
        self._stride = 1

    def _read(self, past: Any) -> None:
        steps = self._columns["loss"]
        for step, metrics in past:
            loss = float(metrics["loss"])
            if np.isfinite(loss):
                steps.append((step, loss))
        while len(steps) > _MAX_POINTS:
            self._stride *= 2
            steps[:] = [p for p in steps if p[0] % self._stride == 0]

    def _add(self, trainer: Trainer, means: Mapping[str, float]) -> None:
        if self._fitting:
            for name, value in means.items():
                point = trainer.global_step, value
                self._columns.setdefault(name, []).append(point)

    def _draw(self, trainer: Trainer) -> None:
        start = time.monotonic()
        charts = {
            name: metric_curves(
                *(self._columns.get(of + name, []) for of in (EPOCH, VALIDATION, ""))
            )
            for name in dict.fromkeys(
                column.removeprefix(EPOCH).removeprefix(VALIDATION)
                for column in self._columns
            )
        }
        figure = draw(charts, "optimizer step", (0.0, float(trainer.global_step)))
        save_figure(figure, self._file(trainer))
        self._show(figure)
        self._drawn = time.monotonic()
        self._pause = max(self.every_n_seconds, (self._drawn - start) / _MAX_SHARE)

    def _show(self, figure: Any) -> None:
        """Puts the figure where the last one is, when there is a notebook."""
        if not in_notebook():
            return
        from IPython.core.display import Image
        from IPython.display import display

        image = Image(data=to_png(figure), format="png")
        if self._display is None:
            self._display = display(image, display_id=True)
        else:
            self._display.update(image)
