"""Any iterable of batches, epoch by epoch."""

import collections
import contextlib
import dataclasses
import inspect
import itertools
import operator
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from typing import Any, Final

import jax

from ..basics.console import Outlet, open_bar, warn
from ..step import NOTHING, Batch
from .conversion import to_host
from .limit import capped
from .loader_state import OwnState, checksum, generators_of, own_state
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


@dataclasses.dataclass(frozen=True)
class Position:
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


class Source:
    """The batches of `loader`, an iterable that the user calls `argument`.

    It is iterated once per epoch; an iterator continues after the last epoch.
    """

    def __init__(self, loader: Any, argument: str, share: Share = ALL):
        self.loader: Any = loader
        self.argument = argument
        self.share = share
        self.begun: Position | None = None  # of the present epoch, with its state
        self.apart_from: Source | None = None  # whose generators are its own to save
        self.looks_at = ""  # of the trainer, while it is asked for a batch
        self._own = self._own_state()
        self._keeps_places = self._goes_on = False
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
        is_list = isinstance(self.loader, list | tuple)
        return not is_list and self._own is None and self.share is ALL

    @property
    def may_read_ahead(self) -> bool:
        """Whether batches may be asked for before the steps that need them."""
        # An iterator that tells its position must not be further than the steps.
        return not self.looks and (self._own is None or not self.is_iterator)

    @property
    def is_asked(self) -> bool:
        """Whether the loader is at work on a batch now."""
        return any([one_pass.gi_running for one_pass in self._passes])  # pyright: ignore

    @property
    def looks(self) -> bool:
        """Whether the loader, of any process, looks at what training changes."""
        return bool(self.looks_at) or self.share.looks

    def note_look(self, at: str) -> None:
        """The loader looks at this; from now on batches are asked for one by one."""
        self.looks_at = self.looks_at or at
        if self.share is not ALL:
            self.share.looks = True

    def epoch(self, position: Position = START) -> Iterator[Batch]:
        """Host batches of an epoch from a position on, in order."""
        given = [*self._given]
        skip = position.batches + len(given)
        position = self._begin(dataclasses.replace(position, batches=skip))
        # What is no list may write every batch into the same memory.
        copy = not isinstance(self.loader, list | tuple)
        peek = None if self.is_iterator else self._peek_here
        batches = self._converted(self._positioned(position), position, copy)
        return self.share.of(
            itertools.chain(given, batches) if given else batches, peek
        )

    def close(self) -> None:
        """Ends the passes that were not read to their end.

        Their frames may live on, in the traceback of an exception say. But the global
        generators must not stay those of a pass, nor its workers wait.
        """
        for batches in self._passes:
            batches.close()
        self._passes = []

    @contextlib.contextmanager
    def a_pass(self) -> Iterator[None]:
        """Afterwards all passes have ended; what is for more of them stays."""
        try:
            yield
        finally:
            Source.close(self)

    def present_state(self) -> Any:
        """The `Position.state` of an epoch that started now."""
        parts: dict[str, Any] = {}
        if generators := states_of(self._generators()):
            parts["generators"] = generators
        if samplers := [sampler.present() for sampler in self._telling_samplers()]:
            parts["samplers"] = samplers
        if self._own is not None:
            parts["own"] = self._own.present()
        return parts or None

    def state_now(self) -> Any:
        """What to start from to see what is now to be seen; a pass begins again."""
        if self.begun is None or all(map(_is_over, self._passes)):
            return self.present_state()
        return self.begun.state

    def keep_places(self, trained: Callable[[], int]) -> None:
        """From now on `place` can be asked; `trained` counts the epoch's batches."""
        self._keeps_places = True
        if self._own is not None:
            self._own.trained = trained

    def let_go(self, count: int) -> None:
        """So many batches more are begun: an iterator does not give them again."""
        for _ in range(min(count, len(self._given))):
            self._given.popleft()

    def go_on_from(self, other: "Source") -> None:
        """Gives first what another source has read of the same iterator too far."""
        self._given = other._given

    def place(self, trained: int) -> Any:
        """A place in the present epoch, not after batch `trained`, if known; JSON."""
        return None if self._own is None else self._own.place(trained)

    def first(self, share: int | float) -> list[Batch]:
        """The first batches, unshuffled: so many, or as a float such a share."""
        count = capped("overfit_batches", share, self.num_batches)
        with contextlib.closing(self):
            return list(itertools.islice(self.epoch(), count))

    def look(self, position: Position = START, count: int = 1) -> list[Batch]:
        """The next batches from a position on; the loader is left as it was.

        None of an iterator that can't tell its position.
        """
        if self.is_iterator and self._own is None:
            return []
        begun, keeps, before = self.begun, self._keeps_places, self.present_state()
        self._keeps_places = False
        try:
            batches = self.epoch(position)
            first = list(itertools.islice(batches, count))
            getattr(batches, "close", lambda: None)()
        finally:
            self.begun, self._keeps_places = begun, keeps
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
        return self.peek() if isinstance(self.loader, list | tuple) else None

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

    def _own_state(self) -> OwnState | None:
        return own_state(self.loader, self.argument)

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

    def _begin(self, position: Position) -> Position:
        """Has the loader be where an epoch starts; returns the position, complete."""
        if position.state is None:
            position = dataclasses.replace(position, state=self.present_state())
        elif self._take_up(position.state):
            position = dataclasses.replace(position, given=None)
        self.begun = position
        if self._own is not None:
            self._own.begin()
        return position

    def _take_up(self, state: Any) -> bool:
        """Has the loader be where `state` says; whether it tells the whole place."""
        keeper = self._own if "own" in (state or {}) else None
        if keeper is not None:
            keeper.load(state["own"])
        self._set_generators(state)
        return keeper is not None

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

    def _iterate(self, epoch: int, generators: Any = None) -> Iterator[Any]:
        """Iterates the loader in its own way."""
        batches = iter(self.loader)
        self._goes_on = batches is self.loader
        if self._own is not None:
            self._own.began(batches)
        return batches

    def _positioned(self, position: Position) -> Iterator[Any]:
        """The loader's batches of an epoch from a position on."""
        epoch, skip, place = position.epoch, position.batches, position.place
        if place is None or self._own is None or "batches" not in place:
            batches = self._iterate(epoch)
            given = position.given if self._goes_on else None
            count = skip if given is None else given
            self._pass_over(batches, count, position.checksum)
            return batches

        # The newest place that the loader has told, and on from there.
        first = place["batches"]
        self._own.load(place["state"])
        batches = self._iterate(epoch, generators_of(place))
        batch = next(batches, END)
        if batch is not END and checksum(to_host(batch)) == place["after"]:
            self._own.after(first, None)
            self._pass_over(batches, skip - first - 1)
            return batches
        warn(
            f"`{self.argument}`: the state of {type(self._own.owner).__name__} did"
            f" not lead back to batch {first} of epoch {epoch}: a different batch"
            " came. (Does it have a shuffle buffer, whose content is not part of"
            " the state?) The epoch is replayed from its start."
        )
        self._take_up(position.state)
        batches = self._iterate(epoch)
        self._pass_over(batches, skip)
        return batches

    def _pass_over(
        self, batches: Iterator[Any], count: int, expected: int | None = None
    ) -> None:
        """Asks for `count` batches again; the last has the checksum `expected`."""
        if isinstance(self.loader, list | tuple) or not count:
            next(itertools.islice(batches, count, count), None)
            return
        from tqdm import tqdm

        what = f"`{self.argument}` can't jump: replaying {count} batches"
        batch, steps, out = END, range(count), Outlet(sys.stderr)
        bar = open_bar(tqdm, steps, what, file=out, delay=1, leave=False, mininterval=1)
        for _ in steps if bar is None else bar:
            if (batch := next(batches, END)) is END:
                return
        if expected not in (None, checksum(to_host(batch))):
            warn(
                f"`{self.argument}`: after {count} batches were replayed, the next"
                " one differs from the one in the saved run. (Does the order come"
                " from another random generator than the global ones of torch,"
                " NumPy and Python, as in WebDataset's `shuffle` without a seed?)"
                " Some rows of this epoch may come twice, and others not at all."
            )

    def _converted(
        self,
        batches: Iterator[Any],
        position: Position,
        copy: bool,
        ready: bool = False,
    ) -> Iterator[Batch]:
        """The loader's batches from a position on, as host batches."""
        converted = self._conversion(batches, position, copy, ready)
        self._passes = [one_pass for one_pass in self._passes if not _is_over(one_pass)]
        self._passes.append(converted)
        return converted

    def _conversion(
        self, batches: Iterator[Any], position: Position, copy: bool, ready: bool
    ) -> Generator[Batch, None, None]:
        keeper = self._own if self._keeps_places else None
        gives_once = self._keeps_places and self.is_iterator
        for batch_idx in itertools.count(position.batches):
            try:
                if keeper is not None:
                    keeper.before(batch_idx)
                batch = next(batches, END)
                if batch is END:
                    return
                host = batch if ready else to_host(batch, copy=copy)
                if keeper is not None:
                    keeper.after(batch_idx, host)
            except Exception as exception:
                exception.add_note(
                    f"in batch {batch_idx} of epoch {position.epoch} of"
                    f" `{self.argument}`"
                )
                self._explain(exception)
                raise
            if gives_once:
                self._given.append(host)
            yield host


def open_loader(
    loader: Any,
    argument: str,
    seed: int,
    share: Share = ALL,
    **of_arrays: Any,
) -> Source:
    """The source of batches for what a user passed as `argument`, if it gives some.

    `of_arrays` are further arguments of `ArraysSource`.
    """
    from .arrays import Arrays, ArraysSource

    if isinstance(loader, Arrays):
        return ArraysSource(loader, argument, seed, share, **of_arrays)
    torch = sys.modules.get("torch")
    if torch is not None:
        if isinstance(loader, torch.utils.data.DataLoader):
            from .torch_source import TorchSource

            return TorchSource(loader, argument, seed, share)
        if isinstance(loader, torch.utils.data.IterableDataset):
            from .torch_source import SeededSource

            return SeededSource(loader, argument, seed, share)
        if isinstance(loader, torch.utils.data.Dataset):
            raise TypeError(
                f"`{argument}` is a {type(loader).__name__}, a torch Dataset, which"
                " gives single examples; wrap it: torch.utils.data.DataLoader(dataset,"
                " batch_size)."
            )

    # Any iterable, but not what iterates over something else.
    arrays = loader if isinstance(loader, tuple) else (loader,)
    is_array = [hasattr(array, "dtype") for array in arrays]
    may_be = [isinstance(array, Mapping) for array in arrays]  # a tree of arrays
    if any(is_array) and all(map(operator.or_, is_array, may_be)):
        what = ", ".join(
            f"an array of shape {array.shape}" if known else "a dict"
            for array, known in zip(arrays, is_array, strict=True)
        )
        what = f"a tuple of {what}" if arrays is loader else what
        raise TypeError(
            f"`{argument}` is {what}, not an iterable of batches. Of arrays x and y"
            " pass one loader of both: jaxdp.Arrays(x, y, batch_size=32); of x alone,"
            " jaxdp.Arrays(x)."
        )
    if isinstance(loader, str | bytes | dict):
        raise TypeError(
            f"`{argument}` is a {type(loader).__name__}, not an iterable of batches;"
            " pass a DataLoader, a list or a generator of (x, y) batches, or of arrays"
            " jaxdp.Arrays(x, y, batch_size=32)."
        )
    if isinstance(loader, list | tuple) and loader and all(map(_is_loader, loader)):
        raise TypeError(
            f"`{argument}` is a {type(loader).__name__} of {len(loader)} loaders, and"
            " must be one. To validate or test on several, name them: {'clean': a,"
            " 'shifted': b}."
        )
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise TypeError(
            f"`{argument}` is a {type(loader).__name__} and can't be iterated; pass a"
            " DataLoader, a list or a generator of batches."
        )
    return Source(loader, argument, share)


def _is_loader(found: Any) -> bool:
    """Whether it gives batches, and is none itself: no array, no tree of arrays."""
    is_array = hasattr(found, "dtype") or isinstance(found, str | bytes | Mapping)
    gives = isinstance(found, Iterable) or hasattr(found, "__getitem__")
    return gives and not is_array and jax.tree_util.all_leaves([found])


def _is_over(a_pass: Generator[Batch, None, None]) -> bool:
    return inspect.getgeneratorstate(a_pass) == inspect.GEN_CLOSED
