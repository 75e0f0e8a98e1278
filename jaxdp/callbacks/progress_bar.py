"""Where a fit is, how fast it goes and when it will be done."""

import functools
import math
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..basics.arguments import check_number
from ..basics.console import Outlet, open_bar
from ..basics.units import in_seconds, in_words
from ..record import Row
from .base import Callback, Trainer
from .monitor import in_notebook, is_fitting

_FORMAT: Final = "{desc} |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
_FORMAT_WITHOUT_TOTAL: Final = "{desc} {n_fmt} batches [{elapsed}{postfix}]"


class ProgressBar(Callback):
    """A tqdm bar for training, one for validation, and a line for every epoch.

    The bar shows how many batches of the epoch are done, the time left and the loss of
    a few steps ago (reading the newest would make the device wait). If the terminal is
    wide enough, bar and line also show batches and examples per second. With
    `accumulate_grad_batches` the bar counts optimizer steps. If the output is not a
    terminal (the log of a job), it prints lines instead: one per epoch, and more in
    long epochs.

    Args:
        refresh_per_second: how often the bar is redrawn at most.
        every_n_seconds: time between two lines if the output is not a terminal.
        file: an open text file; None means `sys.stderr`, in a notebook `sys.stdout`.
    """

    looks_inside_blocks = False
    needs_fit = False

    def __init__(
        self,
        refresh_per_second: float = 10.0,
        every_n_seconds: float = 30.0,
        file: Any = None,
    ):
        check_number("refresh_per_second", refresh_per_second, above=0)
        check_number("every_n_seconds", every_n_seconds, above=0)
        self.refresh_per_second = refresh_per_second
        self.every_n_seconds = every_n_seconds
        self.file = file
        self._out: Outlet | None = None
        self._bar_type: Any = None
        self._interval = every_n_seconds
        self._train = _Pass()
        self._validation = _Pass()
        self._shown = -math.inf  # when something was shown last
        self._next = math.inf

    def setup(self, trainer: Trainer) -> None:
        self._close()
        # Notebooks show stderr on red ground, as if something had failed.
        file = self.file or (sys.stdout if in_notebook() else sys.stderr)
        self._out = Outlet(file) if trainer.is_global_zero else None
        self._bar_type = _find_bar_type(self._out)
        drawn = 1 / self.refresh_per_second
        self._interval = self.every_n_seconds if self._bar_type is None else drawn
        trainer.record.read_means(functools.partial(self._end_epoch, trainer))

    def on_train_epoch_start(self, trainer: Trainer) -> None:
        self._close()
        self._train = _Pass(_name(trainer), _total(trainer), trainer.record.batch_idx)
        self._begin(self._train)

    def on_train_batch_end(
        self, trainer: Trainer, metrics: Mapping[str, Any], batch_idx: int
    ) -> None:
        # This is all that happens in most steps, in well below a microsecond.
        self._train.done = batch_idx + 1
        if time.perf_counter() >= self._next:
            self._show_training(trainer)

    def on_validation_start(self, trainer: Trainer) -> None:
        total = trainer.record.num_val_batches if is_fitting(trainer) else None
        self._validation = _Pass("validating", total)
        self._begin(self._validation)

    def on_validation_batch_end(self, trainer: Trainer, batch_idx: int) -> None:
        if time.perf_counter() >= self._next:
            self._validation.done = batch_idx + 1
            self._show(self._validation)

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        now = time.perf_counter()
        self._validation.close()
        self._train.lost += now - self._validation.began
        self._next = now + self._interval if is_fitting(trainer) else math.inf

    def _end_epoch(self, trainer: Trainer, row: Row) -> None:
        # Without a terminal this is most of what the bar costs an epoch.
        if row.kind != "epoch" or self._out is None:
            return
        took = time.perf_counter() - self._train.began
        start = f"{self._train.name}: {in_seconds(took)}"
        means = {**row.values, **trainer.record.validation}
        facts = [f"{n} {mean:.4g}" for n, mean in means.items() if not n.endswith("]")]
        facts += _notes(trainer)
        rates = self._train.rates(trainer.record.examples)
        if self._bar_type is not None:
            width = _width(self._out)
            while rates and len(", ".join([start, *rates, *facts])) > width:
                rates.pop()
        self._close()
        self._print(", ".join([start, *rates, *facts]))

    def on_exception(self, trainer: Trainer, exception: BaseException) -> None:
        self._close()

    def on_fit_end(self, trainer: Trainer) -> None:
        self._close()
        self._next = math.inf

    def _begin(self, run: "_Pass") -> None:
        """Opens a bar, unless one was drawn just now: the pass may be over before."""
        if self._bar_type is None:
            self._next = run.began + self._interval
            return
        self._next = self._shown + self._interval
        if run.began >= self._next:
            self._show(run)

    def _show_training(self, trainer: Trainer) -> None:
        facts = [*_notes(trainer), *self._train.rates(trainer.record.examples)]
        if (loss := trainer.record.latest("loss")) is not None:
            facts.insert(0, f"loss {loss:.3g}")
        self._show(self._train, facts)

    def _show(self, run: "_Pass", facts: Sequence[str] = ()) -> None:
        self._shown = time.perf_counter()
        self._next = self._shown + self._interval
        if self._bar_type is None:
            self._print(run.line(facts))
            return
        if run.bar is None:
            run.bar = open_bar(
                self._bar_type,
                total=run.total,
                desc=run.name,
                file=self._out,
                leave=False,
                position=0,  # One line for all: they are never drawn by turns.
                dynamic_ncols=True,
                initial=run.done,
                mininterval=0,
                bar_format=_FORMAT if run.total else _FORMAT_WITHOUT_TOTAL,
            )
        if run.bar is not None:
            run.draw(facts)

    def _close(self) -> None:
        if self._bar_type is not None:
            self._validation.close()
            self._train.close()

    def _print(self, line: str) -> None:
        if self._out is None:
            return
        if self._bar_type is not None:
            self._bar_type.write(line, file=self._out)
        else:
            self._out.write(f"{line}\n")
            self._out.flush()


class _Pass:
    """One pass over a loader: how far it is, since when, and its bar."""

    def __init__(self, name: str = "", total: int | None = None, done: int = 0):
        self.name = name
        self.total = total
        self.done = self.first = done
        self.began = time.perf_counter()
        self.lost = 0.0  # seconds of validations
        self.bar: Any = None

    def rates(self, examples: int) -> list[str]:
        """Batches and examples per second, of so many, validation left out."""
        seconds = time.perf_counter() - self.began - self.lost
        if self.done <= self.first or seconds <= 0:
            return []
        rate = (self.done - self.first) / seconds
        return [
            f"{in_words(rate)} batches/s",
            f"{in_words(rate * examples / self.done)} examples/s",
        ]

    def draw(self, facts: Sequence[str]) -> None:
        """The bar, with as many of the facts as leave it ten cells."""
        self.bar.n = self.done
        how = self.bar.format_dict
        if how["ncols"]:  # not in a notebook
            bare = self.bar.format_meter(**how | {"postfix": "", "ncols": None})
            room = how["ncols"] - len(bare)
            while facts and len(", " + ", ".join(facts)) > room:
                facts = facts[:-1]
        self.bar.set_postfix_str(", ".join(facts), refresh=False)
        self.bar.refresh()

    def line(self, facts: Sequence[str]) -> str:
        """What to print where no bar can be drawn."""
        if self.total is None:
            return ", ".join([f"{self.name}: {self.done} batches", *facts])
        share = f"{self.done}/{self.total} batches ({self.done / self.total:.0%})"
        seconds = time.perf_counter() - self.began - self.lost
        left = seconds / (self.done - self.first) * (self.total - self.done)
        return ", ".join([f"{self.name}: {share}", f"{in_seconds(left)} left", *facts])

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        self.bar = None


def _width(out: Outlet | None) -> float:
    """Columns of a terminal; of what is none, as many as it takes."""
    try:
        columns = os.get_terminal_size(out.fileno()).columns  # pyright: ignore
    except (AttributeError, OSError, ValueError):
        columns = 0
    return columns or math.inf


def _name(trainer: Trainer) -> str:
    of = "" if trainer.max_epochs is None else f"/{trainer.max_epochs}"
    return f"epoch {trainer.current_epoch + 1}{of}"


def _notes(trainer: Trainer) -> list[str]:
    """What other callbacks have to say beside the numbers."""
    return [text for callback in trainer.callbacks if (text := callback.bar_note())]


def _total(trainer: Trainer) -> int | None:
    """Steps in this epoch, fewer when `max_steps` comes before its end."""
    total, last = trainer.record.steps_per_epoch, trainer.max_steps
    if last is None:
        return total
    left = trainer.record.batch_idx + max(last - trainer.global_step, 0)
    return left if total is None else min(total, left)


def _find_bar_type(out: Outlet | None) -> Any:
    """The kind of bar that suits the output, or None for plain lines."""
    if out is None:
        return None
    with warnings.catch_warnings():
        # It warns in a notebook without ipywidgets, where a text bar does as well.
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm
    if not out.isatty() and not in_notebook():
        return None
    # No monitor thread: there is none to fork, and nothing for it to do.
    return type("Bar", (tqdm,), {"monitor_interval": 0})
