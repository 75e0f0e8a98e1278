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
from .conversion import to_host
from .loader_state import (
    EPOCH_START,
    LoaderState,
    Position,
    compute_checksum,
    find_loader_state,
)
from .partition import RowPartition
from .random_states import get_states, seed_globally, set_states

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
        seed: decides the random draws of an epoch. None leaves global generators alone.

    Attributes:
        epoch_start: the position that the present epoch was read from, with the
            loader's state there.
        is_training: whether steps are taken on its batches.
        is_iterator: whether the loader yields each batch only once. Then it is not read
            ahead of the steps, since the next pass continues where it is.
        is_single_use: whether a second pass over it has no batches.
        needs_commits: whether `commit` must be called.
    """

    needs_commits = False

    def __init__(
        self,
        loader: Any,
        argument: str,
        partition: RowPartition = ALL_ROWS,
        seed: int | None = None,
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

    @property
    def num_batches(self) -> int | None:
        """Batches per epoch, or None if that can't be known."""
        length = None
        # torch raises for a dataset without a length.
        with contextlib.suppress(TypeError, NotImplementedError):
            length = len(self.loader) if isinstance(self.loader, Sized) else None
        return self.partition.count_batches(self.argument, length)

    @property
    def is_in_memory(self) -> bool:
        """Whether `peek_batch` is cheap and runs no code of the user."""
        return False

    @property
    def shuffles(self) -> bool:
        """Whether rows are known to come in another order than the dataset's, also
        outside of training."""
        return False

    @property
    def num_dropped(self) -> int:
        """The rows that `drop_last` is known to leave out."""
        return 0

    def read_epoch(self, position: Position = EPOCH_START) -> Iterator[Batch]:
        """Yields the host batches of an epoch from a position on.

        With several processes, each yields its own rows of the batches.
        """
        position = self.epoch_start = self._start(position)
        batches = self._epoch = self._track(self._read(position), position)
        peek = None if self.is_iterator else self._peek_locally
        return self.partition.split(batches, peek)

    def end_epoch(self) -> None:
        """Ends the current epoch, even if it has more batches."""
        if self._epoch is not None:
            self._epoch.close()
        self._epoch = None

    def close(self) -> None:
        """Ends the current epoch, and frees resources that later epochs would use.

        The frames of a generator may live on in the traceback of an exception. But
        global generators must be restored, and workers must end.
        """
        self.end_epoch()

    def commit(self, batch: Batch) -> None:
        """Receives the last batch of a step."""

    def start_training(self) -> None:
        """Marks the batches from now on as those of training steps."""
        self.is_training = True

    def read_state(self) -> Any:
        """Returns the `Position.state` of an epoch that starts now."""
        parts: dict[str, Any] = {}
        if generators := get_states(self._find_generators()):
            parts["generators"] = generators
        if samplers := [state.read_start() for state in self._find_sampler_states()]:
            parts["samplers"] = samplers
        return parts or None

    def read_pass_state(self) -> Any:
        """Returns the state at the start of the present pass, or the present one."""
        is_inside = self._epoch is not None and self._epoch.gi_frame
        if self.epoch_start and is_inside:
            return self.epoch_start.state
        return self.read_state()

    def make_position(self, start: Position, epoch: int, done: int) -> Position:
        """Returns the position of batch number `done`, also for another process.

        An epoch other than that of `start` has no state: it starts from the loader's
        present one.
        """
        if start.epoch != epoch:
            return EPOCH_START
        if not done:
            return Position(state=start.state)
        return self._make_position(start.state, done)

    @property
    def can_peek(self) -> bool:
        """Whether `peek_batch` leaves the loader as it was."""
        return not self.is_iterator

    def peek_batch(self) -> Batch:
        """Returns the first batch of epoch 0; the loader is left as it was."""
        if not self.can_peek:
            raise TypeError(
                f"`{self.argument}` is an iterator ({type(self.loader).__name__}), and"
                " looking at its first batch would use it up; pass what it iterates"
                " over, or one batch in a list."
            )
        before = self.read_state()
        saved = self.epoch_start, self.is_training, self._epoch
        self.is_training = False
        try:
            batch = next(self.read_epoch(), None)
            self.end_epoch()
        finally:
            self.epoch_start, self.is_training, self._epoch = saved
            self.restore(before)
        if batch is None:
            raise ValueError(self.explain_no_batches())
        return batch

    def _peek_locally(self) -> Batch:
        """Returns the first batch of this process's loader, without the others."""
        partition, self.partition = self.partition, ALL_ROWS
        try:
            return self.peek_batch()
        finally:
            self.partition = partition

    def explain_no_batches(self) -> str:
        """Returns the message for an epoch without batches."""
        return (
            f"`{self.argument}` gave no batches. Is the dataset empty, shorter than one"
            " batch with drop_last=True, a generator exhausted, or a limit 0?"
        )

    def restore(self, state: Any) -> None:
        """Restores a result of `read_state`; None changes nothing."""
        state = state or {}
        if (generators := state.get("generators")) is not None:
            set_states(self._find_generators(), generators)
        saved = state.get("samplers", ())
        for sampler, sampler_state in zip(
            self._find_sampler_states(), saved, strict=False
        ):
            sampler.load(sampler_state)

    # Methods of subclasses.

    def _read(self, position: Position) -> Iterator[Batch]:
        """Yields the host batches of the loader from a position on."""
        raise NotImplementedError

    def _make_position(self, state: Any, done: int) -> Position:
        """Returns the position after `done` batches of the epoch from `state`."""
        return Position(state=state)

    def _find_generators(self) -> dict[str, Any]:
        """Returns the generators of the loader that its state must contain."""
        return {}

    def _find_sampler_states(self) -> list[LoaderState]:
        """Returns the states of the user's samplers that publish one."""
        return []

    def _get_parts(self) -> list[Any]:
        """Returns the objects that may have a `set_epoch`."""
        return [self.loader]

    def _add_notes(self, exception: Exception) -> None:
        """Adds remedies to an exception of the loader."""

    def _set_epoch(self, epoch: int) -> None:
        for part in self._get_parts():
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def _start(self, position: Position) -> Position:
        """Brings the loader to the start of an epoch; returns the position, updated."""
        if position.state is not None:
            self.restore(position.state)
        elif (state := self.read_state()) is not None:
            position = position._replace(state=state)
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

    @property
    def is_in_memory(self) -> bool:
        return True

    def read_state(self) -> Any:
        return None  # it draws nothing

    def _read(self, position: Position) -> Iterator[Batch]:
        return map(to_host, itertools.islice(self.loader, position.batches, None))


class IterableSource(Source):
    """The batches of an iterable: a generator, or a loader of another library.

    It gets to a position inside an epoch by the state that the loader publishes, or by
    reading all batches before it. With a seed, the seed, the epoch and the batch decide
    the draws of global generators.
    """

    needs_commits = True
    _copies = True  # the loader may write the next batch into the same memory

    def __init__(
        self,
        loader: Any,
        argument: str,
        partition: RowPartition = ALL_ROWS,
        seed: int | None = None,
    ):
        super().__init__(loader, argument, partition, seed)
        self._state = find_loader_state(loader, argument)
        self._notes: collections.deque[Any] = collections.deque(maxlen=_NUM_NOTES)
        self._last_batch: Batch | None = None  # that was trained on

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

    @property
    def can_peek(self) -> bool:
        return not self.is_iterator or self._last_batch is not None

    def peek_batch(self) -> Batch:
        if not self.is_iterator or self._last_batch is None:
            return super().peek_batch()
        # An iterator yields its next batch only once, so this is its last one.
        return next(self.partition.split(iter([self._last_batch]), None))

    def _start(self, position: Position) -> Position:
        if self._state is not None and "own" in (position.state or {}):
            # The state leads to the start of the epoch.
            position = position._replace(num_yielded=None)
        return super()._start(position)

    def _make_position(self, state: Any, done: int) -> Position:
        # At least one batch is read again, and compared with the last one trained on.
        # With several processes, each has only its own rows of that batch, and does not
        # compare.
        notes = (note for note in reversed(self._notes) if note["batches"] < done)
        last = self._last_batch if self.partition is ALL_ROWS else None
        return Position(state=state, waypoint=next(notes, None), last_batch=last)

    def _read(self, position: Position) -> Iterator[Batch]:
        self._set_epoch(position.epoch)
        batches = self._seek(position)
        if self._state is not None and self.is_training:
            batches = self._note_states(self._state, batches, position.batches)
        return map(partial(to_host, copy=self._copies), batches)

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
        """Returns an iterator over the loader, whose next batch has number `first`."""
        if self.seed is None:
            return self._make_iterator()
        with seed_globally(self.seed, epoch, *self.partition.sampler_seed):
            batches = self._make_iterator()
        return self._seed_each(batches, epoch, first)

    def _seed_each(
        self, batches: Iterator[Any], epoch: int, first: int
    ) -> Iterator[Any]:
        """Yields the batches, before each of which global generators are seeded."""
        of_epoch = self.seed or 0, epoch, *(self.partition.sampler_seed or (0,))
        for number in itertools.count(first):
            # The number 0 would repeat the seed of the iterator.
            with seed_globally(*of_epoch, max(0, number) + 1):
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
        last = to_host(batch, copy=True)
        if self.is_training:
            self._last_batch = last
        return last
