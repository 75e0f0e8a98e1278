"""Where a fit is, how fast it goes and when it will be done."""

import functools
import os
import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any, Final

from ..basics.arguments import check_number, checks_arguments
from ..basics.console import SafeStream, open_bar
from ..basics.units import format_number, format_seconds
from ..record import Row
from .base import Callback, Trainer
from .monitor import in_notebook, is_fitting

# With and without a known total, on a terminal and in a file.
_BARS: Final = (
    "{desc} {n_fmt} batches{metrics} [{elapsed}{rates}]",
    "{desc} |{bar}| {n_fmt}/{total_fmt}{metrics} [{elapsed}<{remaining}{rates}]",
)
_LINES: Final = (
    "{desc}: {n_fmt} batches{metrics}{rates}",
    "{desc}: {n_fmt}/{total_fmt} batches ({percentage:.0f}%){metrics}, {remaining} left"
    "{rates}",
)


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
        self._train: Any = None  # bars of passes that run now
        self._validation: Any = None
        self._began = self._validated_for = 0.0

    def setup(self, trainer: Trainer) -> None:
        # Notebooks show stderr on red ground, as if something had failed.
        file = self.file or (sys.stdout if in_notebook() else sys.stderr)
        self._out = SafeStream(file) if trainer.is_global_zero else None
        trainer.record.read_means(functools.partial(self._end_epoch, trainer))

    def on_train_epoch_start(self, trainer: Trainer) -> None:
        self._began, self._validated_for = time.perf_counter(), 0.0
        last = "" if trainer.max_epochs is None else f"/{trainer.max_epochs - 1}"
        name = f"epoch {trainer.current_epoch}{last}"
        total, done = trainer.record.steps_of_epoch, trainer.record.batch_idx
        facts = functools.partial(_facts, trainer)
        self._train = self._open(name, total, done, facts)

    def on_train_batch_end(
        self, trainer: Trainer, metrics: Mapping[str, Any], batch_idx: int
    ) -> None:
        if self._train is not None:
            self._train.update(batch_idx + 1 - self._train.n)

    def on_validation_start(self, trainer: Trainer) -> None:
        self._validation_began = time.perf_counter()
        total = trainer.record.limits.val_batches if is_fitting(trainer) else None
        self._validation = self._open("validating", total)

    def on_validation_batch_end(self, trainer: Trainer, batch_idx: int) -> None:
        if self._validation is not None:
            self._validation.update()

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        self._validated_for += time.perf_counter() - self._validation_began
        if self._validation is not None:
            self._validation.close()
            self._validation = None

    def teardown(self, trainer: Trainer) -> None:
        self._close()

    def _end_epoch(self, trainer: Trainer, row: Row) -> None:
        if row.kind != "epoch" or self._train is None:
            return
        bar, took = self._train, time.perf_counter() - self._began
        means = {**row.values, **trainer.record.validation}
        facts = [f"{n} {mean:.4g}" for n, mean in means.items() if not n.endswith("]")]
        rate = (bar.n - bar.initial) / max(took - self._validated_for, 1e-9)
        facts += [format_seconds(took), *_rates(trainer, bar.n, rate)]
        self._close()
        bar.write(f"{bar.desc}: {', '.join(facts)}", file=self._out)
        bar.fp.flush()

    def _open(
        self, name: str, total: int | None, done: int = 0, facts: Any = None
    ) -> Any:
        """A bar for a pass, or None where nothing is shown."""
        if self._out is None:
            return None
        is_live = in_notebook() or self._out.isatty() and _width(self._out) != 0
        interval = 1 / self.refresh_per_second if is_live else self.every_n_seconds
        return open_bar(
            _bar_type(),
            facts,
            is_live,
            total=total,
            desc=name,
            file=self._out,
            leave=False,
            position=0,  # One line for all: they are never drawn by turns.
            dynamic_ncols=True,
            initial=done,
            mininterval=interval,
            miniters=1,
            delay=interval,  # Short passes are over before.
            bar_format=(_BARS if is_live else _LINES)[total is not None],
        )

    def _close(self) -> None:
        for bar in (self._validation, self._train):
            if bar is not None:
                bar.close()
        self._train = self._validation = None


@functools.cache
def _bar_type() -> Any:
    """A tqdm bar, or lines in its place, that asks for its facts whenever it is
    drawn."""
    with warnings.catch_warnings():
        # It warns in a notebook without ipywidgets, where a text bar does as well.
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # no thread

        def __init__(self, facts: Any, is_live: bool, **options: Any):
            self._facts, self._is_live = facts, is_live
            super().__init__(**options)

        @property
        def format_dict(self) -> dict[str, Any]:
            known = super().format_dict
            facts = self._facts(known) if self._facts else ("", "")
            return {**known, **dict(zip(("metrics", "rates"), facts, strict=True))}

        def display(self, msg: str | None = None, *others: Any, **options: Any) -> Any:
            if self._is_live:
                return super().display(msg, *others, **options)
            if msg is None:  # else it is cleared
                self.fp.write(f"{self}\n")
                self.fp.flush()

        # Around each message tqdm clears what it has drawn, and draws it again.
        def clear(self, *others: Any, **options: Any) -> None:
            if self._is_live:
                super().clear(*others, **options)

        def refresh(self, nolock: bool = False, lock_args: Any = None) -> Any:
            if self._is_live or not nolock:
                return super().refresh(nolock, lock_args)

    return Bar


def _width(out: SafeStream) -> int | None:
    """The columns of a terminal, 0 where there is nothing to draw on."""
    if os.environ.get("COLUMNS") == "0":
        return 0
    try:
        return os.get_terminal_size(out.fileno()).columns
    except (AttributeError, OSError, ValueError):  # it does not tell
        return None


def _facts(trainer: Trainer, bar: Mapping[str, Any]) -> tuple[str, str]:
    """What the bar of training shows before and behind the time."""
    loss = trainer.record.latest("loss")
    steps, seconds = bar["n"] - bar["initial"], bar["elapsed"]
    rate = bar["rate"] or (steps / seconds if seconds else 0)
    rates = [f", {text}" for text in _rates(trainer, bar["n"], rate)]
    return "" if loss is None else f", loss {loss:.3g}", "".join(rates)


def _rates(trainer: Trainer, steps: int, rate: float) -> list[str]:
    """How fast it goes, after so many steps of an epoch, and what other callbacks have
    to say of it."""
    examples = rate * trainer.record.examples / max(steps, 1)
    name, value = ("examples", examples) if examples else ("batches", rate)
    notes = [callback.bar_note() for callback in trainer.callbacks]
    return [f"{format_number(value)} {name}/s"] * (value > 0) + [*filter(None, notes)]
