"""Shows how far a fit is, how fast it runs and when it will end."""

import contextlib
import functools
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..basics.arguments import check_number, checks_arguments
from ..basics.console import SafeStream
from ..basics.units import format_number, format_seconds
from ..record import LogRow
from .base import Callback, Trainer
from .monitor import is_in_notebook


class ProgressBar(Callback):
    """A tqdm bar for training, one for validation, and a line for every epoch.

    The bar shows how many batches (or, with `accumulate_grad_batches`, optimizer steps)
    of the epoch are done, the loss of a few steps ago (reading the newest would make
    the device wait), the time left, and examples per second of the epoch, its
    validations included. If the output is not a terminal (the log of a job), or one
    without a width, it prints lines: one per epoch, and more in long epochs. Epochs
    count from 0.

    Args:
        refresh_per_second: how often the bar is redrawn at most.
        every_n_seconds: time between two lines if the output is not a terminal.
        file: an open text file; None means `sys.stderr`, in a notebook `sys.stdout`.
    """

    @checks_arguments
    def __init__(
        self,
        refresh_per_second: float = 10.0,
        every_n_seconds: float = 30.0,
        file: Any = None,
    ):
        check_number("refresh_per_second", refresh_per_second, above=0)
        check_number("every_n_seconds", every_n_seconds, above=0)
        if file is not None and not hasattr(file, "write"):
            raise TypeError(
                f"`file` must be a file to write to, or None; got {file!r}."
            )
        self.refresh_per_second = refresh_per_second
        self.every_n_seconds = every_n_seconds
        self.file = file
        self._out: SafeStream | None = None  # in the process that shows anything
        self._is_live = False
        self._bar: Any = None  # one line for all passes, once it is drawn
        self._due = 0.0
        self._train: _Pass | None = None
        self._validation: _Pass | None = None

    def setup(self, trainer: Trainer) -> None:
        # Notebooks show stderr on red ground, as if something had failed.
        file = self.file or (sys.stdout if is_in_notebook() else sys.stderr)
        self._out = SafeStream(file) if trainer.is_global_zero else None
        self._is_live = is_in_notebook() or _can_draw_on(SafeStream(file))
        trainer.record.read_means(functools.partial(self._end_epoch, trainer))

    def on_train_epoch_start(self, trainer: Trainer) -> None:
        last = "" if trainer.max_epochs is None else f"/{trainer.max_epochs - 1}"
        name, total = (
            f"epoch {trainer.current_epoch}{last}",
            trainer.record.steps_of_epoch,
        )
        self._train = self._begin(name, total, trainer.record.batch_idx)

    def on_train_batch_end(
        self, trainer: Trainer, metrics: Mapping[str, Any], batch_idx: int
    ) -> None:
        if self._train is not None:
            self._show(trainer, self._train, batch_idx + 1)

    def on_validation_start(self, trainer: Trainer) -> None:
        total = trainer.record.limits.val_batches if trainer.run.is_fitting else None
        self._validation = self._begin("validating", total)

    def on_validation_batch_end(self, trainer: Trainer, batch_idx: int) -> None:
        if self._validation is not None:
            self._show(trainer, self._validation, batch_idx + 1)

    def teardown(self, trainer: Trainer) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = self._train = self._validation = None

    def _begin(self, name: str, total: int | None, batches: int = 0) -> "_Pass":
        start = time.perf_counter()
        self._due = start + self._get_interval()  # a short pass shows nothing
        return _Pass(name, total, batches, start)

    def _get_interval(self) -> float:
        return 1 / self.refresh_per_second if self._is_live else self.every_n_seconds

    def _show(self, trainer: Trainer, shown: "_Pass", n: int) -> None:
        """Shows that `n` batches of a pass are done, if that is due."""
        now, total = time.perf_counter(), shown.total
        if self._out is None or now < self._due:
            return
        self._due, seconds = now + self._get_interval(), now - shown.start
        text = f"{n} batches" if total is None else f"{n}/{total} batches"
        loss = trainer.record.latest("loss") if shown is self._train else None
        text += "" if loss is None else f", loss {loss:.3g}"
        if total is not None and n < total:
            remaining = seconds * (total - n) / (n - shown.batches)
            text += f", {format_seconds(remaining)} left"
        if shown is self._train:
            text += _format_speed(trainer, shown, seconds)
        if not self._is_live:
            self._out.write(f"{shown.name}: {text}\n")
            self._out.flush()
            return
        bar = "" if total is None else "|{bar}| "
        # tqdm flushes the standard streams by itself, which may be closed.
        with contextlib.suppress(OSError, ValueError):
            if self._bar is None:
                self._bar = _open_bar(self._out)
            self._bar.n, self._bar.total = n, total
            self._bar.bar_format = f"{shown.name} {bar}{text}"
            self._bar.refresh()

    def _end_epoch(self, trainer: Trainer, row: LogRow) -> None:
        if self._bar is not None:
            self._bar.clear()
        self._validation = None
        if row.kind != "epoch" or (epoch := self._train) is None or self._out is None:
            return
        means = {**row.values, **trainer.record.validation}
        facts = [f"{n} {mean:.4g}" for n, mean in means.items() if not n.endswith("]")]
        seconds = time.perf_counter() - epoch.start
        text = ", ".join([*facts, format_seconds(seconds)])
        text += _format_speed(trainer, epoch, seconds)
        self._out.write(f"{epoch.name}: {text}\n")
        self._out.flush()
        self._train = None


class _Pass(NamedTuple):
    """A pass over a loader."""

    name: str
    total: int | None
    """Batches; None if unknown."""
    batches: int
    """Batches of the epoch that an earlier fit has done."""
    start: float


def _format_speed(trainer: Trainer, epoch: _Pass, seconds: float) -> str:
    done = trainer.record.batch_idx
    rows = (done - epoch.batches) / max(done, 1) * trainer.record.examples
    return f", {format_number(rows / max(seconds, 1e-9))} examples/s" if rows else ""


def _open_bar(out: SafeStream) -> Any:
    from tqdm import tqdm

    kind = type("Bar", (tqdm,), {"monitor_interval": 0})  # no thread
    # The delay keeps tqdm from drawing it now.
    return kind(file=out, position=0, leave=False, dynamic_ncols=True, delay=1e-9)


def _can_draw_on(out: SafeStream) -> bool:
    with contextlib.suppress(AttributeError, OSError, ValueError):  # unknown total
        if os.get_terminal_size(out.fileno()).columns == 0:
            return False
    return out.isatty() and os.environ.get("COLUMNS") != "0"
