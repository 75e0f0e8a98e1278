"""Positions in a loader, and the states that loaders publish of themselves.

torchdata's `StatefulDataLoader` does, under torch's own a dataset of Hugging Face, and
those of Grain. A state holds for the moment it was asked for, and loaders are read
ahead of the steps. So states are noted as batches are read; a resumed run loads the
newest one before its position, and reads on from there.
"""

import json
import zlib
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from ..basics.console import log_info_once
from ..step import Batch


class Position(NamedTuple):
    """The number of the next batch of an epoch, and what leads to it in a loader."""

    epoch: int = 0
    batches: int = 0
    """The number of batches before it, which are skipped."""
    state: Any = None
    """What the loader starts the epoch from; JSON. None: as it is now."""
    place: Any = None
    """`{"batches": n, "state": ...}`: the loader's state before batch `n`, if known."""
    given: int | None = 0
    """The number of batches that an iterator gave in another process, which are
    skipped. None if the state leads to where the epoch began."""
    last: Any = None
    """The batch before the position, or its checksum, if known."""


START: Final = Position()


class LoaderState:
    """The state of an `owner` that has `state_dict` and `load_state_dict`."""

    def __init__(self, owner: Any, argument: str):
        self.owner = owner
        self.argument = argument  # as the user calls the loader
        # Hugging Face's start over with every iteration, and once a state was loaded,
        # from that one with every iteration.
        datasets = owner, getattr(owner, "dataset", None)
        self._sticky: list[Any] = [one for one in datasets if _is_of_huggingface(one)]

    def present(self) -> Any:
        """Returns what an epoch that began now would start from; JSON."""
        if self._sticky:
            return None
        kind = type(self.owner).__module__
        is_torchdatas = kind.startswith("torchdata.stateful_dataloader")
        if is_torchdatas and self.owner._iterator is None:
            return self._checked(self.owner.next_iter_state or {})  # starts no workers
        return self.ask()

    def ask(self) -> Any:
        """Returns the state of this moment as JSON, or None if JSON can't hold it."""
        return self._checked(self._get())

    def load(self, state: Any) -> None:
        """Restores what `present` or `ask` returned."""
        if state is None:
            return
        try:
            self._set(state)
        except Exception as error:  # of any type: the owner is the user's
            raise ValueError(
                f"`{self.argument}`: {type(self.owner).__name__} can't load the"
                f" state that was saved for it: {type(error).__name__}: {error}."
                " Pass the same kind of loader as in the saved run."
            ) from error

    def begin(self, batches: Any) -> None:
        """Called with the iterator over the loader, before its first batch."""

    def unload(self) -> None:
        """Has the next iteration start over. Called when the present one has begun."""
        for dataset in self._sticky:
            dataset.load_state_dict(None)

    def _get(self) -> Any:
        return self.owner.state_dict()

    def _set(self, state: Any) -> None:
        self.owner.load_state_dict(state)

    def _checked(self, state: Any) -> Any:
        try:
            copy = json.loads(json.dumps(state))
            if copy == state:
                return copy
        except (TypeError, ValueError):
            pass
        log_info_once(
            f"`{self.argument}`: the state of {type(self.owner).__name__} is not JSON"
            " (dicts with texts as keys, lists, texts, numbers), so no checkpoint"
            " contains it, and a resumed run replays batches. Write array.tolist() for"
            " an array"
        )
        return None


class IteratorState(LoaderState):
    """The state of iterators with `get_state` and `set_state`, as Grain's have.

    An owner that is no iterator itself has one for each iteration, which starts over.
    """

    def __init__(self, owner: Any, argument: str):
        super().__init__(owner, argument)
        self._is_iterator = hasattr(owner, "__next__")
        self._iterator: Any = owner
        self._loaded: Any = None

    def present(self) -> Any:
        return self.ask() if self._is_iterator else None

    def begin(self, batches: Any) -> None:
        self._iterator = batches
        if self._loaded is not None:
            batches.set_state(self._loaded)
        self._loaded = None

    def _get(self) -> Any:
        state = self._iterator.get_state()
        return state.decode() if isinstance(state, bytes) else state

    def _set(self, state: Any) -> None:
        state = state.encode() if isinstance(state, str) else state
        if self._is_iterator:
            self.owner.set_state(state)
        else:
            self._loaded = state


def state_of(loader: Any, argument: str) -> LoaderState | None:
    """Returns the `LoaderState` of a user's loader, if it publishes a state."""
    dataset = getattr(loader, "dataset", None)
    # Without workers a torch loader is not ahead of its iterable dataset, so that
    # this knows where both are.
    is_near = getattr(loader, "num_workers", None) == 0 and hasattr(dataset, "__iter__")
    for owner in (dataset, loader) if is_near else (loader,):
        if has_state_dict(owner):
            return LoaderState(owner, argument)
    is_iterator = hasattr(loader, "__next__") and hasattr(loader, "set_state")
    if is_iterator and hasattr(loader, "get_state") or _is_of_grain(loader):
        return IteratorState(loader, argument)
    return None


def checksum(batch: Batch | int | None) -> int | None:
    """Returns a number that tells batches apart; of a checksum and of None, itself."""
    if batch is None or isinstance(batch, int):
        return batch
    total = 0
    for leaf in jax.tree.leaves(batch):
        total = zlib.crc32(np.asarray(leaf).tobytes(), total)
    return total


def has_state_dict(part: Any) -> bool:
    """Returns whether an object publishes its state as torch's parts do."""
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def _is_of_huggingface(part: Any) -> bool:
    return type(part).__module__.startswith("datasets.") and has_state_dict(part)


def _is_of_grain(loader: Any) -> bool:
    classes = type(loader).__mro__
    return any(cls.__module__.partition(".")[0] == "grain" for cls in classes)
