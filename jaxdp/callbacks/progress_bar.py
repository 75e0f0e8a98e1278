"""Shows how far a fit is, how fast it runs and when it will end."""

import contextlib
import functools
import os
import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any, Final

from ..basics.arguments import check_number, checks_arguments
from ..basics.console import SafeStream
from ..basics.units import format_number, format_seconds
from ..record import LogRow
from .base import Callback, Trainer
from .monitor import is_fitting, is_in_notebook

# In a file and on a terminal, without and with a known total.
_FORMATS: Final = {
    (False, False): "{desc}: {n_fmt} batches%s%s",
    (False, True): "{desc}: {n_fmt}/{total_fmt} batches%s, {remaining} left%s",
    (True, False): "{desc} {n_fmt} batches%s [{elapsed}%s]",
    (True, True): "{desc} |{bar}| {n_fmt}/{total_fmt}%s [{elapsed}<{remaining}%s]",
}


class ProgressBar(Callback):
    """A tqdm bar for training, one for validation, and a line for every epoch.

    The bar shows how many batches of the epoch are done, the loss of a few steps ago
    (reading the newest would make the device wait), the time left, and examples per
    second of the epoch, its validations included. With `accumulate_grad_batches` it
    counts optimizer steps. If the output is not a terminal (the log of a job), or one
    without a width, it prints lines instead: one per epoch, and more in long epochs.
    Epochs count from 0.

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
        self._train: _Pass | None = None  # the pass over an epoch
        self._validation: _Pass | None = None

    def setup(self, trainer: Trainer) -> None:
        # Notebooks show stderr on red ground, as if something had failed.
        file = self.file or (sys.stdout if is_in_notebook() else sys.stderr)
        self._out = SafeStream(file) if trainer.is_global_zero else None
        self._is_live = is_in_notebook() or _can_draw_on(SafeStream(file))
        trainer.record.read_means(functools.partial(self._end_epoch, trainer))

    def on_train_epoch_start(self, trainer: Trainer) -> None:
        last = "" if trainer.max_epochs is None else f"/{trainer.max_epochs - 1}"
        name = f"epoch {trainer.current_epoch}{last}"
        self._train = self._begin(name, trainer.record.steps_of_epoch, trainer)

    def on_train_batch_end(
        self, trainer: Trainer, metrics: Mapping[str, Any], batch_idx: int
    ) -> None:
        if self._train is not None:
            self._train.show(batch_idx + 1)

    def on_validation_start(self, trainer: Trainer) -> None:
        total = trainer.record.limits.val_batches if is_fitting(trainer) else None
        self._validation = self._begin("validating", total)

    def on_validation_batch_end(self, trainer: Trainer, batch_idx: int) -> None:
        if self._validation is not None:
            self._validation.show(batch_idx + 1)

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        if self._validation is not None:
            self._validation.close()
            self._validation = None

    def teardown(self, trainer: Trainer) -> None:
        for shown in filter(None, (self._validation, self._train)):
            shown.close()
        self._train = self._validation = None

    def _begin(
        self, name: str, total: int | None, trainer: Trainer | None = None
    ) -> "_Pass | None":
        if self._out is None:
            return None
        interval = (
            1 / self.refresh_per_second if self._is_live else self.every_n_seconds
        )
        return _Pass(self._out, self._is_live, interval, name, total, trainer)

    def _end_epoch(self, trainer: Trainer, row: LogRow) -> None:
        if row.kind != "epoch" or (epoch := self._train) is None:
            return
        self.teardown(trainer)
        means = {**row.values, **trainer.record.validation}
        facts = [f"{n} {mean:.4g}" for n, mean in means.items() if not n.endswith("]")]
        seconds = time.perf_counter() - epoch.start
        text = ", ".join([*facts, format_seconds(seconds)]) + epoch.format_speed(
            seconds
        )
        _bar_class().write(f"{epoch.name}: {text}", file=epoch.out)
        epoch.out.flush()


class _Pass:
    """A pass over a loader, shown as a bar or as lines, once per interval."""

    def __init__(
        self,
        out: SafeStream,
        is_live: bool,
        interval: float,
        name: str,
        total: int | None,
        trainer: Trainer | None,
    ):
        self.out, self.name, self.start = out, name, time.perf_counter()
        self._is_live, self._interval, self._total = is_live, interval, total
        self._trainer = trainer  # has the loss and the rows of an epoch
        self._first = self._n = 0 if trainer is None else trainer.record.batch_idx
        self._bar: Any = None
        self._due = self.start + interval  # a short pass ends before

    def show(self, n: int) -> None:
        """Shows that `n` batches are done, if that is due."""
        self._n, now = n, time.perf_counter()
        if now < self._due:
            return
        self._due, seconds = now + self._interval, now - self.start
        facts: dict[str, Any] = {"total": self._total, "initial": self._first}
        loss = self._trainer and self._trainer.record.latest("loss")
        metrics = "" if loss is None else f", loss {loss:.3g}"
        form = _FORMATS[self._is_live, self._total is not None]
        facts["bar_format"] = form % (metrics, self.format_speed(seconds))
        if not self._is_live:
            about = {"elapsed": seconds, "prefix": self.name, **facts}
            self.out.write(_bar_class().format_meter(n, **about) + "\n")
            self.out.flush()
            return
        if self._bar is None:  # all on one line: they are never drawn by turns
            facts |= {"desc": self.name, "file": self.out, "delay": 1e-9}
            facts |= {"leave": False, "position": 0, "dynamic_ncols": True}
            # It flushes the standard streams by itself, which may be closed.
            with contextlib.suppress(OSError, ValueError):
                self._bar = _bar_class()(**facts)
                self._bar.start_t -= seconds  # by the clock of tqdm, which began now
        if (bar := self._bar) is not None:
            bar.n = n
            bar.bar_format = facts["bar_format"]
            bar.refresh()

    def format_speed(self, seconds: float) -> str:
        """Returns ", 8 examples/s"; "" of a validation and before the first step."""
        steps = self._n - self._first
        if self._trainer is None or steps == 0:
            return ""
        # An earlier fit may have done some batches of the epoch.
        rows = steps / self._n * self._trainer.record.examples
        return f", {format_number(rows / max(seconds, 1e-9))} examples/s"

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


@functools.cache
def _bar_class() -> Any:
    with warnings.catch_warnings():
        # It warns in a notebook without ipywidgets, where a text bar does as well.
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm

    return type("Bar", (tqdm,), {"monitor_interval": 0})  # no thread


def _can_draw_on(out: SafeStream) -> bool:
    with contextlib.suppress(AttributeError, OSError, ValueError):  # unknown total
        if os.get_terminal_size(out.fileno()).columns == 0:
            return False
    return out.isatty() and os.environ.get("COLUMNS") != "0"
