"""Positions in a loader, and the states that loaders publish.

torchdata's `StatefulDataLoader` publishes a state, and so do datasets of Hugging Face.
A state is valid at the moment it is read, and loaders are read ahead of the steps. So
states are recorded as batches are read. A resumed run loads the newest state before its
position, and reads on from that state.
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
    """The batch before the position, or its checksum, if known. A batch that is read
    again is compared with it."""


EPOCH_START: Final = Position()


class LoaderState:
    """The state of an `owner` that has `state_dict` and `load_state_dict`."""

    def __init__(self, owner: Any, argument: str):
        self.owner = owner
        self.argument = argument  # as the user calls the loader
        # Each iteration of a Hugging Face dataset starts at the beginning, or at the
        # state that was loaded last.
        datasets = owner, getattr(owner, "dataset", None)
        self._restarting: list[Any] = [
            each
            for each in datasets
            if type(each).__module__.startswith("datasets.") and has_state_dict(each)
        ]

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
        """Returns the current state as JSON, or None if JSON can't hold it."""
        return self._to_json(self.owner.state_dict())

    def load(self, state: Any) -> None:
        """Restores a state that `read` returned."""
        if state is None:
            return
        try:
            self.owner.load_state_dict(state)
        except Exception as error:  # the user's owner may raise any error
            raise ValueError(
                f"`{self.argument}`: {type(self.owner).__name__} can't load the"
                f" state that was saved for it: {type(error).__name__}: {error}."
                " Pass the same kind of loader as in the saved run."
            ) from error

    def unload(self) -> None:
        """Makes the next iteration start at the beginning. The current iteration must
        have begun.
        """
        for dataset in self._restarting:
            dataset.load_state_dict(None)

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
    return None


def compute_checksum(batch: Batch | int | None) -> int | None:
    """Returns a checksum of the values of a batch; a checksum or None as it is."""
    if batch is None or isinstance(batch, int):
        return batch
    total = 0
    for leaf in jax.tree.leaves(batch):
        total = zlib.crc32(np.asarray(leaf).tobytes(), total)
    return total


def has_state_dict(part: Any) -> bool:
    """Returns whether an object publishes its state as torch's parts do."""
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
