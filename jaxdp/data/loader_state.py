"""Positions in a loader, and the state of a loader that a checkpoint holds.

Loaders are read ahead of the steps, and a state is valid at the moment it is read. So
waypoints are recorded as batches are read. A resumed run loads the newest one before
its position, and reads on from there.

`Source.make_position` (`data/source.py`) makes the position of a batch, and
`Progress.state_dict` (`fit/progress.py`) saves it.
"""

import base64
import json
import sys
from typing import Any, Final, NamedTuple

from ..basics.console import log_info_once


class Position(NamedTuple):
    """The number of the next batch of an epoch, and how a loader gets there."""

    epoch: int = 0
    batches: int = 0
    """The number of batches before it, which are skipped."""
    state: Any = None
    """The loader's state at the start of the epoch; JSON. None: its present one."""
    waypoint: Any = None
    """`{"batches": n, "state": ...}`: the loader's own state before batch `n`."""
    num_yielded: int | None = 0
    """The number of batches that an iterator yielded in another process, which are
    skipped. None: it continues its pass in this process."""


EPOCH_START: Final = Position()


class LoaderState:
    """The state of a user's loader.

    It has the torch generators of a `DataLoader` and of its samplers, and the
    `state_dict` of each custom sampler. A loader that has no index lists may have one
    of its own, as torchdata's `StatefulDataLoader` and datasets of Hugging Face do.

    Attributes:
        samplers: the samplers of a torch `DataLoader`.
        custom_samplers: those that are not torch's.
        has_own: whether the loader publishes a state of its own.
    """

    def __init__(self, loader: Any, argument: str, has_index_lists: bool):
        self._loader, self._argument = loader, argument
        self._parts = _find_parts(loader)
        self.samplers = [part for path, part in self._parts.items() if path]
        self.custom_samplers = [s for s in self.samplers if not _is_torchs(s)]
        self._owner: Any = None if has_index_lists else _find_owner(loader)
        self.has_own = self._owner is not None
        # Each iteration of a Hugging Face dataset starts at the beginning, or at the
        # state that was loaded last.
        self._restarting: list[Any] = [
            each
            for each in (self._owner, getattr(self._owner, "dataset", None))
            if type(each).__module__.startswith("datasets.") and has_state_dict(each)
        ]

    def set_epoch(self, epoch: int) -> None:
        """Calls `set_epoch` of each part of the loader that has it."""
        dataset: Any = self._loader.dataset if self._parts else None
        for part in (*self.samplers, dataset, self._loader):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def read(self) -> Any:
        """Returns the state at the start of an epoch that begins now; JSON."""
        state: dict[str, Any] = {}
        if self.has_own:
            state["own"] = None if self._restarting else self._read(self._owner)
        if generators := self._find_generators():
            state["generators"] = {
                name: {"state": base64.b64encode(g.get_state().numpy()).decode()}
                for name, g in generators.items()
            }
        if samplers := [*filter(has_state_dict, self.custom_samplers)]:
            state["samplers"] = [*map(self._read, samplers)]
        return state or None

    def restore(self, state: Any) -> bool:
        """Restores a result of `read`; None changes nothing.

        Returns:
            Whether the loader itself is at the start of that epoch again.
        """
        state = state or {}
        own = state.get("own") if self.has_own else None
        self.load_own(own)
        saved, generators = state.get("generators", {}), self._find_generators()
        for name in generators.keys() & saved:
            import torch

            content = bytearray(base64.b64decode(saved[name]["state"]))
            generators[name].set_state(torch.frombuffer(content, dtype=torch.uint8))
        samplers = filter(has_state_dict, self.custom_samplers)
        for pair in zip(samplers, state.get("samplers", ()), strict=False):
            self._load(*pair)
        return own is not None

    def read_own(self) -> Any:
        """Returns the loader's own state as JSON, or None if JSON can't hold it."""
        return self._read(self._owner)

    def load_own(self, state: Any) -> None:
        """Restores a result of `read_own`; None changes nothing."""
        self._load(self._owner, state)

    def unload_own(self) -> None:
        """Makes the next iteration start at the beginning, not at the state of
        `load_own`. Must be called after the current iteration has begun.
        """
        for dataset in self._restarting:
            dataset.load_state_dict(None)

    def _find_generators(self) -> dict[str, Any]:
        """Returns the torch generators of a `DataLoader` and its samplers, each once,
        by path.
        """
        found: dict[int, tuple[str, Any]] = {}
        for path, part in self._parts.items():
            generator = getattr(part, "generator", None)
            if isinstance(generator, sys.modules["torch"].Generator):
                found.setdefault(id(generator), (f"{path}generator", generator))
        if found:  # the default generator is seeded for every epoch
            found.pop(id(sys.modules["torch"].default_generator), None)
        return dict(found.values())

    def _read(self, owner: Any) -> Any:
        if is_torchdatas(owner) and owner._iterator is None:
            state = owner.next_iter_state or {}  # `state_dict` would start its workers
        else:
            state = owner.state_dict()
        try:
            copy = json.loads(json.dumps(state))
            if copy == state:
                return copy
        except (TypeError, ValueError):
            pass
        log_info_once(
            f"`{self._argument}`: the state of {type(owner).__name__} is not JSON"
            " (dicts with texts as keys, lists, texts, numbers), so no checkpoint"
            " contains it, and a resumed run replays batches. Write array.tolist() for"
            " an array"
        )
        return None

    def _load(self, owner: Any, state: Any) -> None:
        if state is None:
            return
        try:
            owner.load_state_dict(state)
        except Exception as error:  # the user's owner may raise any error
            raise ValueError(
                f"`{self._argument}`: {type(owner).__name__} can't load the"
                f" state that was saved for it: {type(error).__name__}: {error}."
                " Pass the same kind of loader as in the saved run."
            ) from error


def has_state_dict(part: Any) -> bool:
    """Returns whether an object publishes its state as torch's parts do."""
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def is_torchdatas(loader: Any) -> bool:
    """Returns whether a loader is torchdata's, which adds its state to torch's."""
    return type(loader).__module__.startswith("torchdata.stateful_dataloader")


def _find_owner(loader: Any) -> Any:
    """Returns the object whose `state_dict` is that of a loader, or None."""
    dataset = getattr(loader, "dataset", None)
    # A torch loader without workers is never ahead of its iterable dataset, so that the
    # dataset's state is the loader's.
    has_no_workers = getattr(loader, "num_workers", None) == 0
    is_exact = has_no_workers and hasattr(dataset, "__iter__")
    owners = (dataset, loader) if is_exact else (loader,)
    return next(filter(has_state_dict, owners), None)


def _is_torchs(sampler: Any) -> bool:
    kind = type(sampler)
    is_of_torch = kind.__module__.startswith(("torch.utils.data.", "torchdata."))
    return is_of_torch or kind in (list, tuple, range)


def _find_parts(loader: Any) -> dict[str, Any]:
    """Returns a torch `DataLoader` and its samplers, each once, by their paths.

    A loader that is not torch's has no parts.
    """
    torch = sys.modules.get("torch")
    parts: dict[str, Any] = {}
    if torch is not None and isinstance(loader, torch.utils.data.DataLoader):
        waiting = [("", loader)]
        for path, part in waiting:  # which gets longer
            if part is not None and all(part is not known for known in parts.values()):
                parts[path] = part
                names = ("sampler", "batch_sampler")
                waiting += [(f"{path}{n}.", getattr(part, n, None)) for n in names]
    return parts
