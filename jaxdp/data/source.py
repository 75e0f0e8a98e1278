"""Readers of a loader's batches, epoch by epoch, from any position.

A position is the number of the batch after the last one trained on, with the means to
get there. The means are index lists, the loader's state, or reading its batches again.
"""

import collections
import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Generator, Iterator, Sized
from functools import partial
from typing import Any, Final

from ..basics.console import SafeStream, log_info_once
from ..step import Batch
from .conversion import normalize_batch
from .loader_state import EPOCH_START, LoaderState, Position
from .partition import RowPartition
from .random_states import seed_globally

_UNSEEDED: Final = contextlib.nullcontext()
_EXHAUSTED: Final = object()
"""Marks the end of an iterator, where None would be a batch."""

_WAYPOINT_EVERY: Final = 16
"""Batches between two waypoints; a resumed run reads up to as many again."""

_NUM_WAYPOINTS: Final = 32
"""Waypoints in memory: steps may be as many batches behind their loader."""

ALL_ROWS: Final = RowPartition()
"""The partition of a single process."""


@dataclasses.dataclass(eq=False, repr=False)
class Source:
    """The batches of `loader`, which the user calls `argument`, from any position.

    Its subclasses differ in how they get to a position inside an epoch. `ListSource`,
    `ArraysSource` and `TorchMapSource` have index lists of its rows. `IterableSource`
    uses the loader's state, or reads the batches again.

    Args:
        loader: iterated once per epoch; an iterator continues where it was.
        argument: the user's name for it.
        partition: selects the rows of this process.
        seed: decides the random draws of an epoch, with its number.

    Attributes:
        state: reads and restores the loader's state.
        epoch_start: the position that the present epoch was read from, with the
            loader's state there. None before the first epoch.
        is_training: whether steps are taken on its batches.
        is_iterator: whether the loader yields each batch only once. Then it is not read
            ahead of the steps, since the next pass continues where it is.
        is_single_use: whether a second pass over it has no batches.
        is_in_memory: whether `peek_batch` is cheap and runs no code of the user.
        shuffles: whether rows are known to come in another order than the dataset's,
            also outside of training.
        last_batch: the last one that an iterator was trained on.
    """

    loader: Any
    argument: str
    partition: RowPartition = ALL_ROWS
    seed: int = 0

    is_in_memory = shuffles = False
    _has_index_lists = True

    def __post_init__(self) -> None:
        self.state = LoaderState(self.loader, self.argument, self._has_index_lists)
        self.epoch_start: Position | None = None
        self.is_training = False
        self.is_iterator = hasattr(self.loader, "__next__")
        module = type(self.loader).__module__  # other iterators may start again
        self.is_single_use = self.is_iterator and module in ("builtins", "itertools")
        self.last_batch: Batch | None = None
        self._epoch: Any = None  # a generator
        self._waypoints: collections.deque[Any] = collections.deque(
            maxlen=_NUM_WAYPOINTS
        )

    @property
    def num_batches(self) -> int | None:
        """Batches per epoch, or None if that can't be known."""
        length = None
        # torch raises for a dataset without a length.
        with contextlib.suppress(TypeError, NotImplementedError):
            length = len(self.loader) if isinstance(self.loader, Sized) else None
        return self.partition.count_batches(self.argument, length)

    def read_epoch(self, position: Position = EPOCH_START) -> Iterator[Batch]:
        """Yields the host batches of an epoch from a position on.

        With several processes, each yields its own rows of the batches.
        """
        position = self.epoch_start = self._resolve_position(position)
        # Reads up to the position now, even if no batch is then taken.
        batches = self._epoch = self._track(self._read(position), position)
        return self.partition.split(batches, None if self.is_iterator else self._peek)

    def _resolve_position(self, position: Position) -> Position:
        """Restores the loader's state at the start of the epoch, if the position has
        it; otherwise the epoch starts from the present state. Returns the position with
        this state.
        """
        if position.state is None:
            return position._replace(state=self.state.read())
        if self.state.restore(position.state):  # an iterator skips as others do
            return position._replace(num_yielded=position.batches)
        return position

    def end_epoch(self) -> None:
        """Ends the current epoch, even if it has more batches."""
        if self._epoch is not None:
            self._epoch.close()
        self._epoch = None

    def close(self) -> None:
        """Ends the current epoch, and frees resources that later epochs would use.

        An exception's traceback may keep the generator of an epoch alive. But global
        random generators must be restored, and workers must end.
        """
        self.end_epoch()

    def start_training(self) -> None:
        """Marks the batches from now on as those of training steps."""
        self.is_training = True

    def read_pass_state(self) -> Any:
        """Returns the state at the start of the present pass, or the present one."""
        is_inside = self._epoch is not None and self._epoch.gi_frame
        if self.epoch_start and is_inside:
            return self.epoch_start.state
        return self.state.read()

    def make_position(self, epoch: int, done: int) -> Position:
        """Returns the position of batch number `done`, also for another process.

        An epoch that was not read has no state: it starts from the loader's present
        one.
        """
        if self.epoch_start is None or self.epoch_start.epoch != epoch:
            return EPOCH_START
        # The waypoint lies before batch `done`, so that at least one batch is read
        # again. The iteration begins with it, and a used-up iterator has no other to
        # compile the step for.
        waypoints = (
            each for each in reversed(self._waypoints) if each["batches"] < done
        )
        return Position(state=self.epoch_start.state, waypoint=next(waypoints, None))

    @property
    def can_peek(self) -> bool:
        """Whether `peek_batch` leaves the loader as it was."""
        return not self.is_iterator or self.last_batch is not None

    def peek_batch(self) -> Batch:
        """Returns the first batch of epoch 0, or the last one trained on of an
        iterator. The loader is left as it was.
        """
        if not self.can_peek:
            raise TypeError(
                f"`{self.argument}` is an iterator ({type(self.loader).__name__}), and"
                " looking at its first batch would use it up; pass what it iterates"
                " over, or one batch in a list."
            )
        batch = next(self.partition.split(iter(self._peek()), None), None)
        if batch is None:
            raise ValueError(self.explain_no_batches())
        return batch

    def _peek(self) -> list[Batch]:
        """Returns a list of the first batch of this process's loader, if it has any."""
        if self.is_iterator:
            return [self.last_batch]
        before, was_training = self.state.read(), self.is_training
        self.is_training = False
        try:
            batches = self._track(self._read(EPOCH_START), EPOCH_START)
            with contextlib.closing(batches):
                return list(itertools.islice(batches, 1))
        finally:
            self.is_training = was_training
            self.state.restore(before)

    def explain_no_batches(self) -> str:
        """Returns the message for an epoch without batches."""
        limit = f"limit_{self.argument.partition('loader')[0]}batches"
        return (
            f"`{self.argument}` gave no batches. Is the dataset empty, shorter than one"
            f" batch with drop_last=True, a generator exhausted, or `{limit}` 0?"
        )

    def _track(
        self, batches: Iterator[Batch], position: Position
    ) -> Generator[Batch, None, None]:
        """Yields the batches; adds their number to errors."""
        number = position.batches
        try:
            for batch in batches:
                yield batch
                number += 1
        except Exception as exception:
            exception.add_note(
                f"in batch {number} of epoch {position.epoch} of `{self.argument}`"
            )
            self._add_notes(exception)
            raise

    # Methods of subclasses.

    def _read(self, position: Position) -> Iterator[Batch]:
        """Yields the host batches of the loader from a position on."""
        raise NotImplementedError

    def _add_notes(self, exception: Exception) -> None:
        """Adds remedies to an exception of the loader."""


class ListSource(Source):
    """The batches of a list or a tuple."""

    is_in_memory = True

    def _read(self, position: Position) -> Iterator[Batch]:
        batches = itertools.islice(self.loader, position.batches, None)
        return map(normalize_batch, batches)


@dataclasses.dataclass(eq=False, repr=False)
class IterableSource(Source):
    """The batches of an iterable: a generator, or a loader of another library.

    It gets to a position inside an epoch by the state that the loader publishes, or by
    reading all batches before it. With `seeds_draws`, the seed, the epoch and the batch
    decide the draws of global generators; without, they are as the user seeded them.
    """

    seeds_draws: bool = True

    _has_index_lists = False
    _copies = True  # the loader may write the next batch into the same memory

    def _read(self, position: Position) -> Iterator[Batch]:
        if position.num_yielded is not None:
            self.state.set_epoch(position.epoch)
        waypoint = position.waypoint if self.state.has_own else None
        skipped = (position.num_yielded or 0) if self.is_iterator else position.batches
        if waypoint is not None:
            self.state.load_own(waypoint["state"])
            skipped = position.batches - waypoint["batches"]
        if self.is_training and self.is_iterator and not self.is_single_use:
            self._refuse_unknown_restart(position, skipped)
        batches = self._pull(position, position.batches - skipped, waypoint)
        self._skip(batches, skipped)
        if waypoint is not None:
            self.state.unload_own()
        if self.is_training:
            self._waypoints.clear()
            self._waypoints.extend([waypoint] if waypoint is not None else [])
            if self.state.has_own:
                batches = self._record_waypoints(batches, position.batches)
        return map(partial(normalize_batch, copy=self._copies), batches)

    def _refuse_unknown_restart(self, position: Position, skipped: int) -> None:
        """Raises if an iterator has started again, when a checkpoint does not know; in
        the first pass, logs that a later one can't be resumed.
        """
        is_later_pass = skipped > position.batches
        has_state = (position.state or {}).get("own") is not None
        if has_state and not is_later_pass:
            return
        text = (
            f"`{self.argument}`: a checkpoint does not know when the iterator"
            f" {type(self.loader).__name__} started again, so a run can't be"
            " resumed after its first pass. Give it `state_dict` and"
            " `load_state_dict` with JSON, or pass an iterable whose `__iter__`"
            " starts an epoch, or a generator if it never starts again."
        )
        if is_later_pass:
            raise ValueError(text)
        log_info_once(text)

    def _iterate(self) -> Iterator[Any]:
        return iter(self.loader)

    def _pull(self, position: Position, first: int, waypoint: Any) -> Iterator[Any]:
        """Yields the loader's batches, the first of which has number `first`. It calls
        `__iter__` at most once, because an iterator may start again there.
        """
        process, seeds = self.partition.sampler_seed, self.seeds_draws
        with seed_globally(self.seed, position.epoch, *process) if seeds else _UNSEEDED:
            batches = self.loader if position.num_yielded is None else self._iterate()
        if waypoint is not None and self.is_iterator:
            state = waypoint["state"]  # which `__iter__` may have put into effect
            if self.state.read_own() != state:
                self.state.load_own(state)
        for number in itertools.count(first):
            # The number 0 would repeat the seed of the iterator.
            numbers = position.epoch, *(process or (0,)), number + 1
            with seed_globally(self.seed, *numbers) if seeds else _UNSEEDED:
                batch = next(batches, _EXHAUSTED)
            if batch is _EXHAUSTED:
                return
            yield batch

    def _record_waypoints(self, batches: Iterator[Any], first: int) -> Iterator[Any]:
        """Yields the batches from number `first` on; records a waypoint before
        some of them.
        """
        for number, batch in enumerate(batches, first + 1):
            yield batch
            if number % _WAYPOINT_EVERY == 0:
                if (state := self.state.read_own()) is not None:
                    self._waypoints.append({"batches": number, "state": state})

    def _skip(self, batches: Iterator[Any], count: int) -> None:
        """Reads `count` batches, or all if there are fewer."""
        if not count:
            return
        from tqdm import tqdm

        text = f"`{self.argument}` can't jump: replaying {count} batches"
        batch, steps, out = _EXHAUSTED, range(count), SafeStream(sys.stderr)
        for _ in tqdm(steps, text, file=out, delay=1, leave=False, mininterval=1):
            if (batch := next(batches, _EXHAUSTED)) is _EXHAUSTED:
                return
        if self.is_training and self.is_iterator:
            self.last_batch = normalize_batch(batch, copy=True)
