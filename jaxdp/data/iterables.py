"""Any iterable of batches: its own state, or reading again, leads into an epoch."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

from ..basics.console import Outlet, open_bar, warn
from ..step import Batch
from .conversion import to_host
from .loader_state import OwnState, checksum, generators_of, own_state
from .random_states import Generators, seed_of, set_states, states_of
from .shares import Share
from .source import ALL, END, START, Position, Raw, Source


class ReplayingSource(Source):
    """An iterable that gives batches: an iterator, a generator, WebDataset's loader.

    With a seed, this decides with the epoch what global generators draw in it.
    """

    _goes_on = False  # whether it is an iterator, and is where the last epoch ended
    _passed: Any = None  # the last batch that was passed over, of an iterator

    @property
    def replays(self) -> bool:
        return self.share is ALL

    def _explain(self, exception: Exception) -> None:
        if self.seed is not None and isinstance(exception, TypeError | ValueError):
            exception.add_note(
                f"`{self.argument}` is a {type(self.loader).__name__}, each item of"
                " which is taken as a batch; if it gives single examples, wrap it:"
                " torch.utils.data.DataLoader(dataset, batch_size)."
            )

    def look(self, position: Position = START, count: int = 1) -> list[Batch]:
        if not self.is_iterator or self.tells:
            return super().look(position, count)
        # What an iterator gives next, it gives but once.
        passed = [] if self._passed is None else [self._passed]
        return list(self.share.of(iter(passed), None)) * count

    def _read(self, position: Position) -> Raw:
        return Raw(self._positioned(position), copy=True)

    def _positioned(self, position: Position) -> Iterator[Any]:
        """The loader's batches of an epoch from a position on."""
        batches = self._iterate(position.epoch)
        given = position.given if self._goes_on else None
        count = position.batches if given is None else given
        self._pass_over(batches, count, position.checksum)
        return batches

    def _started(self) -> Iterator[Any]:
        return iter(self.loader)

    def _note(self, batches: Any, generators: Callable[[], Any]) -> None:
        """Called with what is iterated, and what tells the state of generators."""

    def _iterate(self, epoch: int, generators: Any = None) -> Iterator[Any]:
        """Iterates the loader; what it draws from is where `generators` say, if so."""
        if self.seed is None:
            batches = self._started()
            self._goes_on = batches is self.loader
            self._note(batches, lambda: None)
            return batches
        seeded = Generators(seed_of(self.seed, epoch, *self.share.sampling))
        with seeded.active():
            batches = self._started()
        self._goes_on = batches is self.loader
        own = self._generators()
        if generators is not None:
            # torchdata's loader sets its sampler's generator to where an epoch began,
            # and the next epoch would not have the order that it should.
            seeded.states = generators[0]
            set_states(own, generators[1])
        self._note(batches, lambda: (seeded.states, states_of(own)))
        return _drawing(batches, seeded)

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
        if self._goes_on:
            self._passed = host
        if expected not in (None, checksum(host)):
            warn(
                f"`{self.argument}`: after {count} batches were replayed, the next"
                " one differs from the one in the saved run. (Does the order come"
                " from another random generator than the global ones of torch,"
                " NumPy and Python, as in WebDataset's `shuffle` without a seed?)"
                " Some rows of this epoch may come twice, and others not at all."
            )


class TellingSource(ReplayingSource):
    """A loader with `state_dict` or `get_state`; replayed where that leads astray."""

    tells = True

    def __init__(
        self, loader: Any, argument: str, share: Share = ALL, seed: int | None = None
    ):
        super().__init__(loader, argument, share, seed)
        own = own_state(loader, argument)
        assert own is not None
        self._own: OwnState = own

    @property
    def replays(self) -> bool:
        return False

    @property
    def may_read_ahead(self) -> bool:
        # An iterator that tells its position must not be further than the steps.
        return super().may_read_ahead and not self.is_iterator

    def present_state(self) -> Any:
        return {**(super().present_state() or {}), "own": self._own.present()}

    def _place(self, trained: int) -> Any:
        return self._own.place(trained)

    def _begin(self, position: Position) -> Position:
        if "own" in (position.state or {}):  # which tells the whole place
            position = position._replace(given=None)
        position = super()._begin(position)
        self._own.begin()
        return position

    def _take_up(self, state: Any) -> None:
        if "own" in (state or {}):
            self._own.load(state["own"])
        super()._take_up(state)

    def _before(self, number: int) -> None:
        if self.trained is not None:
            self._own.before(number, self.trained())

    def _after(self, number: int, batch: Batch) -> None:
        if self.trained is not None:
            self._own.after(number, batch)

    def _note(self, batches: Any, generators: Callable[[], Any]) -> None:
        self._own.began(batches)
        self._own.generators = generators

    def _positioned(self, position: Position) -> Iterator[Any]:
        epoch, place = position.epoch, position.place or {}
        if "batches" not in place:
            return super()._positioned(position)
        first = place["batches"]
        self._own.load(place["state"])
        batches = self._iterate(epoch, generators_of(place))
        batch = next(batches, END)
        if batch is not END and checksum(to_host(batch)) == place["after"]:
            self._own.after(first, None)
            self._pass_over(batches, position.batches - first - 1)
            return batches
        warn(
            f"`{self.argument}`: the state of {type(self._own.owner).__name__} did"
            f" not lead back to batch {first} of epoch {epoch}: a different batch"
            " came. (Does it have a shuffle buffer, whose content is not part of"
            " the state?) The epoch is replayed from its start."
        )
        self._take_up(position.state)
        batches = self._iterate(epoch)
        self._pass_over(batches, position.batches)
        return batches


def _drawing(batches: Iterator[Any], generators: Generators) -> Iterator[Any]:
    """The batches of a loader that draws from these generators."""
    while True:
        with generators.active():
            batch = next(batches, END)
        if batch is END:
            return
        yield batch
