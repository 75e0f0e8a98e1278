"""How far a run is, over fits, kills and resumes: counters, and which batch is next."""

import threading
from collections.abc import Mapping
from typing import Any, Final

from ..data import Position, Share, Source

_ONLY: Final = "val"
"""The name of a validation's loader that is the only one."""


class Progress:
    """What is done of a run, and which batch comes next.

    The training data is passed anew to every fit.

    Attributes:
        global_step: optimizer steps.
        epoch: the present one, counted from 0.
        done: its batches that are done with.
        seen: batches of all epochs that are.
        examples: its real rows.
        epoch_ended: whether it is in the history. One that was cut short goes on.
        is_finished: whether no batch of it is left, while it is being ended.
        val_metrics: its last validation's.
        logged: the last values that callbacks have logged in it.
        validated_at: after which of its batches that was.
    """

    def __init__(self) -> None:
        self.global_step = self.epoch = self.done = self.seen = self.examples = 0
        self.epoch_ended = self.is_finished = False
        self.val_metrics: dict[str, float] = {}
        self.logged: dict[str, float] = {}
        self.validated_at = 0
        self._source: Source | None = None  # of the batches that are trained on
        self._at = Position()  # where that goes on, while there is none
        self._vals: dict[str, Source] = {}
        self._val_states: dict[str, Any] = {}  # in a checkpoint
        self._thread = threading.get_ident()  # that takes the steps

    def go_on_with(self, source: Source, vals: Mapping[str, Source]) -> None:
        """The next batch is one of `source`, after those of the epoch that are done."""
        last = self._source
        if last is not None:
            goes_on = last.loader is source.loader or last.begun is None or self.done
            self._at = last.mark(self.epoch, self.done) if goes_on else Position()
        self._keep(source)
        for name, val in self._vals.items():
            if val.begun is not None:
                self._val_states.pop(name, None)  # what was saved is read since
        if vals:
            kept = self._val_states.keys() & vals
            self._val_states = {name: self._val_states[name] for name in kept}
        for name, val in vals.items():
            val.apart_from = source.loader
            val.start = Position(state=self._val_states.get(name))
        self._vals = {**vals}

    def start_with(self, source: Source) -> None:
        """The next batch is the first of `source`."""
        self.done, self._at = 0, Position()
        self._keep(source)

    @property
    def is_elsewhere(self) -> bool:
        """Whether the caller is in another thread than the steps."""
        return threading.get_ident() != self._thread

    def note_look(self, at: str) -> None:
        """Somebody looks at this; if it is the loader, that is noted."""
        source = self._source
        if source is not None and (source.is_asked or self.is_elsewhere):
            source.note_look(at)

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
        if self._source is not None and self._source.begun is None:
            self._source.start = self._at

    def count(self, batches: int, rows: int) -> None:
        """A step over so many batches, which have so many real rows, was taken."""
        self.global_step += 1
        self.examples += rows
        self.epoch_ended = False
        self.done += batches
        self.seen += batches
        if self._source is not None:
            self._source.trained_on(batches)

    def drop(self, batches: int) -> None:
        """So many batches are no good: an iterator does not give them again."""
        if self._source is not None:
            self._source.drop(batches)

    def state_dict(self, share: Share) -> dict[str, Any]:
        """For `load_state_dict`; JSON."""
        # An epoch that is over counts as the next one, not begun.
        of_epoch = Progress() if self.is_finished else self
        epoch, at = self.epoch + self.is_finished, self._at
        if (source := self._source) is not None:
            at = source.mark(epoch, of_epoch.done)
            if source.begun is not None and at.state is None:
                at = at._replace(state=source.present_state())
        place, last = at.saved()

        states = dict(self._val_states)
        states |= {name: val.state_now() for name, val in self._vals.items()}
        several = {name: share.states(states[name]) for name in sorted(states)}
        return {
            "global_step": self.global_step,
            "current_epoch": epoch,
            "batches_seen": self.seen,
            "examples_seen": self.examples,
            "source": share.states(at.state),
            "place": share.states(place),
            "validation": several.get(_ONLY) if set(several) <= {_ONLY} else several,
            "after": last,
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
        self.logged = state.get("logged", {})  # checkpoints of 0.1 have none
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
        source.start, source.to_train = self._at, True
        if self._source is not None and self._source.loader is source.loader:
            source.go_on_from(self._source)
        self._source, self._thread = source, threading.get_ident()


def _by_name(told: Any) -> dict[str, Any]:
    """What a checkpoint has of the validations' loaders."""
    is_of_each = isinstance(told, dict) and told
    is_of_each = is_of_each and all(n.startswith(f"{_ONLY}_") for n in told)
    return told if is_of_each else {_ONLY: told}
