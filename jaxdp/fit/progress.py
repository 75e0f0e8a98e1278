"""The progress of a run over fits and resumes, and the limits of a fit."""

import sys
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ..basics.arguments import check_count, is_int, parse_duration
from ..basics.console import add_article, log_info, log_info_once
from ..data import NO_LOADER, Position, RowPartition, Source, Window

_ONLY: Final = "val"
"""The name of the validation loader, if there is only one."""


class Progress:
    """The completed steps and batches of a run, and the position of the next batch.

    Each fit passes its own training loader.

    Attributes:
        global_step: completed optimizer steps.
        ahead: the number of steps that the state is beyond `global_step`, within a
            dispatch of several steps.
        epoch: the current epoch, counted from 0.
        batches_done: the completed batches of the current epoch.
        batches_seen: the completed batches of the present loader, of all epochs.
        examples: the real rows of the current epoch so far.
        num_batches: the number of the epoch's batches, once its last one was read.
        is_epoch_complete: whether the epoch has no more batches, while its end runs:
            its row in the history, and its hooks.
        has_epoch_ended: whether the end of the current epoch has run. An epoch that was
            cut short stays the current one.
        val_metrics: the values of the epoch's last validation.
        logged: the last values that callbacks have logged in the epoch.
        validated_at: the number of the epoch's batches before its last validation.
    """

    def __init__(self) -> None:
        self.global_step = self.ahead = self.epoch = 0
        self.batches_done = self.batches_seen = self.examples = 0
        self.has_epoch_ended = self.is_epoch_complete = False
        self.num_batches: int | None = None
        self.val_metrics: dict[str, float] = {}
        self.logged: dict[str, float] = {}
        self.validated_at = 0
        self._source: Source | None = None  # of the training batches
        self._position = Position()  # the start of the loader's next pass
        self._vals: dict[str, Source] = {}
        self._val_states: dict[str, Any] = {}  # from a checkpoint

    def resume_loaders(self, source: Source, vals: Mapping[str, Source]) -> None:
        """Continues with `source`, after the completed batches of the epoch."""
        last = self._source
        if last is not None and last.epoch_start is not None:
            is_same, done = last.loader is source.loader, self.batches_done
            marked = last.make_position(self.epoch, done)
            is_inside = is_same and done and source.is_iterator
            marked = marked._replace(num_yielded=None if is_inside else 0)
            self._position = marked if is_same or done else Position()
            self.batches_seen = self.batches_seen if is_same else 0
        self._source = source
        source.start_training()
        for name, val in vals.items():
            is_restored = val.state.restore(self._val_states.get(name))
            if val.is_iterator and name in self._val_states and not is_restored:
                log_info(f"`{val.argument}` starts again: it has no JSON `state_dict`")
        self._vals = {**vals}
        self._val_states = {} if vals else self._val_states

    def start_loader(self, source: Source) -> None:
        """Starts an epoch over, at the first batch of `source`."""
        if self._source is None or self._source.loader is not source.loader:
            self.batches_seen = 0
        self.batches_done = self.validated_at = 0
        self.val_metrics, self._position, self._source = {}, Position(), source
        source.start_training()

    def take_position(self) -> Position:
        """Returns the start of the next pass over the training data, and resets it."""
        position, self._position, self.num_batches = self._position, Position(), None
        return position._replace(epoch=self.epoch, batches=self.batches_done)

    def next_epoch(self) -> None:
        """Moves to the first batch of the next epoch, whatever is left of this one."""
        self.epoch, self.batches_done = self.epoch + 1, 0
        self.validated_at, self.val_metrics, self.logged = 0, {}, {}
        self._position = Position(num_yielded=self._position.num_yielded)

    def count_step(self, window: Window, rows: int) -> None:
        """Counts a step over the batches of `window`, which have `rows` real rows."""
        self.global_step += 1
        self.examples += rows
        self.has_epoch_ended = False
        self.batches_done += len(window)
        self.batches_seen += len(window)
        if self._source is not None and self._source.is_iterator:
            self._source.last_batch = window[-1]

    def state_dict(self, partition: RowPartition) -> dict[str, Any]:
        """Returns JSON for `load_state_dict`."""
        # A finished epoch is saved as the start of the next one.
        current = Progress() if self.is_epoch_complete else self
        epoch, position = self.epoch + self.is_epoch_complete, self._position
        source = self._source
        if source is not None and source.epoch_start is not None:
            position = source.make_position(epoch, current.batches_done)
            if position.state is None:
                position = position._replace(state=source.state.read())

        states = dict(self._val_states)
        states |= {name: val.read_pass_state() for name, val in self._vals.items()}
        vals = {name: partition.gather_states(states[name]) for name in sorted(states)}
        return {
            "global_step": self.global_step,
            "current_epoch": epoch,
            "batches_seen": self.batches_seen,
            "examples_seen": self.examples,
            "source": partition.gather_states(position.state),
            "place": partition.gather_states(position.waypoint),
            "validation": vals.get(_ONLY) if set(vals) <= {_ONLY} else vals,
            "after": None,  # in checkpoints of 0.2 a checksum of the last batch
            "batches_done": current.batches_done,
            "epoch_ended": current.has_epoch_ended,
            "val_metrics": current.val_metrics,
            "logged": current.logged,
            "validated_at": current.validated_at,
        }

    def load_state_dict(self, state: dict[str, Any], partition: RowPartition) -> None:
        self.global_step, self.epoch = state["global_step"], state["current_epoch"]
        self.batches_done, self.examples = state["batches_done"], state["examples_seen"]
        self.batches_seen = state["batches_seen"]
        self.has_epoch_ended, self.is_epoch_complete = state["epoch_ended"], False
        self.val_metrics = state["val_metrics"]
        self.logged = state.get("logged", {})  # checkpoints of 0.2 lack this field
        self.validated_at = state["validated_at"]
        self._source = self.num_batches = None
        self._position = Position(
            state=partition.select_state(state["source"]),
            waypoint=partition.select_state(state["place"]),
            num_yielded=self.batches_seen,
        )
        saved = state["validation"]  # of the only loader, or of several by name
        is_named = isinstance(saved, dict) and all(n.startswith("val_") for n in saved)
        saved = saved if is_named else {_ONLY: saved}
        self._vals = {}
        self._val_states = {n: partition.select_state(s) for n, s in saved.items()}


class FitArguments(NamedTuple):
    """The arguments of `Trainer.fit` that limit it, and say when it validates."""

    max_epochs: int | None = None
    max_steps: int | None = None
    max_time: Any = None
    min_epochs: int | None = None
    min_steps: int | None = None
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    check_val_every_n_epoch: int = 1
    val_check_interval: int | float | None = None
    fast_dev_run: bool | int = False
    overfit_batches: int | float | None = None

    def limit_to_fast_dev_run(self, epoch: int) -> "FitArguments":
        """Returns the arguments for one epoch of `fast_dev_run` batches."""
        batches = int(self.fast_dev_run)
        return FitArguments(
            max_epochs=epoch + 1,
            max_time=self.max_time,
            limit_train_batches=batches,
            limit_val_batches=batches,
            fast_dev_run=self.fast_dev_run,
            overfit_batches=self.overfit_batches,
        )


class Limits:
    """The limits of one fit, resolved for its loaders.

    Args:
        train: the training batches.
        vals: the validation batches, by name.
        arguments: the arguments of `Trainer.fit`.
        accumulate: micro-batches per step.

    Attributes:
        batches_per_epoch, steps_per_epoch: None if unknown.
        val_limits: batches per validation by name; None for all.
        val_batches: batches per validation, if known.
    """

    def __init__(
        self,
        train: Source,
        vals: Mapping[str, Source],
        arguments: FitArguments,
        accumulate: int,
    ):
        max_epochs, max_steps, max_time, min_epochs, min_steps = arguments[:5]
        max_steps = None if max_steps == -1 else max_steps  # Lightning's default
        ends = max_steps, max_time, arguments.limit_train_batches
        if train.loader is NO_LOADER and ends == (None, None, None):
            raise ValueError(
                "`fit` was given no `train_loader`, so that an epoch has no end; pass"
                " `max_steps`, `max_time`, or as `limit_train_batches` the number of"
                " steps of an epoch."
            )
        if max_epochs is None and max_steps is None and max_time is None:
            max_epochs = 1
        self.min_epochs, self.min_steps = min_epochs or 0, min_steps or 0
        _check_range("epochs", self.min_epochs, max_epochs)
        _check_range("steps", self.min_steps, max_steps)
        self.max_epochs = None if max_epochs == -1 else max_epochs
        self.max_steps = max_steps
        self.seconds = None
        if max_time is not None:
            self.seconds = parse_duration(max_time, "max_time")
        self.deadline: float | None = None

        # The length of an epoch, if known.
        self.train_batches = resolve_limit(
            "limit_train_batches", arguments.limit_train_batches, train.num_batches
        )
        self.batches_per_epoch = _min_known(train.num_batches, self.train_batches)
        self.accumulate = accumulate
        self.steps_per_epoch = self.count_steps(accumulate)
        shortens = arguments.limit_train_batches is not None
        shortens = shortens or arguments.overfit_batches or arguments.fast_dev_run
        if not shortens and accumulate > (count := train.num_batches or accumulate):
            log_info_once(
                f"`accumulate_grad_batches`={accumulate} is more than the {count}"
                f" batches of an epoch, so each epoch is one step, of {count} batches"
            )

        # Validation.
        self.check_val_every_n_epoch = arguments.check_val_every_n_epoch
        check_count("check_val_every_n_epoch", self.check_val_every_n_epoch)
        self.val_interval = self._resolve_interval(arguments.val_check_interval)
        limit = arguments.limit_val_batches
        self.val_limits = {
            name: resolve_limit("limit_val_batches", limit, val.num_batches)
            for name, val in vals.items()
        }
        counts = [
            _min_known(val.num_batches, self.val_limits[name])
            for name, val in vals.items()
        ]
        known = [count for count in counts if count is not None]
        self.val_batches = sum(known) if len(known) == len(counts) else None
        self.skips_validation = 0 in self.val_limits.values()
        for name, val in vals.items():
            _check_val_source(val, train, self.val_limits[name])

    def count_steps(self, accumulate: int) -> int | None:
        """Returns the steps of an epoch with `accumulate` micro-batches each."""
        batches = self.batches_per_epoch
        return None if batches is None else -(-batches // accumulate)

    def start_clock(self) -> None:
        """Starts the time of `max_time`."""
        if self.seconds is not None:
            self.deadline = time.monotonic() + self.seconds

    def completes_epoch(self, batches_done: int) -> bool:
        """Returns True if `batches_done` batches are known to complete an epoch."""
        batches = self.batches_per_epoch
        return batches is not None and batches_done >= batches

    def is_time_over(self) -> bool:
        """Returns True if `max_time` is over, by the clock of this process."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def is_reached(self, step: int, epoch: int) -> bool:
        """Returns True if `max_steps` or `max_epochs` is reached."""
        if self.max_steps is not None and step >= self.max_steps:
            return True
        return self.max_epochs is not None and epoch >= self.max_epochs

    def may_stop(self, step: int, epoch: int) -> bool:
        """Returns True if `min_steps` and `min_epochs` are reached."""
        return step >= self.min_steps and epoch >= self.min_epochs

    def steps_until_stop(self, step: int, batches_done: int) -> int | None:
        """Returns the steps until `min_steps`, `max_steps` or a validation within the
        epoch; None if none of the three lies ahead.
        """
        stops = [] if self.max_steps is None else [self.max_steps - step]
        stops += [self.min_steps - step] if step < self.min_steps else []
        if self.val_interval is not None:
            batches = self.val_interval - batches_done % self.val_interval
            stops.append(-(-batches // self.accumulate))
        return min(stops, default=None)

    def is_interval_due(self, progress: Progress) -> bool:
        """Returns True if `val_check_interval` requires a validation now."""
        every = self.val_interval
        if every is None or not self.is_epoch_due(progress.epoch):
            return False
        return progress.batches_done // every > progress.validated_at // every

    def validates_before_end(self) -> bool:
        """Returns True if the fit may validate before its last epoch ends."""
        every, epochs = self.check_val_every_n_epoch, self.max_epochs
        if self.max_steps is not None and self.steps_per_epoch:
            epochs = _min_known(epochs, -(-self.max_steps // self.steps_per_epoch))
        return every == 1 or epochs is None or every <= epochs

    def is_epoch_due(self, epoch: int) -> bool:
        """Returns True if this epoch ends with a validation."""
        return (epoch + 1) % self.check_val_every_n_epoch == 0

    def _resolve_interval(self, interval: int | float | None) -> int | None:
        available = self.batches_per_epoch
        every = resolve_limit("val_check_interval", interval, available)
        if every is None:
            return None  # an epoch ends with a validation anyway
        check_count("val_check_interval", every)
        if available is not None and every > available:
            raise ValueError(
                f"`val_check_interval`={every} is more than the {available} batches of"
                " an epoch, so there would be no validation; use"
                " `check_val_every_n_epoch` for less than one per epoch."
            )
        return every


def _check_range(name: str, minimum: int, maximum: int | None) -> None:
    """Raises for an invalid `min_...` or `max_...`, or if the first is larger."""
    check_count(f"min_{name}", minimum, minimum=0)
    if maximum is None or maximum == -1:
        return
    no_limit = ", or -1 for no limit"
    check_count(f"max_{name}", maximum, minimum=0, suffix=no_limit)
    if minimum > maximum:
        raise ValueError(
            f"`min_{name}`={minimum} is more than `max_{name}`={maximum};"
            f" pass a larger `max_{name}`."
        )


def _check_val_source(val: Source, train: Source, limit: int | None) -> None:
    """Raises if the batches of `val` run out, or are those of `train`."""
    if val.is_iterator and val.loader is train.loader:
        raise ValueError(
            f"`{val.argument}` is the iterator that `train_loader` is, so that"
            " each would take batches from the other; pass two of them."
        )
    if val.is_single_use and limit is None:
        raise ValueError(
            f"`{val.argument}` is {add_article(type(val.loader).__name__)}, which can"
            f" be iterated once; pass a list of its batches, list({val.argument}), or"
            " what it iterates over."
        )


def _min_known(*counts: int | None) -> int | None:
    return min((count for count in counts if count is not None), default=None)


def resolve_limit(
    name: str, limit: int | float | None, available: int | None
) -> int | None:
    """Returns `limit` in batches, None for all; a float is a share of `available`."""
    if limit is None:
        return None
    if is_int(limit):
        check_count(name, limit, minimum=0, maximum=sys.maxsize, suffix=" batches")
        return int(limit)
    share = float(limit)
    if not 0 <= share <= 1:
        raise ValueError(
            f"`{name}` must be from 0.0 to 1.0 as a share of an epoch; got {share}. For"
            " a number of batches pass an int."
        )
    if share == 1:
        return None
    if available is None:
        raise ValueError(
            f"`{name}`={limit} is a share of an epoch, and the length of the loader is"
            " not known; pass a number of batches."
        )
    count = int(available * share)
    if count == 0 and share and available:
        raise ValueError(
            f"`{name}`={limit} of {available} batches is less than one batch; pass a"
            " larger share, a number of batches, or 0 for none."
        )
    return count
