"""The batches of a loader, epoch by epoch, from any position on: read -> host -> own.

A position is the number of the batch that comes after the last one trained on, and what
leads there: index lists, the loader's state, or reading it again.
"""

import collections
import contextlib
import itertools
import sys
from collections.abc import Generator, Iterator, Sequence, Sized
from functools import partial
from typing import Any, Final

from ..basics.console import SafeStream, open_bar, warn
from ..step import Batch
from .conversion import to_host
from .loader_state import START, LoaderState, Position, checksum, state_of
from .random_states import seeded, set_states, states_of
from .shares import Share

END: Final = object()
"""What `next` gives at the end of an iterator, where None would be a batch."""

_NOTE_EVERY: Final = 16
"""Batches from one note of a loader's state to the next: as many are read again."""

_NUM_NOTES: Final = 32
"""Notes that are kept: steps may be as many batches behind their loader."""

ALL: Final = Share()
"""What comes to a process that is alone: every row."""


class Source:
    """The batches of `loader`, which the user calls `argument`, from any position on.

    There are three kinds, by what leads to a position inside an epoch: the index lists
    of its rows (`ListSource`, `ArraysSource`, `TorchSource`); and of an
    `IterableSource` what the loader tells of its state, or reading it again.

    Args:
        loader: iterated once per epoch; an iterator continues after the last one.
        argument: what the user calls it.
        share: what of it comes to this process.
        seed: decides what is drawn for an epoch. None leaves global generators alone.

    Attributes:
        begun: where the present epoch was begun, with the loader's state there.
        to_train: whether steps are taken on its batches.
        is_iterator: whether the loader gives each batch but once.
    """

    def __init__(
        self, loader: Any, argument: str, share: Share = ALL, seed: int | None = None
    ):
        self.loader: Any = loader
        self.argument = argument
        self.share, self.seed = share, seed
        self.begun: Position | None = None
        self.to_train = False
        self.is_iterator = hasattr(loader, "__next__")
        # Whether a second pass has no batches; other iterators may begin anew.
        module = type(loader).__module__
        self.is_used_up = self.is_iterator and module in ("builtins", "itertools")
        self._pass: Any = None  # a generator
        # Batches of an iterator that were read, and not trained on.
        self._ahead: collections.deque[Batch] = collections.deque()

    @property
    def num_batches(self) -> int | None:
        """Batches per epoch, or None where that can't be known."""
        length = None
        with contextlib.suppress(TypeError, NotImplementedError):  # torch's: no length
            length = len(self.loader) if isinstance(self.loader, Sized) else None
        return self.share.length(self.argument, length)

    @property
    def sure_batches(self) -> int | None:
        """`num_batches`, where no more and no fewer can come."""
        return self.num_batches

    @property
    def may_read_ahead(self) -> bool:
        """Whether batches may be asked for before the steps that need them."""
        return True

    @property
    def is_at_hand(self) -> bool:
        """Whether to `peek` costs next to nothing, and changes nothing."""
        return False

    @property
    def shuffles(self) -> bool:
        """Whether rows are known to come in another order than the dataset's, also
        where nothing is trained."""
        return False

    def epoch(self, position: Position = START) -> Iterator[Batch]:
        """Host batches of an epoch from a position on, in order.

        Of several processes each has its rows of them.
        """
        position = self.begun = self._begin(position)
        # What an iterator has given for steps that were not taken comes again.
        given = [*self._ahead] if self.to_train else []
        if given:
            position = position._replace(batches=position.batches + len(given))

        read = self._read(position)
        batches = self._pass = self._noted(read, position)
        peek = None if self.is_iterator else self._peek_here
        return self.share.of(
            itertools.chain(given, batches) if given else batches, peek
        )

    def close(self) -> None:
        """Ends the pass that was not read to its end.

        Its frame may live on, in the traceback of an exception say. But the global
        generators must not stay those of a pass, nor its workers wait.
        """
        self.end_pass()

    def end_pass(self) -> None:
        """Ends the present pass; what is for more of them stays."""
        if self._pass is not None:
            self._pass.close()
        self._pass = None

    def trained_on(self, window: Sequence[Batch]) -> None:
        """A step was taken over these batches."""
        if self._ahead:
            self.drop(len(window))

    def drop(self, count: int) -> None:
        """The next batches are no good: an iterator does not give them again."""
        for _ in range(min(count, len(self._ahead))):
            self._ahead.popleft()

    def begin_training(self) -> None:
        """From now on steps are taken on its batches."""
        self.to_train = True

    def go_on_from(self, other: "Source") -> None:
        """Gives first what another source has read of the same iterator too far."""
        self._ahead = other._ahead

    def present_state(self) -> Any:
        """The `Position.state` of an epoch that started now."""
        parts: dict[str, Any] = {}
        if generators := states_of(self._generators()):
            parts["generators"] = generators
        if samplers := [sampler.present() for sampler in self._sampler_states()]:
            parts["samplers"] = samplers
        return parts or None

    def state_now(self) -> Any:
        """What to start from to see what is now to be seen; a pass begins again."""
        is_inside = self._pass is not None and self._pass.gi_frame
        return self.begun.state if self.begun and is_inside else self.present_state()

    def mark(self, begun: Position, epoch: int, done: int) -> Position:
        """How another source of the same loader comes to batch number `done`, in
        another process too.

        An epoch other than the one begun has no state: it begins as the loader is then.
        """
        if begun.epoch != epoch:
            return START
        if not done:
            return Position(state=begun.state)
        return self._inside(begun.state, done)

    def first(self, count: int | None) -> list[Batch]:
        """The first batches, unshuffled: so many, or all."""
        with contextlib.closing(self):
            return list(itertools.islice(self.epoch(), count))

    def look(self, position: Position = START, count: int = 1) -> list[Batch]:
        """The next batches from a position on; the loader is left as it was.

        Of an iterator that can't tell its position, those that it has given last.
        """
        before = self.present_state()
        kept = self.begun, self.to_train, self._pass
        self.to_train = False
        try:
            first = list(itertools.islice(self.epoch(position), count))
            self.end_pass()
        finally:
            self.begun, self.to_train, self._pass = kept
            self.restore(before)
        return first

    def peek(self) -> Batch:
        """The first batch of epoch 0; the loader is left as it was."""
        if self.is_iterator:
            raise TypeError(
                f"`{self.argument}` is an iterator ({type(self.loader).__name__}), and"
                " looking at its first batch would use it up; pass what it iterates"
                " over, or one batch in a list."
            )
        if not (first := self.look()):
            raise ValueError(self.gave_nothing())
        return first[0]

    def _peek_here(self) -> Batch:
        """`peek`, whatever other processes have."""
        share, self.share = self.share, ALL
        try:
            return self.peek()
        finally:
            self.share = share

    def gave_nothing(self) -> str:
        """What to say when an epoch has no batches."""
        return (
            f"`{self.argument}` gave no batches. Is the dataset empty, shorter than one"
            " batch with drop_last=True, a generator exhausted, or a limit 0?"
        )

    def _explain(self, exception: Exception) -> None:
        """Adds what may help to an exception of the loader."""

    def _inside(self, state: Any, done: int) -> Position:
        """Returns the position behind so many batches of the epoch begun at a state."""
        return Position(state=state)

    def _sampler_states(self) -> list[LoaderState]:
        """Returns those of the user's samplers that publish one."""
        return []

    def _generators(self) -> dict[str, Any]:
        """The generators of the loader that its state must contain."""
        return {}

    def _read(self, position: Position) -> Iterator[Batch]:
        """Host batches of what the loader gives of an epoch from a position on."""
        raise NotImplementedError

    def _parts(self) -> list[Any]:
        """What may have a `set_epoch`."""
        return [self.loader]

    def _set_epoch(self, epoch: int) -> None:
        for part in self._parts():
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def _begin(self, position: Position) -> Position:
        """Has the loader be where an epoch starts; returns the position, complete."""
        if position.state is not None:
            self.restore(position.state)
        elif (state := self.present_state()) is not None:
            position = position._replace(state=state)
        return position

    def restore(self, state: Any) -> None:
        """Restores what `present_state` returned; nothing of None."""
        state = state or {}
        if (generators := state.get("generators")) is not None:
            set_states(self._generators(), generators)
        saved = state.get("samplers", ())
        for sampler, sampler_state in zip(self._sampler_states(), saved, strict=False):
            sampler.load(sampler_state)

    def _noted(
        self, batches: Iterator[Batch], position: Position
    ) -> Generator[Batch, None, None]:
        """The batches from a position on; errors say in which they arose."""
        number, keeps = position.batches, self.to_train and self.is_iterator
        try:
            for batch in batches:
                if keeps:
                    self._ahead.append(batch)
                yield batch
                number += 1
        except Exception as exception:
            exception.add_note(
                f"in batch {number} of epoch {position.epoch} of `{self.argument}`"
            )
            self._explain(exception)
            raise


class ListSource(Source):
    """Batches that are there, in a list or a tuple."""

    def present_state(self) -> Any:
        return None  # it draws nothing

    @property
    def is_at_hand(self) -> bool:
        return True

    def _read(self, position: Position) -> Iterator[Batch]:
        return map(to_host, itertools.islice(self.loader, position.batches, None))


class IterableSource(Source):
    """An iterable that gives batches: a generator, or a loader of another library.

    What leads to a position inside an epoch is the state that the loader publishes;
    where it has none, or that leads astray, its batches are read again. With a seed,
    this, the epoch and the batch decide what global generators draw.
    """

    _copies = True  # whether batches are copied: the next may be in the same memory

    def __init__(
        self, loader: Any, argument: str, share: Share = ALL, seed: int | None = None
    ):
        super().__init__(loader, argument, share, seed)
        self._state = state_of(loader, argument)
        self._notes: collections.deque[Any] = collections.deque(maxlen=_NUM_NOTES)
        self._last: Any = None  # the batch that was trained on last, or its checksum

    @property
    def may_read_ahead(self) -> bool:
        # An iterator that tells its position must not be further than the steps.
        return not (self._state and self.is_iterator)

    def trained_on(self, window: Sequence[Batch]) -> None:
        super().trained_on(window)
        self._last = window[-1]

    def present_state(self) -> Any:
        state = super().present_state()
        if self._state is None:
            return state
        return {**(state or {}), "own": self._state.present()}

    def look(self, position: Position = START, count: int = 1) -> list[Batch]:
        if not self.is_iterator or self._state is not None:
            return super().look(position, count)
        # What an iterator gives next, it gives but once.
        is_known = self._last is not None and not isinstance(self._last, int)
        passed = [self._last] if is_known else []
        return list(self.share.of(iter(passed), None)) * count

    def _explain(self, exception: Exception) -> None:
        if self.seed is not None and isinstance(exception, TypeError | ValueError):
            exception.add_note(
                f"`{self.argument}` is a {type(self.loader).__name__}, each item of"
                " which is taken as a batch; if it gives single examples, wrap it:"
                " torch.utils.data.DataLoader(dataset, batch_size)."
            )

    def _begin(self, position: Position) -> Position:
        if "own" in (position.state or {}):  # which leads to where the epoch began
            position = position._replace(given=None)
        return super()._begin(position)

    def restore(self, state: Any) -> None:
        if self._state is not None and "own" in (state or {}):
            self._state.load(state["own"])
        super().restore(state)

    def _inside(self, state: Any, done: int) -> Position:
        # One batch at least is read again, and compared with the last one trained on,
        # of which several processes have their rows alone.
        places = (note for note in reversed(self._notes) if note["batches"] < done)
        last = self._last if self.share is ALL else None
        return Position(state=state, place=next(places, None), last=last)

    def _read(self, position: Position) -> Iterator[Batch]:
        self._set_epoch(position.epoch)
        batches = self._positioned(position)
        if self._state is not None and self.to_train:
            batches = self._with_notes(self._state, batches, position.batches)
        return map(partial(to_host, copy=self._copies), batches)

    def _with_notes(
        self, loader_state: LoaderState, batches: Iterator[Any], first: int
    ) -> Iterator[Any]:
        """The batches, before some of which the loader's state is noted."""
        for number in itertools.count(first):
            if number % _NOTE_EVERY == 0 and number > first:
                if (state := loader_state.ask()) is not None:
                    self._notes.append({"batches": number, "state": state})
            if (batch := next(batches, END)) is END:
                return
            yield batch

    def _positioned(self, position: Position) -> Iterator[Any]:
        """The loader's batches of an epoch from a position on."""
        epoch, expected = position.epoch, checksum(position.last)
        if self.to_train:
            self._notes.clear()
        if self._state is not None and (place := position.place):
            first = place["batches"]
            self._state.load(place["state"])
            batches = self._iterated(epoch, first)
            leads_back = self._pass_over(batches, position.batches - first, expected)
            self._state.unload()
            if leads_back:
                if self.to_train:
                    self._notes.append(place)
                return batches
            warn(
                f"`{self.argument}`: the state of {type(self._state.owner).__name__}"
                f" did not lead back to batch {position.batches} of epoch {epoch}: a"
                " different batch came. (Does it have a shuffle buffer, whose content"
                " is not part of the state?) The epoch is replayed from its start."
            )
            self.restore(position.state)
            position = position._replace(given=None)

        given = position.given if self.is_iterator else None
        count = position.batches if given is None else given
        batches = self._iterated(epoch, position.batches - count)
        if not self._pass_over(batches, count, expected):
            warn(
                f"`{self.argument}`: after {count} batches were replayed, the next"
                " one differs from the one in the saved run. Does it count epochs, or"
                " draw from a random generator, as WebDataset's `shuffle` without a"
                " seed does? Seed it in a method `set_epoch(epoch)`, which is called"
                " before each epoch. Some rows of this one may come twice, and others"
                " not at all."
            )
        return batches

    def _started(self) -> Iterator[Any]:
        return iter(self.loader)

    def _iterated(self, epoch: int, first: int) -> Iterator[Any]:
        """Iterates the loader, from its batch number `first` on."""
        if self.seed is None:
            batches = self._started()
        else:
            with seeded(self.seed, epoch, *self.share.sampling):
                batches = self._started()
        if self._state is not None:
            self._state.begin(batches)
        return batches if self.seed is None else self._drawn(batches, epoch, first)

    def _drawn(self, batches: Iterator[Any], epoch: int, first: int) -> Iterator[Any]:
        """The batches, each of which draws from global generators of its own seed."""
        of_epoch = self.seed or 0, epoch, *(self.share.sampling or (0,))
        for number in itertools.count(first):
            with seeded(*of_epoch, max(0, number) + 1):  # 0: what starting draws
                batch = next(batches, END)
            if batch is END:
                return
            yield batch

    def _pass_over(
        self, batches: Iterator[Any], count: int, expected: int | None
    ) -> bool:
        """Reads `count` batches; returns whether the last has the checksum `expected`,
        if one is."""
        if not count:
            return True
        from tqdm import tqdm

        what = f"`{self.argument}` can't jump: replaying {count} batches"
        batch, steps, out = END, range(count), SafeStream(sys.stderr)
        bar = open_bar(tqdm, steps, what, file=out, delay=1, leave=False, mininterval=1)
        for _ in steps if bar is None else bar:
            if (batch := next(batches, END)) is END:
                return True
        host = to_host(batch, copy=True)
        if self.to_train:
            self._last = host
        return expected in (None, checksum(host))
