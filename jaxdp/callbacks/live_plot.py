"""Curves that grow while the run goes."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..basics.arguments import check_number
from ..basics.files import save_figure
from ..history import VALIDATION
from ..reports import draw, metric_curves, to_png
from .base import Callback, Trainer
from .logger import check_writable
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
        self._stride = 1
        self._steps: list[tuple[int, float]] = []
        self._means: dict[str, list[tuple[int, float]]] = {}
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
        if self._steps and self._steps[-1][0] > trainer.global_step:
            self._steps, self._means, self._stride = [], {}, 1

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
        if self._fitting:
            self._add(trainer.global_step, metrics)

    def on_train_epoch_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        if not self._fitting:
            return
        self._read(self._late.drain())
        known = trainer.run.progress.val_metrics
        means = {k: v for k, v in metrics.items() if k not in known}
        self._add(trainer.global_step, means)
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
        return Path(self.path or Path(trainer.default_root_dir) / "curves.png")

    def _read(self, past: Any) -> None:
        for step, metrics in past:
            loss = float(metrics["loss"])
            if np.isfinite(loss):
                self._steps.append((step, loss))
        while len(self._steps) > _MAX_POINTS:
            self._stride *= 2
            self._steps = [p for p in self._steps if p[0] % self._stride == 0]

    def _add(self, step: int, means: Mapping[str, float]) -> None:
        for name, value in means.items():
            if np.isfinite(value):
                self._means.setdefault(name, []).append((step, value))

    def _draw(self, trainer: Trainer) -> None:
        start = time.monotonic()
        metrics = dict.fromkeys(name.removeprefix(VALIDATION) for name in self._means)
        charts = {
            name: metric_curves(
                self._means.get(name, []),
                self._means.get(VALIDATION + name, []),
                self._steps if name == "loss" else (),
            )
            for name in {"loss": None, **metrics}
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
