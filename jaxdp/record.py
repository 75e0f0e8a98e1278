"""What a run logs: the only place that knows the step, epoch and run of a value."""

import collections
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np

from .basics.arguments import as_number
from .basics.columns import EPOCH, VALIDATION
from .basics.console import warn
from .basics.stopwatch import NO_STOPWATCH, Stopwatch
from .basics.tracebacks import note_callback
from .distributed import Processes
from .history import History
from .step import Metrics

Kind = Literal["step", "val", "epoch", "fit"]
"""What values are of: a step, a validation, an epoch, or a whole fit."""
Number = int | float

_RESERVED: Final = ("epoch", "step")


class Row(NamedTuple):
    """What sinks write: values, and where in the run they are from."""

    kind: Kind
    epoch: int
    """Counted from 0."""
    step: int
    """Optimizer steps done."""
    values: Mapping[str, Any]
    batch_idx: int | None = None
    """Which step of the epoch it is, of a step."""
    validation: Mapping[str, Any] | None = None
    """What the validation at its end has logged, of an epoch that had one there."""

    def numbers(self) -> dict[str, Number]:
        """Its single numbers, by the names of their columns."""
        if self.kind == "step":
            return scalars(self.values)
        prefix = EPOCH if self.kind == "epoch" else ""
        numbers = {
            name if name.startswith(VALIDATION) else prefix + name: value
            for name, value in self.values.items()
        }
        return {**numbers, **(self.validation or {})}


OnRow = Callable[[Row], None]


class Sink(Protocol):
    """What a record writes its rows to, during a fit."""

    def write(self, row: Row) -> None:
        """Writes one row. Those of steps come some steps late."""

    def rewind(self, step: int) -> None:
        """Takes back what a resumed run, of which so many steps are done, writes
        again. Called once, before the first row."""

    def flush(self) -> None:
        """Called before a checkpoint: all that was written must be there."""

    def close(self) -> None:
        """Called after the last row of a fit."""


class _Place(NamedTuple):
    """Where `log` puts values at a moment."""

    names: Mapping[str, Any]
    """What is there already."""
    values: dict[str, Any]
    logged: dict[str, float] | None = None
    """What was logged alone; None for that of the present epoch."""


class Record:
    """What a run logs: takes values of steps, validations, epochs and fits, and hands
    them to sinks, to the history, and to whoever asks for the latest.

    The values of a step are lazy. They are read here alone, when so many later steps
    were handed to the device that it is surely done with them: nothing waits.

    Args:
        run_id: tells this run, resumed or not, from others.
        processes: all of them.
        progress: knows how many steps and epochs are done.
        accumulate: batches of a step.

    Attributes:
        run_id: as given, or of the checkpoint that the run goes on from.
        history: the means of all epochs.
        names: what steps and validations log; known once the program of a step is.
        names_are_all: whether validations log nothing else; a `PassMetric` may.
        limits: of the fit, such as `min_epochs`; None in a loop of the caller's.
        stopwatch: measures the phases of the fit, if a callback has asked for it.
    """

    def __init__(
        self, run_id: str, processes: Processes, progress: Any, accumulate: int
    ):
        self.run_id = run_id
        self.history = History()
        self.names: tuple[str, ...] = ()
        self.names_are_all = True
        self.limits: Any = None
        self.stopwatch: Stopwatch = NO_STOPWATCH
        self._processes, self._progress = processes, progress
        self._accumulate = accumulate

        # Who gets rows: of steps those whose number is divisible, of validations and
        # epochs all.
        self._readers: dict[OnRow, int] = {}
        self._of_means: list[OnRow] = []
        self._sinks: list[Sink] = []
        self._rewound_to: int | None = None

        # Steps that the device may not be done with, by the step at which it is; the
        # latest values of all others, as numbers or as the metrics that have them; and
        # a validation that the row of its epoch may yet take up.
        self._waiting: collections.deque[tuple[int, Row]] = collections.deque()
        self._known: dict[str, Any] = {}
        self._newest: Any = None  # `Metrics` of a step, which is newer
        self._validation: Row | None = None

        # None where there are no hooks; what is logged before the row of a step; and
        # the names of all that hooks have logged.
        self._place: _Place | None = None
        self._before_a_row: dict[str, float] = {}
        self._own: set[str] = set()

    # Where the run is.

    @property
    def batch_idx(self) -> int:
        """Optimizer steps done of the present epoch: the number of the next one."""
        return -(-self._progress.done // self._accumulate)

    @property
    def examples(self) -> int:
        """Real rows that the present epoch was trained on."""
        return self._progress.examples

    @property
    def validation(self) -> dict[str, float]:
        """The values of the last validation in the present epoch."""
        return self._progress.val_metrics

    @property
    def steps_of_epoch(self) -> int | None:
        """Steps that the fit takes of the present epoch, None if not known: fewer than
        of others where `max_steps` comes before its end."""
        limits = self.limits
        if limits is None or limits.max_steps is None:
            return limits and limits.steps_per_epoch
        left = self.batch_idx + max(limits.max_steps - self._progress.global_step, 0)
        return min(left, limits.steps_per_epoch or left)

    @property
    def is_at_epoch_end(self) -> bool:
        """Whether all steps that the fit takes of the epoch are done, and what ends it
        is still to come: validation, history, `on_train_epoch_end`."""
        at, total = self._progress, self.steps_of_epoch
        is_over = total is not None and 0 < total <= self.batch_idx
        return (is_over or at.done == at.end) and not at.epoch_ended

    # What comes in.

    def put(self, kind: Kind, values: Mapping[str, float]) -> None:
        """Takes values of all but a step by name."""
        if kind == "fit":
            assert self._place is not None  # in a hook at the end of a fit
            self._place.values.update(values)
        else:
            self.read_rest()  # the device is done with them
        self._known_values().update(values)
        if kind == "val":
            self._write_validation()
            self._validation = self._here(kind, dict(values))
            self._hand_out(self._validation, self._of_means)
        elif kind == "epoch":
            self._write_epoch(values)

    def put_step(self, metrics: Metrics, batch_idx: int) -> None:
        """Takes the lazy values of a step, of which hooks are from now on."""
        step, waiting = self._progress.global_step, self._waiting
        self._place = _Place(metrics, metrics.added)
        if self._before_a_row:
            metrics.add(self._before_a_row)
            self._before_a_row = {}
        while waiting and waiting[0][0] <= step:
            row = waiting.popleft()[1]
            self._newest = row.values
            if self._readers:
                self._read(row)
        row = Row("step", self._progress.epoch, step, metrics, batch_idx)
        waiting.append((step + metrics.steps_in_flight, row))

    def before_step(self) -> None:
        """From now on hooks are those before a step."""
        self._place = _Place(self._before_a_row, self._before_a_row)

    def log(self, name: str, value: Any) -> None:
        """`Trainer.log`.

        From the hooks of a validation a value goes to its row, from those at the end of
        an epoch or a fit to these, and from all others to the row of the step and to
        the epoch, which has the last one of each name.
        """
        if self._place is None:
            raise RuntimeError(f"`log({name!r})`: call it in a hook of a callback.")
        if not isinstance(name, str):
            raise TypeError(f"`log`: `name` must be a str; got {name!r}.")
        names, values, logged = self._place
        is_taken = name in (*_RESERVED, *self.names) or name in (*names,)
        if is_taken and name not in self._own:
            raise ValueError(
                f"`log`: the name {name!r} is taken by a value that is logged anyway;"
                " use another one."
            )
        number = self._processes.first(f"log({name!r})", lambda: _one(name, value))
        self._own.add(name)
        values[name] = self._known_values()[name] = number
        logged = self._progress.logged if logged is None else logged
        logged[name] = number

    @contextlib.contextmanager
    def into(self, values: dict[str, float]) -> Iterator[dict[str, float]]:
        """Has hooks log into `values`, and alone into the dict that this yields."""
        outer, logged = self._place, dict[str, float]()
        self._known_values().update(values)
        self._place = _Place(values, values, logged)
        try:
            yield logged
        finally:
            self._place = outer
            if outer is not None and outer.logged is None:
                self.before_step()  # the row of the last one is written

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Around a fit, or a loop of the caller's: what hooks log is of its steps."""
        was_open = self._place is not None
        outer = self._readers, self._of_means, self._sinks
        self._readers, self._of_means, self._sinks = {}, [], []
        self.stopwatch = NO_STOPWATCH
        self.before_step()
        try:
            yield
        finally:
            self._place = None
            if was_open:  # else a save may yet read the last steps
                self._readers, self._of_means, self._sinks = outer
                self.before_step()

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Around the last hooks of a fit; then its last row is written, and all closed.

        What they log is in the history's last epoch, too.
        """
        values: dict[str, float] = {}
        try:
            with self.into(values) as logged:
                yield
            if logged and self.history.epochs:
                self.history.append(self.history.epochs[-1], logged)
        finally:
            self._close(values)

    # Who gets it.

    def latest(self, name: str) -> float | None:
        """The newest value of `name` that is known without a wait; None before any."""
        value = self._known_values().get(name)
        if isinstance(value, Metrics):
            value = value[name]
        return None if value is None else float(value)

    def last_values(self) -> dict[str, float]:
        """The last value of each name; waits for the device."""
        values = dict(self._known_values())
        for _, row in self._waiting:
            values |= dict.fromkeys(row.values, row.values)
        values |= self._before_a_row
        # waits for the device
        numbers = {
            name: np.asarray(value[name] if isinstance(value, Metrics) else value)
            for name, value in values.items()
        }
        return {name: float(each) for name, each in numbers.items() if each.ndim == 0}

    def add(self, sink: Sink, every: int) -> None:
        """Has all rows of the fit written to `sink`; of steps, each `every`-th."""
        if self._rewound_to is not None:
            sink.rewind(self._rewound_to)
        self._sinks.append(sink)
        self._readers[sink.write] = every

    def read_steps(self, function: OnRow) -> None:
        """Has `function` called with the row of each step, once it can be read; for
        `Callback.setup`."""
        self._readers[function] = 1

    def read_means(self, function: OnRow) -> None:
        """Has `function` called with the row of each validation of a fit and of each
        epoch, which has no value twice; for `Callback.setup`."""
        # Not before `validate` or `predict`, which have no such rows.
        if self._place is not None:
            self._of_means.append(function)

    def measure_phases(self) -> Stopwatch:
        """Has the fit that begins measured, phase by phase; for `Callback.setup`."""
        if not self.stopwatch.is_on:
            self.stopwatch = Stopwatch()
        return self.stopwatch

    def read_rest(self) -> None:
        """Hands out the rows of all steps so far; waits for the device if there is
        somebody to read them."""
        rest = [functools.partial(self._read, row) for _, row in self._waiting]
        if self._waiting:
            self._newest = self._waiting[-1][1].values
        self._waiting.clear()  # the device may be what fails
        _try_all(rest)

    def _read(self, row: Row) -> None:
        """Hands out the row of a step that the device is done with."""
        due = [read for read, every in self._readers.items() if row.step % every == 0]
        if due:
            self._hand_out(row, due)

    def _known_values(self) -> dict[str, Any]:
        """The last value of each name, or the step that has it."""
        if self._newest is not None:
            step, self._newest = self._newest, None
            # What hooks have logged is known since then, and may be newer there.
            names = [name for name in step if name not in step.added]
            self._known |= dict.fromkeys(names, step)
        return self._known

    def _hand_out(self, row: Row, readers: Iterable[OnRow]) -> None:
        """Gives a row to all, also where one of them fails."""
        hand_out = self.stopwatch.time_function("callbacks", _try_all)
        hand_out(readers, row, of_callbacks=True)

    def _write(self, row: Row) -> None:
        if self._sinks:
            self._hand_out(row, [sink.write for sink in self._sinks])

    def _write_validation(self) -> None:
        """Writes a validation in the middle of an epoch, which no epoch's row has."""
        row, self._validation = self._validation, None
        if row is not None:
            self._write(row)

    def _write_epoch(self, values: Mapping[str, float]) -> None:
        earlier, validation = self._progress.val_metrics, self._validation
        row = self._here("epoch", {n: v for n, v in values.items() if n not in earlier})
        self._hand_out(row, self._of_means)
        if validation is not None and validation.step == row.step:
            self._validation = None
            row = row._replace(validation=validation.values)
        self._write_validation()
        self._write(row)

    def _close(self, values: dict[str, float]) -> None:
        row = self._here("fit", values)
        # At an epoch's end the next one is the present one, which has not begun.
        is_new = self._progress.done == 0
        row = row._replace(epoch=max(0, row.epoch - is_new))
        last = [functools.partial(self._write, row)] if values else []
        closes = [sink.close for sink in self._sinks]
        closing = functools.partial(_try_all, closes, of_callbacks=True)
        # What reads steps alone has read all, unless the fit has failed.
        writes = [sink.write for sink in self._sinks]
        self._readers = {r: n for r, n in self._readers.items() if r in writes}
        try:
            _try_all([self.read_rest, self._write_validation, *last, closing])
        finally:
            if self._sinks:
                self._rewound_to = None
            self._readers, self._of_means, self._sinks = {}, [], []

    def _here(self, kind: Kind, values: Mapping[str, Any]) -> Row:
        return Row(kind, self._progress.epoch, self._progress.global_step, values)

    # What a checkpoint has of it.

    def settle(self) -> None:
        """Before a checkpoint: all rows but a last validation's are written."""
        flushes = [sink.flush for sink in self._sinks]
        flushing = functools.partial(_try_all, flushes, of_callbacks=True)
        try:
            _try_all([self.read_rest, flushing])
        except OSError as error:  # a full disk of logs costs no checkpoint
            warn(f"{error}. These rows are missing.")

    def state_dict(self) -> dict[str, Any]:
        """What is not written yet; JSON."""
        row = self._validation
        return {"validation": row and [row.epoch, row.step, dict(row.values)]}

    def rewind(self, meta: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint; sinks follow as soon as they are open."""
        self.run_id, self._rewound_to = meta["run_id"], meta["global_step"]
        self._waiting.clear()
        self._known, self._newest = {}, None
        validation = (meta.get("record") or {}).get("validation")
        self._validation = validation and Row("val", *validation)


def scalars(metrics: Mapping[str, Any]) -> dict[str, Number]:
    """The single numbers in a step's metrics. Waits for that step."""
    # waits for the device
    values = {name: np.asarray(metrics[name]) for name in metrics}
    return {name: _number(value) for name, value in values.items() if value.ndim == 0}


def _number(value: np.ndarray) -> Number:
    if value.dtype.kind in "iub":
        return int(value)
    # Through text, so that a float32 0.1 is 0.1 and not 0.10000000149011612.
    return float(str(value)) if value.dtype.kind == "f" else float(value)


def _one(name: str, value: Any) -> float:
    number = as_number(value)
    if number is None:
        raise TypeError(
            f"`log`: the value of {name!r} must be one number; got {value!r} of type"
            f" {type(value).__name__}."
        )
    return number


def _try_all(
    functions: Iterable[Callable[..., None]], *given: Any, of_callbacks: bool = False
) -> None:
    """Calls all of them, and then raises what the first one that failed has raised; of
    callbacks, with a note that says whose it was."""
    wrong = None
    for function in functions:
        try:
            function(*given)
        except BaseException as error:
            if of_callbacks:
                note_callback(error, function)
            if not isinstance(error, Exception):
                raise
            wrong = wrong or error
    if wrong is not None:
        raise wrong
