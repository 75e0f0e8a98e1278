"""Loaders that tell their state: what leads to a place is the newest one before it."""

from collections.abc import Callable, Iterator
from typing import Any

from ..basics.console import warn
from ..step import Batch
from .conversion import to_host
from .loader_state import OwnState, checksum, generators_of, own_state
from .replaying import ReplayingSource
from .shares import Share
from .source import ALL, END, Position


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
