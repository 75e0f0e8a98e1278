"""Which batch a trainer takes next, over several fits, kills and resumes."""

import collections
import itertools
from collections.abc import Iterator
from typing import Any

from .data import taken, windows
from .portions import Share
from .source import Source
from .step import Batch


class Feed:
    """The training data of a run, whose loader is passed anew to every fit.

    Attributes:
        done: batches of the present epoch that are done with.
        seen: batches of all epochs that are.
    """

    def __init__(self) -> None:
        self.done = self.seen = 0
        self._loaded = 0  # what a checkpoint said of `seen`
        self._source: Source | None = None
        self._state: Any = None
        self._place: Any = None  # these two of a source that is here no more
        self._taken: collections.deque[list[Batch]] = collections.deque()
        self._taken_from: Any = None

    def go_on_with(self, source: Source, epoch: int) -> None:
        """The next batch of `epoch` is one of `source`, after those that are done."""
        if (last := self._read()) is not None:
            goes_on = last.of_epoch == epoch and last.loader is source.loader
            goes_on = goes_on or self.done > 0
            self._state = last.state if goes_on else None
            self._place = last.place(self.done)
        elif self.seen == self._loaded:
            source.replay = self.seen
        source.start_from, source.go_on_from = self._state, self._place
        self._keep(source)

    def start_with(self, source: Source) -> None:
        """The next batch is the first of `source`."""
        self.done = 0
        self._state = self._place = None
        self._keep(source)

    def leave_epoch(self) -> None:
        """The next batch is the first of another epoch."""
        self.done, self._state, self._place = 0, None, None

    def steps(
        self, source: Source, epoch: int, accumulate: int, limit: int | None
    ) -> Iterator[list[Batch]]:
        """What is left of an epoch of at most `limit` batches, window by window."""
        kept = self._left_over(source)
        rest = source.epoch(epoch, skip=self.done + len(kept))
        left = None if limit is None else max(0, limit - self.done)
        return windows(itertools.islice(itertools.chain(kept, rest), left), accumulate)

    def take(
        self, steps: Iterator[list[Batch]], room: int
    ) -> tuple[list[list[Batch]], Exception | None]:
        """At most `room` of `steps`, and the exception that came after them, if any.

        They are kept until `begin` is called for each.
        """
        found, error = taken(steps, room)
        self._taken.extend(found)
        return found, error

    def begin(self) -> None:
        """Those of the first window that is kept will not come again."""
        if self._taken:  # else another pass has begun inside this one
            self._taken.popleft()

    def count(self, window: list[Batch]) -> None:
        """The batches of `window` are done with."""
        self.done += len(window)
        self.seen += len(window)

    def state_dict(self, epoch: int, is_over: bool, share: Share) -> dict[str, Any]:
        """Where the next batch is, for `load_state_dict`; JSON.

        Args:
            epoch: the present one.
            is_over: whether the next batch is the next epoch's.
            share: of all batches, what comes to this process.
        """
        state, place = self._state, self._place
        if (source := self._read()) is not None:
            goes_on = source.of_epoch == epoch and not is_over
            state = source.state if goes_on else source.present_state()
            place = None if is_over else source.place(self.done)
        return {
            "batches_done": 0 if is_over else self.done,
            "batches_seen": self.seen,
            "source": share.states(state),
            "place": share.states(place),
        }

    def load_state_dict(self, state: dict[str, Any], share: Share) -> None:
        self.done = state["batches_done"]
        self.seen = self._loaded = state.get("batches_seen", 0)
        self._source = self._taken_from = None
        self._state = share.state(state["source"])
        self._place = share.state(state.get("place"))

    def _read(self) -> Source | None:
        """The source of the last batch, if it is here; a fit may have read none."""
        source = self._source
        return None if source is None or source.of_epoch is None else source

    def _keep(self, source: Source) -> None:
        source.keep_places(lambda: self.done)
        self._source = source

    def _left_over(self, source: Source) -> list[Batch]:
        """What an iterator has given for steps that were not begun, taken up now."""
        comes_again = not source.is_iterator or source.loader is not self._taken_from
        batches = [] if comes_again else [batch for w in self._taken for batch in w]
        self._taken_from, self._taken = source.loader, collections.deque()
        return batches
