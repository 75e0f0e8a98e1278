"""Readers of a loader's batches, epoch by epoch, from any position.

A position is the number of the batch after the last one trained on, with the means to
get there. The means are index lists, the loader's state, or reading its batches again.
"""

import collections
import contextlib
import itertools
import sys
from collections.abc import Generator, Iterator, Sized
from functools import partial
from typing import Any, Final

from ..basics.console import SafeStream, warn
from ..step import Batch
from .conversion import normalize_batch
from .loader_state import (
    EPOCH_START,
    LoaderState,
    Position,
    compute_checksum,
    find_loader_state,
)
from .partition import RowPartition
from .random_states import seed_globally

EXHAUSTED: Final = object()
"""Marks the end of an iterator, where None would be a batch."""

_NOTE_EVERY: Final = 16
"""Batches between two notes of a loader's state; a resumed run reads them again."""

_NUM_NOTES: Final = 32
"""Notes in memory: steps may be as many batches behind their loader."""

ALL_ROWS: Final = RowPartition()
"""The partition of a single process."""


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
        epoch_start: the position that the present epoch was read from, with the
            loader's state there. None before the first epoch.
        is_training: whether steps are taken on its batches.
        is_iterator: whether the loader yields each batch only once. Then it is not read
            ahead of the steps, since the next pass continues where it is.
        is_single_use: whether a second pass over it has no batches.
        needs_commits: whether `commit` must be called.
        is_in_memory: whether `peek_batch` is cheap and runs no code of the user.
        shuffles: whether rows are known to come in another order than the dataset's,
            also outside of training.
    """

    is_in_memory = shuffles = needs_commits = False

    def __init__(
        self,
        loader: Any,
        argument: str,
        partition: RowPartition = ALL_ROWS,
        seed: int = 0,
    ):
        self.loader: Any = loader
        self.argument = argument
        self.partition, self.seed = partition, seed
        self.epoch_start: Position | None = None
        self.is_training = False
        self.is_iterator = hasattr(loader, "__next__")
        module = type(loader).__module__  # other iterators may start again
        self.is_single_use = self.is_iterator and module in ("builtins", "itertools")
        self._epoch: Any = None  # a generator
        self._last_batch: Batch | None = None  # trained on; of an `IterableSource`
        self._parts = [loader]  # that may have a `set_epoch`

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
        position = self.epoch_start = self._start(position)
        # Reads up to the position now, even if no batch is then taken.
        batches = self._epoch = self._track(self._read(position), position)
        peek = None if self.is_iterator else self._peek
        return self.partition.split(batches, peek)

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

    def commit(self, batch: Batch) -> None:
        """Receives the last batch of a step."""

    def start_training(self) -> None:
        """Marks the batches from now on as those of training steps."""
        self.is_training = True

    def read_state(self) -> Any:
        """Returns the `Position.state` of an epoch that starts now."""

    def restore(self, state: Any) -> None:
        """Restores a result of `read_state`; None changes nothing."""

    def read_pass_state(self) -> Any:
        """Returns the state at the start of the present pass, or the present one."""
        is_inside = self._epoch is not None and self._epoch.gi_frame
        if self.epoch_start and is_inside:
            return self.epoch_start.state
        return self.read_state()

    def make_position(self, epoch: int, done: int) -> Position:
        """Returns the position of batch number `done`, also for another process.

        An epoch that was not read has no state: it starts from the loader's present
        one.
        """
        if self.epoch_start is None or self.epoch_start.epoch != epoch:
            return EPOCH_START
        return Position(state=self.epoch_start.state)

    @property
    def can_peek(self) -> bool:
        """Whether `peek_batch` leaves the loader as it was."""
        return not self.is_iterator or self._last_batch is not None

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
            return [self._last_batch]
        before, was_training = self.read_state(), self.is_training
        self.is_training = False
        try:
            batches = self._track(self._read(EPOCH_START), EPOCH_START)
            with contextlib.closing(batches):
                return list(itertools.islice(batches, 1))
        finally:
            self.is_training = was_training
            self.restore(before)

    def explain_no_batches(self) -> str:
        """Returns the message for an epoch without batches."""
        return (
            f"`{self.argument}` gave no batches. Is the dataset empty, shorter than one"
            " batch with drop_last=True, a generator exhausted, or a limit 0?"
        )

    # Methods of subclasses.

    def _read(self, position: Position) -> Iterator[Batch]:
        """Yields the host batches of the loader from a position on."""
        raise NotImplementedError

    def _add_notes(self, exception: Exception) -> None:
        """Adds remedies to an exception of the loader."""

    def _set_epoch(self, epoch: int) -> None:
        for part in self._parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def _start(self, position: Position) -> Position:
        """Brings the loader to the start of an epoch; returns the position with it."""
        if position.state is None:
            return position._replace(state=self.read_state())
        self.restore(position.state)
        return position

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


class ListSource(Source):
    """The batches of a list or a tuple."""

    is_in_memory = True

    def _read(self, position: Position) -> Iterator[Batch]:
        return map(
            normalize_batch, itertools.islice(self.loader, position.batches, None)
        )


class IterableSource(Source):
    """The batches of an iterable: a generator, or a loader of another library.

    It gets to a position inside an epoch by the state that the loader publishes, or by
    reading all batches before it. With `seeds_draws`, the seed, the epoch and the batch
    decide the draws of global generators; without, they are as the user seeded them.
    """

    needs_commits = True
    _copies = True  # the loader may write the next batch into the same memory

    def __init__(
        self,
        loader: Any,
        argument: str,
        partition: RowPartition = ALL_ROWS,
        seed: int = 0,
        seeds_draws: bool = True,
    ):
        super().__init__(loader, argument, partition, seed)
        self._seeds_draws = seeds_draws
        self._state = find_loader_state(loader, argument)
        self._notes: collections.deque[Any] = collections.deque(maxlen=_NUM_NOTES)

    def commit(self, batch: Batch) -> None:
        self._last_batch = batch

    def read_state(self) -> Any:
        state = super().read_state()
        if self._state is None:
            return state
        return {**(state or {}), "own": self._state.read_start()}

    def restore(self, state: Any) -> None:
        if self._state is not None and "own" in (state or {}):
            self._state.load(state["own"])
        super().restore(state)

    def make_position(self, epoch: int, done: int) -> Position:
        position = super().make_position(epoch, done)
        if position is EPOCH_START or not done:
            return position
        # At least one batch is read again, and compared with the last one trained on.
        # With several processes, each has only its own rows of that batch, and does not
        # compare.
        notes = (note for note in reversed(self._notes) if note["batches"] < done)
        last = self._last_batch if self.partition is ALL_ROWS else None
        return position._replace(waypoint=next(notes, None), last_batch=last)

    def _start(self, position: Position) -> Position:
        if self._state is not None and "own" in (position.state or {}):
            # The state leads to the start of the epoch.
            position = position._replace(num_yielded=None)
        return super()._start(position)

    def _read(self, position: Position) -> Iterator[Batch]:
        self._set_epoch(position.epoch)
        batches = self._seek(position)
        if self._state is not None and self.is_training:
            batches = self._note_states(self._state, batches, position.batches)
        return map(partial(normalize_batch, copy=self._copies), batches)

    def _note_states(
        self, loader_state: LoaderState, batches: Iterator[Any], first: int
    ) -> Iterator[Any]:
        """Yields the batches; notes the loader's state before some of them."""
        for number in itertools.count(first):
            if number % _NOTE_EVERY == 0 and number > first:
                if (state := loader_state.read()) is not None:
                    self._notes.append({"batches": number, "state": state})
            if (batch := next(batches, EXHAUSTED)) is EXHAUSTED:
                return
            yield batch

    def _seek(self, position: Position) -> Iterator[Any]:
        """Returns an iterator over the loader's batches from a position on."""
        note = position.waypoint
        count = position.num_yielded if self.is_iterator else None
        count = position.batches if count is None else count
        if self.is_training:
            self._notes.clear()
        if self._state is not None and note is not None:
            self._state.load(note["state"])
            count = position.batches - note["batches"]
            if self.is_training:
                self._notes.append(note)

        batches = self._iterate(position.epoch, position.batches - count)
        last = self._skip(batches, count)
        if self._state is not None and note is not None:
            self._state.unload()
        checksums = compute_checksum(position.last_batch), compute_checksum(last)
        if None not in checksums and len({*checksums}) > 1:
            warn(
                f"`{self.argument}`: batch {position.batches - 1} of epoch"
                f" {position.epoch} was read again to resume, and differs from the one"
                " that was trained on. Some rows may come twice, others not at all."
                " Seed the order in a method `set_epoch(epoch)` of the loader, and"
                " leave out shuffle buffers, whose content is in no state."
            )
        return batches

    def _make_iterator(self) -> Iterator[Any]:
        return iter(self.loader)

    def _iterate(self, epoch: int, first: int) -> Iterator[Any]:
        """Returns the loader's batches, the first of which has number `first`.

        Global generators are seeded before each one if `seeds_draws`.
        """
        if not self._seeds_draws:
            return self._make_iterator()
        return self._seed_each(epoch, first)

    def _seed_each(self, epoch: int, first: int) -> Iterator[Any]:
        process = self.partition.sampler_seed
        with seed_globally(self.seed, epoch, *process):
            batches = self._make_iterator()
        for number in itertools.count(first):
            # The number 0 would repeat the seed of the iterator.
            with seed_globally(
                self.seed, epoch, *(process or (0,)), max(0, number) + 1
            ):
                batch = next(batches, EXHAUSTED)
            if batch is EXHAUSTED:
                return
            yield batch

    def _skip(self, batches: Iterator[Any], count: int) -> Batch | None:
        """Reads `count` batches; returns the last one, or None if there are fewer."""
        if not count:
            return None
        from tqdm import tqdm

        text = f"`{self.argument}` can't jump: replaying {count} batches"
        batch, steps, out = EXHAUSTED, range(count), SafeStream(sys.stderr)
        for _ in tqdm(steps, text, file=out, delay=1, leave=False, mininterval=1):
            if (batch := next(batches, EXHAUSTED)) is EXHAUSTED:
                return None
        last = normalize_batch(batch, copy=True)
        if self.is_training:
            self._last_batch = last
        return last
