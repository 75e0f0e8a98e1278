"""The log of a run: the only place that knows the step, epoch and run of a value."""

import collections
import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np

from .basics.arguments import as_number
from .basics.columns import EPOCH, VALIDATION
from .basics.console import warn
from .basics.stopwatch import Stopwatch
from .basics.tracebacks import note_callback
from .distributed import ProcessGroup
from .history import History
from .step import Metrics

RowKind = Literal["step", "val", "epoch", "fit"]
"""Logged values describe a step, a validation, an epoch, or a complete fit."""
Number = int | float

_RESERVED: Final = ("epoch", "step")


class LogRow(NamedTuple):
    """Logged values, and where in the run they are from."""

    kind: RowKind
    epoch: int
    """Counted from 0."""
    step: int
    """Completed optimizer steps."""
    values: Mapping[str, Any]
    batch_idx: int | None = None
    """The index of a step within its epoch."""
    validation: Mapping[str, Any] | None = None
    """The values of the validation at the end of an epoch, if there was one."""

    def numbers(self) -> dict[str, Number]:
        """Returns the scalar values by column name; waits for a step of the device."""
        if self.kind == "step":
            return scalars(self.values)
        prefix = EPOCH if self.kind == "epoch" else ""
        numbers = {
            name if name.startswith(VALIDATION) else prefix + name: value
            for name, value in self.values.items()
        }
        return {**numbers, **(self.validation or {})}


OnRow = Callable[[LogRow], None]


class Sink(Protocol):
    """An object that the record writes rows to during a fit."""

    def write(self, row: LogRow) -> None:
        """Writes one row. Rows of steps come some steps late."""

    def rewind(self, step: int) -> None:
        """Removes rows after a step, which a resumed run writes again. Called once."""

    def flush(self) -> None:
        """Makes all rows so far durable; called before a checkpoint."""

    def close(self) -> None:
        """Closes files; called after the last row of a fit."""


class _Reader(NamedTuple):
    """A function to call with rows of the given kinds.

    Of the rows of steps it gets only each `every`-th.
    """

    read: OnRow
    kinds: tuple[RowKind, ...]
    every: int = 1
    sink: Sink | None = None


class _LogTarget(NamedTuple):
    """The dictionaries that `log` puts values into at present."""

    names: Mapping[str, Any]
    """The names that are taken there."""
    values: dict[str, Any]
    epoch_values: dict[str, float] | None = None
    """Gets the values, too; None stands for those of the present epoch."""


class Record:
    """The log of a run: takes values of steps, validations, epochs and fits, and sends
    them as rows to one list of readers.

    The values of a step are lazy. They stay in one queue until so many later steps are
    dispatched that the device has surely completed them, so that no reader waits.

    Args:
        run_id: identifies this run across resumes.
        processes: the processes that train together.
        progress: counts completed steps and epochs.
        accumulate: micro-batches per step.

    Attributes:
        run_id: as passed, or that of the checkpoint that the run resumed from.
        history: the means of all epochs.
        names: the values that steps and validations log; known once a step is compiled.
        names_are_all: whether validations log nothing else; a `PassMetric` may.
        limits: those of the fit, such as `min_epochs`; None in a loop of the caller.
        stopwatch: measures the phases of the fit, if a callback has asked for it.
    """

    def __init__(
        self, run_id: str, processes: ProcessGroup, progress: Any, accumulate: int
    ):
        self.run_id = run_id
        self.history = History()
        self.names: tuple[str, ...] = ()
        self.names_are_all = True
        self.limits: Any = None
        self.stopwatch = Stopwatch()
        self._processes, self._progress = processes, progress
        self._accumulate = accumulate

        self._readers: list[_Reader] = []
        self._rewound_to: int | None = None

        # Rows of steps that the device may not have completed, each with the step from
        # which on it has.
        self._queue: collections.deque[tuple[int, LogRow]] = collections.deque()
        # The latest values of all completed steps: numbers, or the `Metrics` that have
        # them; and the `Metrics` of the newest one, which are not among them yet.
        self._known: dict[str, Any] = {}
        self._newest: Any = None
        # A validation that the row of its epoch is to contain, and the step of the last
        # validation that has a row of its own.
        self._pending: LogRow | None = None
        self._written_at: int | None = None

        self._target: _LogTarget | None = None  # None outside of hooks
        self._before_row: dict[str, float] = {}  # logged before its step has a row
        self._logged_names: set[str] = set()  # all names that hooks have logged

    # Where the run is.

    @property
    def batch_idx(self) -> int:
        """Optimizer steps done in the present epoch: the index of the next one."""
        return -(-self._progress.batches_done // self._accumulate)

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
        """Steps that the fit takes in the present epoch, fewer than in others if
        `max_steps` comes before its end; None if unknown."""
        limits = self.limits
        if limits is None or limits.max_steps is None:
            return limits and limits.steps_per_epoch
        remaining = max(limits.max_steps - self._progress.global_step, 0)
        return min(self.batch_idx + remaining, limits.steps_per_epoch or math.inf)

    @property
    def is_at_epoch_end(self) -> bool:
        """Whether all steps that the fit takes in the epoch are done, but not what
        follows them: validation, history, `on_train_epoch_end`."""
        progress, total = self._progress, self.steps_of_epoch
        # A loader may have more batches than its length says.
        is_over = total is not None and 0 < total == self.batch_idx
        return (
            is_over or progress.batches_done == progress.num_batches
        ) and not progress.has_epoch_ended

    @property
    def epochs_done(self) -> int:
        """Epochs whose steps are all done."""
        is_over = self.is_at_epoch_end or self._progress.is_epoch_complete
        return self._progress.epoch + is_over

    def find_last_step(self) -> int | None:
        """Returns the last step of the fit, by its limits; None if unknown."""
        limits, progress = self.limits, self._progress
        if limits is None:
            return None
        known = [] if limits.max_steps is None else [limits.max_steps]
        if limits.max_epochs is not None and limits.steps_per_epoch is not None:
            epochs = limits.max_epochs - progress.epoch
            remaining = epochs * limits.steps_per_epoch - self.batch_idx
            known.append(progress.global_step + remaining)
        return min(known, default=None)

    # Values that come in.

    def put(
        self,
        kind: Literal["val", "epoch"],
        values: Mapping[str, float],
        *,
        ends_epoch: bool = False,
    ) -> None:
        """Adds values of a validation or an epoch.

        A validation at the end of an epoch is written with the row of the epoch, and
        any other has a row of its own. `ends_epoch` says that no more steps follow.
        """
        self.read_queue()  # the device has completed these steps
        self._latest_values().update(values)
        progress = self._progress
        if kind == "val":
            self._write_pending()  # more steps followed it after all
            self._pending = row = self._make_row(kind, dict(values))
            self._send(row, [r for r in self._readers if not r.sink])
            if not (ends_epoch or self.is_at_epoch_end):
                self._write_pending()
        else:
            validation = progress.val_metrics
            own = {n: v for n, v in values.items() if n not in validation}
            row, pending = self._make_row(kind, own), self._pending
            if pending is not None and pending.step == row.step:
                self._pending = None  # in this row
            elif pending is not None:
                self._write_pending()
            is_current = validation and progress.validated_at == progress.batches_done
            if is_current and self._written_at != row.step:
                row = row._replace(validation=validation)
            self._send(row)

    def put_step(self, metrics: Metrics, batch_idx: int, *, sends: bool = True) -> None:
        """Adds the lazy values of a step; hooks log beside them from now on.

        With `sends`, readers get the rows of earlier steps that the device has
        completed.
        """
        step, queue = self._progress.global_step, self._queue
        self._target = _LogTarget(metrics, metrics.added)
        if self._before_row:
            values, self._before_row = self._before_row, {}
            metrics.add(values)
        while sends and queue and queue[0][0] <= step:
            row = queue.popleft()[1]
            older: Any = row.values
            self._newest = older
            if self._readers:
                self._send(row)
            if older.added:
                self._keep_added(older)
        row = LogRow("step", self._progress.epoch, step, metrics, batch_idx)
        queue.append((step + metrics.steps_in_flight, row))

    def begin_step(self) -> None:
        """Directs `log` to the next step, which has no row yet."""
        self._target = _LogTarget(self._before_row, self._before_row)

    def log(self, name: str, value: Any) -> None:
        """Logs a value of a hook, for `Trainer.log`.

        The hooks of a validation, and those at the end of an epoch or a fit, log into
        its row; all others into the row of the step and into that of the epoch, which
        has the last value of each name.
        """
        if self._target is None:
            raise RuntimeError(f"`log({name!r})`: call it in a hook of a callback.")
        if not isinstance(name, str):
            raise TypeError(f"`log`: `name` must be a str; got {name!r}.")
        names, values, epoch_values = self._target
        is_taken = name in (*_RESERVED, *self.names) or name in (*names,)
        if is_taken and name not in self._logged_names:
            raise ValueError(
                f"`log`: the name {name!r} is taken by a value that is logged anyway;"
                " use another one."
            )
        number = self._processes.run_on_rank_zero(
            f"log({name!r})", functools.partial(as_number, value)
        )
        if number is None:
            raise TypeError(
                f"`log`: the value of {name!r} must be one number; got {value!r} of"
                f" type {type(value).__name__}."
            )
        self._logged_names.add(name)
        values[name] = self._latest_values()[name] = number
        (self._progress.logged if epoch_values is None else epoch_values)[name] = number

    @contextlib.contextmanager
    def redirect_logs(self, values: dict[str, float]) -> Iterator[dict[str, float]]:
        """Directs `log` to `values` in the block, and to the dict that this yields."""
        outer, logged = self._target, dict[str, float]()
        self._latest_values().update(values)
        self._target = _LogTarget(values, values, logged)
        try:
            yield logged
        finally:
            self._target = outer
            if outer is not None and outer.epoch_values is None:
                self.begin_step()  # the row of the last step is written

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Opens the record, without readers, for a fit or a loop of the caller."""
        was_open, outer = self._target is not None, self._readers
        self._readers, self.stopwatch = [], Stopwatch()
        self.begin_step()
        try:
            yield
        finally:
            self._target = None
            if was_open:  # a fit inside of a loop gives the loop its readers back
                self._readers = outer
                self.begin_step()

    @contextlib.contextmanager
    def write_last_row(self) -> Iterator[None]:
        """Writes what the last hooks of a fit log, in the block, and closes all sinks.

        The values are added to the last epoch of the history, too.
        """
        values: dict[str, float] = {}
        try:
            with self.redirect_logs(values) as logged:
                yield
            if logged and self.history.epochs:
                self.history.append(self.history.epochs[-1], logged)
        finally:
            self._close_sinks(values)

    # Readers.

    def latest(self, name: str) -> float | None:
        """Returns the newest value of `name` known without a wait; None before any."""
        value = self._latest_values().get(name)
        if isinstance(value, Metrics):
            value = value[name]
        return None if value is None else float(value)

    def last_values(self) -> dict[str, float]:
        """Returns the last value of each name; waits for the device."""
        values = dict(self._latest_values())
        for _, row in self._queue:
            values |= dict.fromkeys(row.values, row.values)
        values |= self._before_row
        # waits for the device
        numbers = {
            name: np.asarray(value[name] if isinstance(value, Metrics) else value)
            for name, value in values.items()
        }
        return {name: float(each) for name, each in numbers.items() if each.ndim == 0}

    def add(self, sink: Sink, every: int) -> None:
        """Registers `sink` for all rows of the fit; of steps, each `every`-th."""
        if self._rewound_to is not None:
            sink.rewind(self._rewound_to)
        kinds = "step", "val", "epoch", "fit"
        self._readers.append(_Reader(sink.write, kinds, every, sink))

    def read_steps(self, function: OnRow) -> None:
        """Registers `function` for the row of each step, once it can be read; for
        `Callback.setup`."""
        self._readers.append(_Reader(function, ("step",)))

    def read_means(self, function: OnRow) -> None:
        """Registers `function` for the row of each validation of a fit and of each
        epoch, whose `validation` repeats the values of its end; for `Callback.setup`.
        """
        # Not before `validate` or `predict`, which have no such rows.
        if self._target is not None:
            self._readers.append(_Reader(function, ("val", "epoch")))

    def measure_phases(self) -> Stopwatch:
        """Measures the phases of the fit that begins; for `Callback.setup`."""
        self.stopwatch.is_on = True
        return self.stopwatch

    def read_queue(self) -> None:
        """Sends the rows of all steps so far; waits for the device if there is a
        reader for them."""
        waiting = [*self._queue]
        if waiting:
            self._newest = waiting[-1][1].values
        self._queue.clear()  # the device may be what fails
        _call_all([functools.partial(self._send, row) for _, row in waiting])
        for _, row in waiting:
            metrics: Any = row.values
            if metrics.added:
                self._keep_added(metrics)

    def _latest_values(self) -> dict[str, Any]:
        """Returns the last value of each name, or the step that has it."""
        if self._newest is not None:
            step, self._newest = self._newest, None
            # `log` has put the values of hooks there, and may have put newer ones.
            names = [name for name in step if name not in step.added]
            self._known |= dict.fromkeys(names, step)
        return self._known

    def _keep_added(self, metrics: Any) -> None:
        """Notes the values that callbacks have added to a step: later ones may have no
        such values.
        """
        added = [name for name in metrics.added if name not in self._logged_names]
        self._latest_values().update(dict.fromkeys(added, metrics))

    def _send(self, row: LogRow, readers: Iterable[_Reader] | None = None) -> None:
        """Sends a row to all readers of its kind, even if one of them fails."""
        reads = []
        for reader in self._readers if readers is None else readers:
            if row.kind in reader.kinds:
                if row.kind != "step" or row.step % reader.every == 0:
                    reads.append(reader.read)
        if reads:
            send = self.stopwatch.time_function("callbacks", _call_all)
            send(reads, row, of_callbacks=True)

    def _write_pending(self) -> None:
        """Writes the pending validation to sinks, in a row of its own."""
        row, self._pending = self._pending, None
        if row is not None:
            self._written_at = row.step
            self._send(row, [reader for reader in self._readers if reader.sink])

    def _sinks(self) -> list[Sink]:
        return [reader.sink for reader in self._readers if reader.sink is not None]

    def _close_sinks(self, values: dict[str, float]) -> None:
        """Writes the pending rows and the row of the last hooks; closes all sinks."""
        row = self._make_row("fit", values)
        # At the end of an epoch, the progress counts the next one as the present one.
        is_new = self._progress.batches_done == 0
        row = row._replace(epoch=max(0, row.epoch - is_new))
        # Other readers have read all rows, unless the fit has failed.
        self._readers = [reader for reader in self._readers if reader.sink]
        last = [functools.partial(self._send, row)] if values else []
        closes = [sink.close for sink in self._sinks()]
        closing = functools.partial(_call_all, closes, of_callbacks=True)
        try:
            _call_all([self.read_queue, self._write_pending, *last, closing])
        finally:
            if self._readers:
                self._rewound_to = None
            self._readers = []

    def _make_row(self, kind: RowKind, values: Mapping[str, Any]) -> LogRow:
        return LogRow(kind, self._progress.epoch, self._progress.global_step, values)

    # Checkpoints.

    def flush(self) -> None:
        """Writes all rows so far, before a checkpoint."""
        flushes = [sink.flush for sink in self._sinks()]
        flushing = functools.partial(_call_all, flushes, of_callbacks=True)
        try:
            _call_all([self.read_queue, flushing])
        except OSError as error:  # a full disk of logs costs no checkpoint
            warn(f"{error}. These rows are missing.")

    def rewind(self, run_id: str, step: int) -> None:
        """Continues from a checkpoint of `step`; sinks follow when they are added."""
        self.run_id, self._rewound_to = run_id, step
        self._queue.clear()
        self._known, self._newest = {}, None
        self._pending = self._written_at = None


def scalars(metrics: Mapping[str, Any]) -> dict[str, Number]:
    """Returns the scalars among the metrics of a step; waits for that step."""
    # waits for the device
    values = {name: np.asarray(metrics[name]) for name in metrics}
    return {
        name: _as_python(value) for name, value in values.items() if value.ndim == 0
    }


def _as_python(value: np.ndarray) -> Number:
    if value.dtype.kind in "iub":
        return int(value)
    # Through text, so that a float32 0.1 is 0.1 and not 0.10000000149011612.
    return float(str(value)) if value.dtype.kind == "f" else float(value)


def _call_all(
    functions: Iterable[Callable[..., None]], *args: Any, of_callbacks: bool = False
) -> None:
    """Calls all functions, then raises the first exception of one of them. If they are
    `of_callbacks`, a note on it names the callback."""
    wrong = None
    for function in functions:
        try:
            function(*args)
        except BaseException as error:
            if of_callbacks:
                note_callback(error, function)
            if not isinstance(error, Exception):
                raise
            wrong = wrong or error
    if wrong is not None:
        raise wrong
