"""The batches of a loader, epoch by epoch, from any position on."""

import collections
import contextlib
import inspect
import itertools
from collections.abc import Callable, Generator, Iterator, Sized
from typing import Any, Final, NamedTuple

from ..step import NOTHING, Batch
from .conversion import to_host
from .loader_state import OwnState, checksum
from .random_states import set_states, states_of
from .shares import Share

END: Final = object()
"""What `next` gives at the end of an iterator, where None would be a batch."""

ALL: Final = Share()
"""What comes to a process that is alone: every row."""


class _NoLoader:
    """Batches for a loss that takes none, without end."""

    def __iter__(self) -> Iterator[Batch]:
        return itertools.repeat(NOTHING)


NO_LOADER: Final = _NoLoader()
"""What is trained on without a loader."""


class Position(NamedTuple):
    """Which batch of an epoch comes next, and what leads there in a loader."""

    epoch: int = 0
    batches: int = 0
    """How many of the epoch come before. They are skipped; but an iterator has given
    them already, and is not asked for them again."""
    state: Any = None
    """What, of its own, the loader starts the epoch from; JSON. None: as it is now."""
    place: Any = None
    """The `Source.place` inside of the epoch, if there is one; JSON."""
    given: int | None = 0
    """How many batches an iterator gave in another process, to be passed over. None if
    it is where the epoch began."""
    checksum: int | None = None
    """That of the last batch before the position, if it is known."""


START: Final = Position()


class Raw(NamedTuple):
    """Batches as a loader gives them."""

    batches: Iterator[Any]
    copy: bool = False
    """Whether they must be copied, as the next one may be in the same memory."""
    is_host: bool = False
    """Whether they are host batches already."""
    share: Callable[..., Iterator[Batch]] | None = None
    """What makes this process's batches of them, if not `Share.of`."""


class Source:
    """The batches of `loader`, which the user calls `argument`, from any position on.

    There are three kinds, by what leads to a position inside an epoch: the index lists
    of its rows (`ListSource`, `ArraysSource`, `TorchSource`), what the loader tells of
    its state (`TellingSource`), or reading it again (`ReplayingSource`).

    Args:
        loader: iterated once per epoch; an iterator continues after the last one.
        argument: what the user calls it.
        share: what of it comes to this process.
        seed: decides what is drawn for an epoch. None leaves global generators alone.
    """

    tells = False
    """Whether it tells its position itself."""

    def __init__(
        self, loader: Any, argument: str, share: Share = ALL, seed: int | None = None
    ):
        self.loader: Any = loader
        self.argument = argument
        self.share, self.seed = share, seed
        self.start = START  # of the next pass; later ones begin with an epoch
        self.begun: Position | None = None  # of the present epoch, with its state
        self.apart_from: Source | None = None  # whose generators are its own to save
        self.looks_at = ""  # of the trainer, while it is asked for a batch
        # How many of an epoch's batches are trained on, if it is read for that.
        self.trained: Callable[[], int] | None = None
        self._passes: list[Generator[Batch, None, None]] = []
        # What an iterator has given for steps that are not begun.
        self._given: collections.deque[Batch] = collections.deque()

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
    def is_iterator(self) -> bool:
        """Whether the loader gives each batch but once."""
        return hasattr(self.loader, "__next__")

    @property
    def replays(self) -> bool:
        """Whether only reading it again leads to a place inside an epoch."""
        return False

    @property
    def may_read_ahead(self) -> bool:
        """Whether batches may be asked for before the steps that need them."""
        return not self.looks

    @property
    def is_asked(self) -> bool:
        """Whether the loader is at work on a batch now."""
        return any([one_pass.gi_running for one_pass in self._passes])  # pyright: ignore

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
        """Host batches of an epoch from a position on, in order; else from `start`."""
        if position is None:
            position, self.start = self.start, START
        position = self.begun = self._begin(position)
        if given := [*self._given]:
            skip = position.batches + len(given)
            position = position._replace(batches=skip)
        raw = self._read(position)
        batches = self._conversion(raw, position.epoch, position.batches)
        self._passes = [one_pass for one_pass in self._passes if not _is_over(one_pass)]
        self._passes.append(batches)
        share = raw.share or self.share.of
        peek = None if self.is_iterator else self._peek_here
        return share(itertools.chain(given, batches) if given else batches, peek)

    def end_passes(self) -> None:
        """Ends the passes that were not read to their end; what is for more stays.

        Their frames may live on, in the traceback of an exception say. But the global
        generators must not stay those of a pass, nor its workers wait.
        """
        for batches in self._passes:
            batches.close()
        self._passes = []

    def close(self) -> None:
        """Ends passes, and what is for more of them."""
        self.end_passes()

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
        if self.begun is None or all(map(_is_over, self._passes)):
            return self.present_state()
        return self.begun.state

    def mark(self, epoch: int, done: int, last: Batch | None = None) -> Position:
        """How another source of the same loader comes to batch number `done`.

        In another process, too, if `last` is the batch before it, where one was trained
        on. An epoch that is not begun has no state: it begins as the loader is then.
        """
        begun = self.begun
        if begun is None:
            return self.start
        if begun.epoch != epoch:
            return START
        place, after = self._place(done), None
        if done == begun.batches and done:  # no step was taken since
            place, after = place or begun.place, begun.checksum
        if self.replays and done and last is not None:
            after = checksum(last)
        return Position(state=begun.state, place=place, checksum=after)

    def let_go(self, count: int) -> None:
        """So many batches more are begun: an iterator does not give them again."""
        while count and self._given:
            self._given.popleft()
            count -= 1

    def go_on_from(self, other: "Source") -> None:
        """Gives first what another source has read of the same iterator too far."""
        self._given = other._given

    def _place(self, trained: int) -> Any:
        """A place in the present epoch, not after batch `trained`, if known; JSON."""
        return None

    def first(self, count: int | None) -> list[Batch]:
        """The first batches, unshuffled: so many, or all."""
        with contextlib.closing(self):
            return list(itertools.islice(self.epoch(), count))

    def look(self, position: Position = START, count: int = 1) -> list[Batch]:
        """The next batches from a position on; the loader is left as it was.

        Of an iterator that can't tell its position, those that it has given last.
        """
        begun, trained, before = self.begun, self.trained, self.present_state()
        self.trained = None
        try:
            batches = self.epoch(position)
            first = list(itertools.islice(batches, count))
            getattr(batches, "close", lambda: None)()
        finally:
            self.begun, self.trained = begun, trained
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

    def sample(self) -> Batch | None:
        """The first batch of epoch 0, if to look at it costs next to nothing."""
        return None

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
        generators, others = self._own_generators(), self.apart_from
        theirs = () if others is None else others._own_generators().values()
        known = set(map(id, theirs))
        return {
            path: generator
            for path, generator in generators.items()
            if id(generator) not in known
        }

    def _own_generators(self) -> dict[str, Any]:
        return {}

    def _read(self, position: Position) -> Raw:
        """What the loader gives of an epoch from a position on."""
        raise NotImplementedError

    def _begin(self, position: Position) -> Position:
        """Has the loader be where an epoch starts; returns the position, complete."""
        if position.state is None:
            return position._replace(state=self.present_state())
        self._take_up(position.state)
        return position

    def _take_up(self, state: Any) -> None:
        """Has the loader be where `state` says."""
        self._set_generators(state)

    def _before(self, number: int) -> None:
        """Called before a batch of the epoch is asked for."""

    def _after(self, number: int, batch: Batch) -> None:
        """Called when it has come."""

    def _set_generators(self, state: Any) -> None:
        """Has generators and samplers of the user's be where a state has them."""
        state = state or {}
        if (generators := state.get("generators")) is not None:
            set_states(self._generators(), generators)
        saved = state.get("samplers", ())
        for sampler, sampler_state in zip(
            self._telling_samplers(), saved, strict=False
        ):
            sampler.load(sampler_state)

    def _conversion(
        self, raw: Raw, epoch: int, first: int
    ) -> Generator[Batch, None, None]:
        """Host batches; the first one has this number in the epoch."""
        gives_once = self.trained is not None and self.is_iterator
        for batch_idx in itertools.count(first):
            try:
                self._before(batch_idx)
                batch = next(raw.batches, END)
                if batch is END:
                    return
                host = batch if raw.is_host else to_host(batch, copy=raw.copy)
                self._after(batch_idx, host)
            except Exception as exception:
                exception.add_note(
                    f"in batch {batch_idx} of epoch {epoch} of `{self.argument}`"
                )
                self._explain(exception)
                raise
            if gives_once:
                self._given.append(host)
            yield host


class ListSource(Source):
    """Batches that are there, in a list or a tuple."""

    def sample(self) -> Batch | None:
        return self.peek()

    def _read(self, position: Position) -> Raw:
        return Raw(itertools.islice(self.loader, position.batches, None))


def _is_over(a_pass: Generator[Batch, None, None]) -> bool:
    return inspect.getgeneratorstate(a_pass) == inspect.GEN_CLOSED
