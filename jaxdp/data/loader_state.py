"""Positions in a loader, and the states that loaders publish.

torchdata's `StatefulDataLoader` publishes one, and so do datasets of Hugging Face and
loaders of Grain. A state is valid at the moment it is read, and loaders are read ahead
of the steps. So states are noted as batches are read; a resumed run loads the newest
one before its position, and reads on from there.
"""

import json
import zlib
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from ..basics.console import log_info_once
from ..step import Batch


class Position(NamedTuple):
    """The number of the next batch of an epoch, and how a loader gets there."""

    epoch: int = 0
    batches: int = 0
    """The number of batches before it, which are skipped."""
    state: Any = None
    """The loader's state at the start of the epoch; JSON. None: its present one."""
    waypoint: Any = None
    """`{"batches": n, "state": ...}`: the loader's state before batch `n`, if known."""
    num_yielded: int | None = 0
    """The number of batches that an iterator yielded in another process, which are
    skipped. None if the state leads to the start of the epoch."""
    last_batch: Any = None
    """The batch before the position, or its checksum, if known."""


EPOCH_START: Final = Position()


class LoaderState:
    """The state of an `owner` that has `state_dict` and `load_state_dict`."""

    def __init__(self, owner: Any, argument: str):
        self.owner = owner
        self.argument = argument  # as the user calls the loader
        # Each iteration of Hugging Face's datasets starts over, or from the state that
        # was loaded last.
        datasets = owner, getattr(owner, "dataset", None)
        self._restarting: list[Any] = [d for d in datasets if _is_of_huggingface(d)]

    def read_start(self) -> Any:
        """Returns the state at the start of an epoch that begins now; JSON."""
        if self._restarting:
            return None
        kind = type(self.owner).__module__
        is_torchdatas = kind.startswith("torchdata.stateful_dataloader")
        if is_torchdatas and self.owner._iterator is None:
            return self._to_json(self.owner.next_iter_state or {})  # starts no workers
        return self.read()

    def read(self) -> Any:
        """Returns the present state as JSON, or None if JSON can't hold it."""
        return self._to_json(self._get())

    def load(self, state: Any) -> None:
        """Restores a state that was read."""
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

    def set_iterator(self, batches: Any) -> None:
        """Receives the iterator over the loader, before its first batch."""

    def unload(self) -> None:
        """Makes the next iteration start over. The present one must have begun."""
        for dataset in self._restarting:
            dataset.load_state_dict(None)

    def _get(self) -> Any:
        return self.owner.state_dict()

    def _set(self, state: Any) -> None:
        self.owner.load_state_dict(state)

    def _to_json(self, state: Any) -> Any:
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

    An owner that is no iterator itself has a new one for each iteration.
    """

    def __init__(self, owner: Any, argument: str):
        super().__init__(owner, argument)
        self._is_iterator = hasattr(owner, "__next__")
        self._iterator: Any = owner
        self._loaded: Any = None

    def read_start(self) -> Any:
        return self.read() if self._is_iterator else None

    def set_iterator(self, batches: Any) -> None:
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


def find_loader_state(loader: Any, argument: str) -> LoaderState | None:
    """Returns the `LoaderState` of a user's loader, if it publishes a state."""
    dataset = getattr(loader, "dataset", None)
    # A torch loader without workers is never ahead of its iterable dataset, so that the
    # dataset's state is the loader's.
    has_no_workers = getattr(loader, "num_workers", None) == 0
    is_exact = has_no_workers and hasattr(dataset, "__iter__")
    for owner in (dataset, loader) if is_exact else (loader,):
        if has_state_dict(owner):
            return LoaderState(owner, argument)
    is_iterator = hasattr(loader, "__next__") and hasattr(loader, "set_state")
    modules = [cls.__module__.partition(".")[0] for cls in type(loader).__mro__]
    if is_iterator and hasattr(loader, "get_state") or "grain" in modules:
        return IteratorState(loader, argument)
    return None


def compute_checksum(batch: Batch | int | None) -> int | None:
    """Returns a checksum of the values of a batch; a checksum or None is unchanged."""
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
