"""The batches of a loader, epoch by epoch, from any position on: read -> host -> own.

A source knows which batches it has given, and what leads behind each. So a position is
the last one that was trained on.
"""

import collections
import contextlib
import itertools
import sys
from collections.abc import Generator, Iterator, Sized
from functools import partial
from typing import Any, Final

from ..basics.console import Outlet, open_bar, warn
from ..step import Batch
from .conversion import to_host
from .loader_state import (
    START,
    OwnState,
    Position,
    checksum,
    generators_of,
    own_state,
)
from .random_states import Generators, seed_of, set_states, states_of
from .shares import Share

END: Final = object()
"""What `next` gives at the end of an iterator, where None would be a batch."""

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
        start: of the next pass; later ones begin with an epoch.
        begun: where the present epoch was begun, with the loader's state there.
        to_train: whether steps are taken on its batches, which it then keeps in mind.
        looks_at: of the trainer, while it is asked for a batch.
        is_iterator: whether the loader gives each batch but once.
        apart_from: a loader whose generators are its own to save.
        place: the `Position.place` behind the batch that was read last.
    """

    def __init__(
        self, loader: Any, argument: str, share: Share = ALL, seed: int | None = None
    ):
        self.loader: Any = loader
        self.argument = argument
        self.share, self.seed = share, seed
        self.start = START
        self.begun: Position | None = None
        self.to_train = False
        self.looks_at = ""
        self.is_iterator = hasattr(loader, "__next__")
        self.apart_from: Any = None
        self.place: Any = None
        self._pass: Any = None  # a generator
        # Batches that are read, and those trained on last, each with its place.
        self._ahead: collections.deque[tuple[Batch, Any]] = collections.deque()
        self._last: tuple[Any, Any] = (None, None)

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
    def replays(self) -> bool:
        """Whether only reading it again leads to a place inside an epoch."""
        return False

    @property
    def may_read_ahead(self) -> bool:
        """Whether batches may be asked for before the steps that need them."""
        return not self.looks

    @property
    def is_at_hand(self) -> bool:
        """Whether to `peek` costs next to nothing, and changes nothing."""
        return False

    @property
    def is_asked(self) -> bool:
        """Whether the loader is at work on a batch now."""
        return self._pass is not None and self._pass.gi_running

    @property
    def shuffles(self) -> bool:
        """Whether rows are known to come in another order than the dataset's, also
        where nothing is trained."""
        return False

    @property
    def looks(self) -> bool:
        """Whether the loader, of any process, looks at what training changes."""
        return bool(self.looks_at) or self.share.looks

    def note_look(self, at: str) -> None:
        """The loader looks at this; from now on batches are asked for one by one."""
        self.looks_at = self.looks_at or at
        if self.share is not ALL:
            self.share.looks = True

    def epoch(self, position: Position | None = None) -> Iterator[Batch]:
        """Host batches of an epoch from a position on, in order; else from `start`.

        Of several processes each has its rows of them.
        """
        if position is None:
            position, self.start = self.start, START
        position = self.begun = self._begin(position)
        self.place = position.place
        if self.to_train:
            self._last = position.last, position.place
            if not self.is_iterator:
                self._ahead.clear()
        # What an iterator has given for steps that were not taken comes again.
        given = [batch for batch, _ in self._ahead] if self.is_iterator else []
        position = position._replace(batches=position.batches + len(given))

        read = self._read(position)
        batches = self._pass = self._numbered(read, position)
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

    def trained_on(self, count: int) -> None:
        """A step was taken over so many batches."""
        for _ in range(count):
            if self._ahead:
                self._last = self._ahead.popleft()

    def drop(self, count: int) -> None:
        """The next batches are no good: an iterator does not give them again."""
        last = self._last
        self.trained_on(count)
        self._last = last

    def go_on_from(self, other: "Source") -> None:
        """Gives first what another source has read of the same iterator too far."""
        self._ahead = other._ahead

    def present_state(self) -> Any:
        """The `Position.state` of an epoch that started now."""
        parts: dict[str, Any] = {}
        if generators := states_of(self._generators()):
            parts["generators"] = generators
        if samplers := [sampler.present() for sampler in self._telling_samplers()]:
            parts["samplers"] = samplers
        return parts or None

    def state_now(self) -> Any:
        """What to start from to see what is now to be seen; a pass begins again."""
        if self.begun is None and self.start.state is not None:
            return self.start.state
        if self.begun is None or self._pass is None or not self._pass.gi_frame:
            return self.present_state()
        return self.begun.state

    def mark(self, epoch: int, done: int) -> Position:
        """How another source of the same loader comes to batch number `done`, in
        another process too.

        An epoch that is not begun has no state: it begins as the loader is then.
        """
        begun = self.begun
        if begun is None:
            return self.start
        if begun.epoch != epoch:
            return START
        if not done:
            return Position(state=begun.state)
        last, place = self._last
        last = last if self.replays else None
        return Position(state=begun.state, place=place, last=last)

    def first(self, count: int | None) -> list[Batch]:
        """The first batches, unshuffled: so many, or all."""
        with contextlib.closing(self):
            return list(itertools.islice(self.epoch(), count))

    def look(self, position: Position = START, count: int = 1) -> list[Batch]:
        """The next batches from a position on; the loader is left as it was.

        Of an iterator that can't tell its position, those that it has given last.
        """
        before = self.present_state()
        kept = self.begun, self.to_train, self._pass, self.place
        self.to_train = False
        try:
            first = list(itertools.islice(self.epoch(position), count))
            self.end_pass()
        finally:
            self.begun, self.to_train, self._pass, self.place = kept
            self._take_up(before)
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

    def _telling_samplers(self) -> list[OwnState]:
        """The user's samplers that tell their state."""
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
        if position.state is None:
            return position._replace(state=self.present_state())
        self._take_up(position.state)
        return position

    def _take_up(self, state: Any) -> None:
        """Has generators and samplers of the user's be where a state has them."""
        state = state or {}
        if (generators := state.get("generators")) is not None:
            set_states(self._generators(), generators)
        saved = state.get("samplers", ())
        for sampler, sampler_state in zip(
            self._telling_samplers(), saved, strict=False
        ):
            sampler.load(sampler_state)

    def _numbered(
        self, batches: Iterator[Batch], position: Position
    ) -> Generator[Batch, None, None]:
        """The batches from a position on; those to be trained on are kept in mind."""
        number, to_train = position.batches, self.to_train
        try:
            for batch in batches:
                if to_train:
                    self._ahead.append((batch, self.place))
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

    @property
    def is_at_hand(self) -> bool:
        return True

    def _read(self, position: Position) -> Iterator[Batch]:
        return map(to_host, itertools.islice(self.loader, position.batches, None))


class IterableSource(Source):
    """An iterable that gives batches: a generator, or a loader of another library.

    What leads to a place inside an epoch is what the loader tells of its state; where
    it has none, or that leads astray, its batches are read again. With a seed, this
    decides with the epoch what global generators draw in it.
    """

    _goes_on = False  # whether it is an iterator, and is where the last epoch ended
    _copies = True  # whether batches are copied: the next may be in the same memory

    def __init__(
        self, loader: Any, argument: str, share: Share = ALL, seed: int | None = None
    ):
        super().__init__(loader, argument, share, seed)
        self._own = own_state(loader, argument)

    @property
    def replays(self) -> bool:
        return self.share is ALL and self._own is None

    @property
    def may_read_ahead(self) -> bool:
        # An iterator that tells its position must not be further than the steps.
        return super().may_read_ahead and not (self._own and self.is_iterator)

    def present_state(self) -> Any:
        state = super().present_state()
        return (
            state
            if self._own is None
            else {**(state or {}), "own": self._own.present()}
        )

    def look(self, position: Position = START, count: int = 1) -> list[Batch]:
        if not self.is_iterator or self._own is not None:
            return super().look(position, count)
        # What an iterator gives next, it gives but once.
        passed, _ = self._last
        passed = [] if passed is None or isinstance(passed, int) else [passed]
        return list(self.share.of(iter(passed), None)) * count

    def _explain(self, exception: Exception) -> None:
        if self.seed is not None and isinstance(exception, TypeError | ValueError):
            exception.add_note(
                f"`{self.argument}` is a {type(self.loader).__name__}, each item of"
                " which is taken as a batch; if it gives single examples, wrap it:"
                " torch.utils.data.DataLoader(dataset, batch_size)."
            )

    def _begin(self, position: Position) -> Position:
        if "own" in (position.state or {}):  # which tells the whole place
            position = position._replace(given=None)
        position = super()._begin(position)
        if self._own is not None:
            self._own.begin()
        return position

    def _take_up(self, state: Any) -> None:
        if self._own is not None and "own" in (state or {}):
            self._own.load(state["own"])
        super()._take_up(state)

    def _read(self, position: Position) -> Iterator[Batch]:
        self._set_epoch(position.epoch)
        batches = self._positioned(position)
        if self._own is not None and self.to_train:
            return self._telling(self._own, batches, position.batches)
        return map(partial(to_host, copy=self._copies), batches)

    def _telling(
        self, own: OwnState, batches: Iterator[Any], first: int
    ) -> Iterator[Batch]:
        """Host batches; `place` has the newest state that leads to one of them."""
        for number in itertools.count(first):
            place = own.place(number)
            if (batch := next(batches, END)) is END:
                return
            host = to_host(batch, copy=self._copies)
            own.goes_on()
            if place is not None:
                self.place = {**place, "after": host}
            yield host

    def _positioned(self, position: Position) -> Iterator[Any]:
        """The loader's batches of an epoch from a position on."""
        epoch, place = position.epoch, position.place or {}
        if self._own is not None and "batches" in place:
            first = place["batches"]
            self._own.load(place["state"])
            batches = self._iterated(epoch, generators_of(place))
            batch = next(batches, END)
            if batch is not END and checksum(to_host(batch)) == checksum(
                place["after"]
            ):
                self._own.goes_on()
                self._pass_over(batches, position.batches - first - 1)
                return batches
            warn(
                f"`{self.argument}`: the state of {type(self._own.owner).__name__} did"
                f" not lead back to batch {first} of epoch {epoch}: a different batch"
                " came. (Does it have a shuffle buffer, whose content is not part of"
                " the state?) The epoch is replayed from its start."
            )
            self._take_up(position.state)
            position = position._replace(given=None)

        batches = self._iterated(epoch)
        given = position.given if self._goes_on else None
        count = position.batches if given is None else given
        self._pass_over(batches, count, checksum(position.last))
        return batches

    def _started(self) -> Iterator[Any]:
        return iter(self.loader)

    def _iterated(self, epoch: int, generators: Any = None) -> Iterator[Any]:
        """Iterates the loader; what it draws from is where `generators` say, if so."""
        own, seeded, theirs = self._own, None, {}
        if self.seed is None:
            batches = self._started()
        else:
            seeded = Generators(seed_of(self.seed, epoch, *self.share.sampling))
            with seeded.active():
                batches = self._started()
            theirs = self._generators()
            if generators is not None:
                # torchdata's loader sets its sampler's generator to where an epoch
                # began, and the next epoch would not have the order that it should.
                seeded.states = generators[0]
                set_states(theirs, generators[1])
        self._goes_on = batches is self.loader
        if own is not None:
            own.began(batches)
            own.generators = lambda: seeded and (seeded.states, states_of(theirs))
        return batches if seeded is None else seeded.drawn(batches)

    def _pass_over(
        self, batches: Iterator[Any], count: int, expected: int | None = None
    ) -> None:
        """Asks for `count` batches again; the last has the checksum `expected`."""
        if not count:
            return
        from tqdm import tqdm

        what = f"`{self.argument}` can't jump: replaying {count} batches"
        batch, steps, out = END, range(count), Outlet(sys.stderr)
        bar = open_bar(tqdm, steps, what, file=out, delay=1, leave=False, mininterval=1)
        for _ in steps if bar is None else bar:
            if (batch := next(batches, END)) is END:
                return
        host = to_host(batch, copy=True)
        if self.to_train:
            self._last = host, self.place
        if expected not in (None, checksum(host)):
            warn(
                f"`{self.argument}`: after {count} batches were replayed, the next"
                " one differs from the one in the saved run. Does it count epochs, or"
                " draw from a random generator, as WebDataset's `shuffle` without a"
                " seed does? Seed it in a method `set_epoch(epoch)`, which is called"
                " before each epoch. Some rows of this one may come twice, and others"
                " not at all."
            )
