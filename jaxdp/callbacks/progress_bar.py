"""Shows how far a fit is, how fast it runs and when it will end."""

import contextlib
import dataclasses
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
    (False, True): "{desc}: {n_fmt}/{total_fmt} batches ({percentage:.0f}%%)%s,"
    " {remaining} left%s",
    (True, False): "{desc} {n_fmt} batches%s [{elapsed}%s]",
    (True, True): "{desc} |{bar}| {n_fmt}/{total_fmt}%s [{elapsed}<{remaining}%s]",
}


class ProgressBar(Callback):
    """A tqdm bar for training, one for validation, and a line for every epoch.

    The bar shows how many batches of the epoch are done, the loss of a few steps ago
    (reading the newest would make the device wait), the time left, and examples per
    second. With `accumulate_grad_batches` it counts optimizer steps. If the output is
    not a terminal (the log of a job), or one without a width, it prints lines instead:
    one per epoch, and more in long epochs. Epochs count from 0.

    Args:
        refresh_per_second: how often the bar is redrawn at most.
        every_n_seconds: time between two lines if the output is not a terminal.
        file: an open text file; None means `sys.stderr`, in a notebook `sys.stdout`.
    """

    needs_fit = False

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
        self._validation_seconds = 0.0

    def setup(self, trainer: Trainer) -> None:
        # Notebooks show stderr on red ground, as if something had failed.
        file = self.file or (sys.stdout if is_in_notebook() else sys.stderr)
        self._out = out = SafeStream(file) if trainer.is_global_zero else None
        self._is_live = is_in_notebook() or out is not None and _can_draw_on(out)
        trainer.record.read_means(functools.partial(self._end_epoch, trainer))

    def on_train_epoch_start(self, trainer: Trainer) -> None:
        self._validation_seconds = 0.0
        last = "" if trainer.max_epochs is None else f"/{trainer.max_epochs - 1}"
        name = f"epoch {trainer.current_epoch}{last}"
        total, done = trainer.record.steps_of_epoch, trainer.record.batch_idx
        self._train = self._begin(name, total, done, trainer)

    def on_train_batch_end(
        self, trainer: Trainer, metrics: Mapping[str, Any], batch_idx: int
    ) -> None:
        if self._train is not None:
            self._train.show(batch_idx + 1)

    def on_validation_start(self, trainer: Trainer) -> None:
        self._validation_seconds -= time.perf_counter()
        total = trainer.record.limits.val_batches if is_fitting(trainer) else None
        self._validation = self._begin("validating", total)

    def on_validation_batch_end(self, trainer: Trainer, batch_idx: int) -> None:
        if self._validation is not None:
            self._validation.show(batch_idx + 1)

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        self._validation_seconds += time.perf_counter()
        if self._validation is not None:
            self._validation.close()
            self._validation = None

    def teardown(self, trainer: Trainer) -> None:
        for shown in filter(None, (self._validation, self._train)):
            shown.close()
        self._train = self._validation = None

    def _begin(
        self, name: str, total: int | None, done: int = 0, trainer: Any = None
    ) -> "_Pass | None":
        is_live, every = self._is_live, self.every_n_seconds
        interval = 1 / self.refresh_per_second if is_live else every
        out = self._out
        return out and _Pass(out, is_live, interval, name, total, done, trainer)

    def _end_epoch(self, trainer: Trainer, row: LogRow) -> None:
        if row.kind != "epoch" or (epoch := self._train) is None:
            return
        self.teardown(trainer)
        seconds = time.perf_counter() - epoch.start
        means = {**row.values, **trainer.record.validation}
        facts = [f"{n} {mean:.4g}" for n, mean in means.items() if not n.endswith("]")]
        rates = epoch.rates(max(seconds - self._validation_seconds, 1e-9))
        text = ", ".join([*facts, format_seconds(seconds), *rates])
        _bar_class().write(f"{epoch.name}: {text}", file=epoch.out)
        epoch.out.flush()


@dataclasses.dataclass
class _Pass:
    """A pass over a loader, shown as a bar or as lines, once per interval."""

    out: SafeStream
    is_live: bool
    interval: float
    name: str
    total: int | None
    done: int
    """The batches that an earlier fit has done of it."""
    trainer: Any
    """Whose loss and speed are shown, or None."""

    def __post_init__(self) -> None:
        self.start, self._n, self._bar = time.perf_counter(), self.done, None
        self._due = self.start + self.interval  # a short pass ends before

    def show(self, n: int) -> None:
        """Shows that `n` batches are done, if that is due."""
        self._n, now = n, time.perf_counter()
        if now < self._due:
            return
        self._due = now + self.interval
        facts = {"total": self.total, "initial": self.done}
        facts["bar_format"] = form = self._format(now - self.start)
        if not self.is_live:
            about = {"elapsed": now - self.start, "prefix": self.name, **facts}
            self.out.write(_bar_class().format_meter(n, **about) + "\n")
            self.out.flush()
            return
        if self._bar is None:  # all on one line: they are never drawn by turns
            facts |= {"desc": self.name, "file": self.out, "delay": 1e-9}
            facts |= {"leave": False, "position": 0, "dynamic_ncols": True}
            # It flushes the standard streams by itself, which may be closed.
            with contextlib.suppress(OSError, ValueError):
                self._bar = _bar_class()(**facts)
        if (bar := self._bar) is not None:
            bar.start_t, bar.last_print_t, bar.n = self.start, now, n
            bar.bar_format = form
            bar.refresh()

    def rates(self, seconds: float) -> list[str]:
        """Returns the speed of the steps that took `seconds`, and the notes of other
        callbacks."""
        rate, examples = (self._n - self.done) / seconds, self.trainer.record.examples
        name, value = ("examples", examples / self._n) if examples else ("batches", 1)
        notes = [callback.bar_note() for callback in self.trainer.callbacks]
        speed = [f"{format_number(rate * value)} {name}/s"] if rate else []
        return [*speed, *filter(None, notes)]

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _format(self, seconds: float) -> str:
        loss = self.trainer and self.trainer.record.latest("loss")
        metrics = "" if loss is None else f", loss {loss:.3g}"
        rates = [f", {text}" for text in self.rates(seconds)] if self.trainer else []
        texts = metrics, "".join(rates).replace("{", "{{").replace("}", "}}")
        return _FORMATS[self.is_live, self.total is not None] % texts


@functools.cache
def _bar_class() -> Any:
    with warnings.catch_warnings():
        # It warns in a notebook without ipywidgets, where a text bar does as well.
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm

    return type("Bar", (tqdm,), {"monitor_interval": 0})  # no thread


def _can_draw_on(out: SafeStream) -> bool:
    with contextlib.suppress(AttributeError, OSError, ValueError):  # it is unknown
        if os.get_terminal_size(out.fileno()).columns == 0:
            return False
    return out.isatty() and os.environ.get("COLUMNS") != "0"
