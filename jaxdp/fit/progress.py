"""How far a run is, over fits, kills and resumes, and how far a fit goes."""

import sys
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from ..basics.arguments import check_count, parse_duration
from ..data import NO_LOADER, Position, Share, Source, Window, checksum

_ONLY: Final = "val"
"""The name of a validation's loader that is the only one."""


class Progress:
    """What is done of a run, and which batch comes next.

    The training data is passed anew to every fit.

    Attributes:
        global_step: optimizer steps.
        ahead: how many more the state has, in the middle of a dispatch of several.
        epoch: the present one, counted from 0.
        done: its batches that are done with.
        seen: batches of all epochs that are.
        examples: its real rows.
        epoch_ended: whether it is in the history. One that was cut short goes on.
        is_finished: whether no batch of it is left, while it is being ended.
        end: how many batches it has, once the last one was read ahead; else None.
        val_metrics: its last validation's.
        logged: the last values that callbacks have logged in it.
        validated_at: after which of its batches that was.
    """

    def __init__(self) -> None:
        self.global_step = self.epoch = self.done = self.seen = self.examples = 0
        self.ahead = 0
        self.epoch_ended = self.is_finished = False
        self.end: int | None = None
        self.val_metrics: dict[str, float] = {}
        self.logged: dict[str, float] = {}
        self.validated_at = 0
        self._source: Source | None = None  # of the batches that are trained on
        self._at = Position()  # where its next pass begins
        self._vals: dict[str, Source] = {}
        self._val_states: dict[str, Any] = {}  # in a checkpoint

    def go_on_with(self, source: Source, vals: Mapping[str, Source]) -> None:
        """The next batch is one of `source`, after those of the epoch that are done."""
        last = self._source
        if last is not None and (begun := last.begun) is not None:
            goes_on = last.loader is source.loader or self.done
            marked = last.mark(begun, self.epoch, self.done)
            self._at = marked if goes_on else Position()
        self._keep(source)
        for name, val in vals.items():
            val.restore(self._val_states.get(name))
        self._vals = {**vals}
        self._val_states = {} if vals else self._val_states

    def start_with(self, source: Source) -> None:
        """The next batch is the first of `source`."""
        self.done, self._at = 0, Position()
        self._keep(source)

    def position(self) -> Position:
        """Returns where the next pass over the training data begins, for once."""
        at, self._at, self.end = self._at, Position(), None
        return at._replace(epoch=self.epoch, batches=self.done)

    def begin_epoch(self) -> None:
        """Its first step is about to be taken."""
        self.examples = self.validated_at = 0
        self.val_metrics = {}

    def next_epoch(self) -> None:
        """The present epoch is over; the next batch is the first of the next one."""
        self.epoch, self.done = self.epoch + 1, 0
        self.validated_at, self.val_metrics, self.logged = 0, {}, {}

    def leave_epoch(self) -> None:
        """What is left of the present epoch is given up."""
        self.next_epoch()
        self._at = Position(given=self._at.given)

    def count(self, window: Window, rows: int) -> None:
        """A step over these batches, which have so many real rows, was taken."""
        self.global_step += 1
        self.examples += rows
        self.epoch_ended = False
        self.done += len(window)
        self.seen += len(window)
        if self._source is not None:
            self._source.trained_on(window)

    def drop(self, batches: int) -> None:
        """So many batches are no good: an iterator does not give them again."""
        if self._source is not None:
            self._source.drop(batches)

    def state_dict(self, share: Share) -> dict[str, Any]:
        """For `load_state_dict`; JSON."""
        # An epoch that is over counts as the next one, not begun.
        of_epoch = Progress() if self.is_finished else self
        epoch, at = self.epoch + self.is_finished, self._at
        source = self._source
        if source is not None and source.begun is not None:
            at = source.mark(source.begun, epoch, of_epoch.done)
            if at.state is None:
                at = at._replace(state=source.present_state())

        states = dict(self._val_states)
        states |= {name: val.state_now() for name, val in self._vals.items()}
        several = {name: share.states(states[name]) for name in sorted(states)}
        return {
            "global_step": self.global_step,
            "current_epoch": epoch,
            "batches_seen": self.seen,
            "examples_seen": self.examples,
            "source": share.states(at.state),
            "place": share.states(at.place),
            "validation": several.get(_ONLY) if set(several) <= {_ONLY} else several,
            "after": checksum(at.last),
            "batches_done": of_epoch.done,
            "epoch_ended": of_epoch.epoch_ended,
            "val_metrics": of_epoch.val_metrics,
            "logged": of_epoch.logged,
            "validated_at": of_epoch.validated_at,
        }

    def load_state_dict(self, state: dict[str, Any], share: Share) -> None:
        self.global_step, self.epoch = state["global_step"], state["current_epoch"]
        self.done, self.examples = state["batches_done"], state["examples_seen"]
        self.seen = state["batches_seen"]
        self.epoch_ended, self.is_finished = state["epoch_ended"], False
        self.val_metrics = state["val_metrics"]
        self.logged = state.get("logged", {})  # checkpoints of 0.2 have none
        self.validated_at = state["validated_at"]
        self._source = None
        self._at = Position(
            state=share.state(state["source"]),
            place=share.state(state["place"]),
            given=self.seen,
            last=state["after"],
        )
        saved = _by_name(state["validation"])
        self._vals, self._val_states = {}, {n: share.state(s) for n, s in saved.items()}

    def _keep(self, source: Source) -> None:
        source.begin_training()
        if self._source is not None and self._source.loader is source.loader:
            source.go_on_from(self._source)
        self._source = source


def _by_name(told: Any) -> dict[str, Any]:
    """What a checkpoint has of the validations' loaders."""
    is_of_each = isinstance(told, dict) and told
    is_of_each = is_of_each and all(n.startswith(f"{_ONLY}_") for n in told)
    return told if is_of_each else {_ONLY: told}


class Wanted(NamedTuple):
    """What `Trainer.fit` was asked for: its arguments of the same names."""

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

    def of_fast_dev_run(self, epoch: int) -> "Wanted":
        """One epoch of as many batches as `fast_dev_run` says, and a validation."""
        batches = int(self.fast_dev_run)
        return Wanted(
            max_epochs=epoch + 1,
            max_time=self.max_time,
            limit_train_batches=batches,
            limit_val_batches=batches,
            fast_dev_run=self.fast_dev_run,
            overfit_batches=self.overfit_batches,
        )


class Limits:
    """The resolved limits of one fit, whose steps `accumulate` so many batches."""

    def __init__(
        self, train: Source, vals: Mapping[str, Source], wanted: Wanted, accumulate: int
    ):
        max_epochs, max_steps, max_time, min_epochs, min_steps = wanted[:5]
        ends = max_steps, max_time, wanted.limit_train_batches
        if train.loader is NO_LOADER and ends == (None, None, None):
            raise ValueError(
                "`fit` was given no `train_loader`, so that an epoch has no end; pass"
                " `max_steps`, `max_time`, or as `limit_train_batches` the number of"
                " steps of an epoch."
            )
        every_n_epoch = wanted.check_val_every_n_epoch
        if max_epochs is None and max_steps is None and max_time is None:
            max_epochs = 1
        for name, value in (("max_epochs", max_epochs), ("max_steps", max_steps)):
            if value is not None and value != -1:
                check_count(name, value, minimum=0, suffix=", or -1 for no limit")
        for name, least, most in (
            ("epochs", min_epochs, max_epochs),
            ("steps", min_steps, max_steps),
        ):
            if least is not None:
                check_count(f"min_{name}", least, minimum=0)
            if least is not None and most not in (None, -1) and least > most:
                raise ValueError(
                    f"`min_{name}`={least} is more than `max_{name}`={most}; pass a"
                    f" larger `max_{name}`."
                )
        check_count("check_val_every_n_epoch", every_n_epoch)

        # Totals of a run; -1 is none.
        self.max_epochs = None if max_epochs == -1 else max_epochs
        self.max_steps = None if max_steps == -1 else max_steps
        self.min_epochs, self.min_steps = min_epochs or 0, min_steps or 0
        self.seconds: float | None = None
        if max_time is not None:
            self.seconds = parse_duration(max_time, "max_time")
        self.deadline: float | None = None

        # When to validate, and on how much.
        self.check_val_every_n_epoch = every_n_epoch
        limit = wanted.limit_val_batches
        self.val_limits = {
            name: capped("limit_val_batches", limit, val.num_batches)
            for name, val in vals.items()
        }
        counts = [_least(v.sure_batches, self.val_limits[n]) for n, v in vals.items()]
        known = [count for count in counts if count is not None]
        self.val_batches = sum(known) if len(known) == len(vals) > 0 else None
        self.skips_validation = 0 in self.val_limits.values()

        # How long an epoch is, where that is known.
        self.train_batches = capped(
            "limit_train_batches", wanted.limit_train_batches, train.num_batches
        )
        per_epoch = _least(train.num_batches, self.train_batches)
        self._is_sized = train.num_batches is not None
        # Where no more and no fewer batches can come.
        self.whole = _least(train.sure_batches, self.train_batches)
        self.val_interval = self._interval(wanted.val_check_interval, per_epoch)
        self.accumulate = accumulate
        self.batches_per_epoch = per_epoch
        self.steps_per_epoch = self.steps_by(accumulate)

    def check_minimum(self, step: int, epoch: int, batches_done: int) -> None:
        """Raises for a minimum of steps that the epochs left can't reach."""
        if self.max_epochs is None or self.whole is None:
            return
        here, of_each = (
            -(-batches // self.accumulate)
            for batches in (max(0, self.whole - batches_done), self.whole)
        )
        most = step + here + (self.max_epochs - epoch - 1) * of_each
        if epoch < self.max_epochs and most < self.min_steps:
            raise ValueError(
                f"`min_steps`={self.min_steps} is more than the {most} steps that"
                f" `max_epochs`={self.max_epochs} allows; raise `max_epochs`, or pass"
                " -1 for no limit."
            )

    def check_iterators(
        self, train: Source, vals: Mapping[str, Source], step: int, epoch: int
    ) -> None:
        """Raises for validation loaders whose batches will have been used up before."""
        left = [] if self.max_epochs is None else [self.max_epochs - epoch]
        if self.max_steps is not None:
            per_epoch = self.steps_per_epoch or max(1, self.max_steps)
            left.append(-(-(self.max_steps - step) // per_epoch))
        of_ends = min(left, default=1) / self.check_val_every_n_epoch
        for name, val in vals.items():
            if val.is_iterator and val.loader is train.loader:
                raise ValueError(
                    f"`{val.argument}` is the iterator that `train_loader` is, so that"
                    " each would take batches from the other; pass two of them."
                )
            is_read_again = self.val_interval is not None or of_ends > 1
            if is_read_again and val.is_used_up and self.val_limits[name] is None:
                raise ValueError(
                    f"`{val.argument}` is a {type(val.loader).__name__}, which can be"
                    " iterated once, and there will be several validations; pass a"
                    f" list of its batches, list({val.argument}), or what it iterates"
                    " over."
                )

    def steps_by(self, accumulate: int) -> int | None:
        """Optimizer steps of an epoch, of so many batches each."""
        batches = self.batches_per_epoch
        return None if batches is None else -(-batches // accumulate)

    def is_short(self, batches_done: int) -> bool:
        """Whether an epoch of unknown length was to have more batches than these."""
        limit = self.train_batches
        return not self._is_sized and limit is not None and batches_done < limit

    def start_clock(self) -> None:
        """From now on `max_time` counts."""
        if self.seconds is not None:
            self.deadline = time.monotonic() + self.seconds

    def is_finished(self, batches_done: int) -> bool:
        """Whether so many batches are known to be a whole epoch."""
        return self.whole is not None and batches_done >= self.whole

    def time_is_up(self) -> bool:
        """Whether `max_time` is over, by this process's clock."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def done(self, step: int, epoch: int) -> bool:
        """Whether the fit is over, so many steps and epochs done, but for its time."""
        if self.max_steps is not None and step >= self.max_steps:
            return True
        return self.max_epochs is not None and epoch >= self.max_epochs

    def may_stop(self, step: int, epoch: int) -> bool:
        """Whether so many steps and epochs are enough to end the fit early."""
        return step >= self.min_steps and epoch >= self.min_epochs

    def steps_until_stop(self, step: int, batches_done: int) -> int | None:
        """Steps until `min_steps`, `max_steps` or a validation inside the epoch; None:
        no such."""
        stops = [] if self.max_steps is None else [self.max_steps - step]
        stops += [self.min_steps - step] if step < self.min_steps else []
        if self.val_interval is not None:
            left = self.val_interval - batches_done % self.val_interval
            stops.append(-(-left // self.accumulate))
        return min(stops, default=None)

    def interval_is_up(self, epoch: int, batches_done: int, validated_at: int) -> bool:
        """Whether `val_check_interval` asks for a validation at this place, the last
        one having been after so many batches of the epoch."""
        every = self.val_interval
        if every is None or (epoch + 1) % self.check_val_every_n_epoch:
            return False
        return batches_done // every > validated_at // every

    def validates_before_end(self) -> bool:
        """Whether the fit may validate before it ends, which it does once anyway."""
        every, most, of_each = (
            self.check_val_every_n_epoch,
            self.max_epochs,
            self.steps_per_epoch,
        )
        if self.max_steps is not None and of_each:
            most = _least(most, -(-self.max_steps // of_each))
        return every == 1 or most is None or every <= most

    def epoch_is_due(self, epoch: int) -> bool:
        """Whether epoch number `epoch` ends with a validation."""
        return (epoch + 1) % self.check_val_every_n_epoch == 0

    def _interval(self, interval: Any, per_epoch: int | None) -> int | None:
        if interval is None:
            return None
        if isinstance(interval, float | np.floating):
            check_limit("val_check_interval", interval)
            if interval == 0:
                raise ValueError("`val_check_interval`=0.0: it must be more than 0.")
            if per_epoch is None and interval == 1:
                return None  # at the end of an epoch validation comes anyway
            if per_epoch is None:
                raise ValueError(
                    f"`val_check_interval`={interval} is a share of an epoch, and the"
                    " length of `train_loader` is not known; pass a number of batches."
                )
            return max(1, int(per_epoch * interval))
        check_count("val_check_interval", interval)
        if per_epoch is not None and interval > per_epoch:
            raise ValueError(
                f"`val_check_interval`={interval} is more than the {per_epoch} batches"
                " of an epoch, so there would be no validation; use"
                " `check_val_every_n_epoch` for less than one per epoch."
            )
        return int(interval)


def _least(*counts: int | None) -> int | None:
    return min((count for count in counts if count is not None), default=None)


def check_limit(name: str, limit: Any) -> None:
    """Raises unless `limit` is None, a number of batches or a share of them."""
    if limit is None:
        return
    is_whole = isinstance(limit, int | np.integer) and not isinstance(limit, bool)
    if not is_whole and not isinstance(limit, float | np.floating):
        raise TypeError(
            f"`{name}` must be an int (batches) or a float (share of them); got"
            f" {limit!r} of type {type(limit).__name__}."
        )
    if is_whole:
        check_count(name, limit, minimum=0, maximum=sys.maxsize, suffix=" batches")
    if not is_whole and not 0 <= limit <= 1:
        raise ValueError(f"`{name}` as a share must be from 0.0 to 1.0; got {limit}.")


def capped(name: str, limit: int | float | None, available: int | None) -> int | None:
    """`limit` in batches: a float is a share of the `available` ones."""
    check_limit(name, limit)
    if limit is None or (isinstance(limit, float | np.floating) and limit == 1.0):
        return None  # all of them, however many come
    if not isinstance(limit, float | np.floating):
        return int(limit)
    if available is None:
        raise ValueError(
            f"`{name}`={limit} is a share of an epoch, and the length of the loader is"
            " not known; pass a number of batches."
        )
    count = int(available * limit)
    if count == 0 and limit and available:
        raise ValueError(
            f"`{name}`={limit} of {available} batches is less than one batch; pass a"
            " larger share, a number of batches, or 0 for none."
        )
    return count
