"""Any iterable of batches: to read it again leads to a place inside an epoch."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

from ..basics.console import Outlet, open_bar, warn
from ..step import Batch
from .conversion import to_host
from .loader_state import checksum
from .random_states import Generators, seed_of, set_states, states_of
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


def _drawing(batches: Iterator[Any], generators: Generators) -> Iterator[Any]:
    """The batches of a loader that draws from these generators."""
    while True:
        with generators.active():
            batch = next(batches, END)
        if batch is END:
            return
        yield batch
