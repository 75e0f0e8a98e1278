"""Where a loader is, and what it says of that by `state_dict` or `get_state`.

torchdata's `StatefulDataLoader` is one, under torch's own a dataset of Hugging Face, or
one of Grain's.
A state holds for the moment it was asked for, and loaders are read ahead of the steps.
So states are noted as batches are read; a resumed run loads the newest one before its
position, and reads on. Its first batch is compared with what it was, because not every
state is all there is: shuffle buffers, for one, are often left out.
"""

import base64
import time
import zlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from ..basics.console import say_once
from ..step import Batch

_COST: Final = 0.02
"""Of the time, at most, that may go into asking for states."""

_TAG: Final = "__jaxdp__"


class Position(NamedTuple):
    """Which batch of an epoch comes next, and what leads there in a loader."""

    epoch: int = 0
    batches: int = 0
    """How many of the epoch come before. They are skipped; but an iterator has given
    them already, and is not asked for them again."""
    state: Any = None
    """What, of its own, the loader starts the epoch from; JSON. None: as it is now."""
    place: Any = None
    """What leads into the epoch, if something does."""
    given: int | None = 0
    """How many batches an iterator gave in another process, to be passed over. None if
    it is where the epoch began."""
    last: Any = None
    """The batch before the position, or its checksum, if it is known."""

    def saved(self) -> tuple[Any, Any]:
        """The place and the last batch as a checkpoint has them; JSON."""
        place = self.place
        if place and not isinstance(place.get("after", 0), int):  # not loaded so
            generators, after = _encoded(place["generators"]), checksum(place["after"])
            place = {**place, "generators": generators, "after": after}
        return place, checksum(self.last)


START: Final = Position()


class OwnState:
    """What the `owner` of a `state_dict` and `load_state_dict` says of its position."""

    def __init__(self, owner: Any, argument: str):
        self.owner = owner
        self.argument = argument  # what the user calls the loader
        self.generators: Callable[[], Any] = lambda: None  # to note beside the states
        self._due = 0.0
        # These two start over with every iteration, and from a state with every one
        # after it was loaded, not with the next alone.
        inner = owner, getattr(owner, "dataset", None)
        self._sticky: list[Any] = [part for part in inner if _is_of_huggingface(part)]
        self._is_loaded = False
        self._is_new = False

    def present(self) -> Any:
        """What an epoch that began now would start from; JSON."""
        if self._sticky:
            return None
        kind = type(self.owner).__module__
        is_torchdatas = kind.startswith("torchdata.stateful_dataloader")
        if is_torchdatas and self.owner._iterator is None:
            return _encoded(self.owner.next_iter_state or {})  # or workers would start
        return self._ask()

    def load(self, state: Any) -> None:
        """Takes up what `present` gave, or the state of a `place`."""
        self.goes_on()
        if state is None:
            return
        try:
            self._tell(_decoded(state))
        except Exception as error:  # of any type: the owner is the user's
            raise ValueError(
                f"`{self.argument}`: {type(self.owner).__name__} can't load the"
                f" state that was saved for it: {type(error).__name__}: {error}."
                " Pass the same kind of loader as in the saved run."
            ) from error
        self._is_loaded = True

    def began(self, batches: Any) -> None:
        """Called with what the owner is iterated by, before it is asked for more."""

    def begin(self) -> None:
        """An epoch begins."""
        self._due = 0.0
        self._is_new = True

    def goes_on(self) -> None:
        """A batch has come: once an iteration goes on from a loaded state, the next one
        is to start over."""
        if self._is_loaded:
            for part in self._sticky:
                part.load_state_dict(None)
        self._is_loaded = False

    def place(self, batches: int) -> dict[str, Any] | None:
        """What leads to here, before so many batches of the epoch.

        None if it is too soon after the last time, or can't be told.
        """
        start = time.perf_counter()
        is_stale = self._is_new and self._sticky  # still the end of the last epoch
        self._is_new = False
        if start < self._due or is_stale:
            return None
        self._due = float("inf")
        if (state := self._ask()) is None:
            return None
        generators = self.generators()
        now = time.perf_counter()
        self._due = now + (now - start) / _COST
        return {"batches": batches, "state": state, "generators": generators}

    def _told(self) -> Any:
        return self.owner.state_dict()

    def _tell(self, state: Any) -> None:
        self.owner.load_state_dict(state)

    def _ask(self) -> Any:
        try:
            return _encoded(self._told())
        except _NotJson as error:
            say_once(
                f"`{self.argument}`: the state of {type(self.owner).__name__} has a"
                f" {error} in it, which can't be saved as JSON; a resumed run will"
                " replay its batches instead"
            )
            return None


class StateOfIterators(OwnState):
    """What the iterators of the `owner` say by `get_state`, and take up by `set_state`.

    As Grain's do. An owner that is an iterator itself speaks for itself.
    """

    def __init__(self, owner: Any, argument: str):
        super().__init__(owner, argument)
        self._is_iterator = hasattr(owner, "__next__")
        self._present: Any = owner
        self._to_tell: Any = None

    def present(self) -> Any:
        return super().present() if self._is_iterator else None  # it starts over

    def began(self, batches: Any) -> None:
        self._present = batches
        if self._to_tell is not None:
            batches.set_state(self._to_tell)
        self._to_tell = None

    def _told(self) -> Any:
        return self._present.get_state()

    def _tell(self, state: Any) -> None:
        if self._is_iterator:
            self.owner.set_state(state)
        else:
            self._to_tell = state


def own_state(loader: Any, argument: str) -> OwnState | None:
    """The `OwnState` of what a user passed as a loader, if it has one."""
    dataset = getattr(loader, "dataset", None)
    # Without workers a torch loader is not ahead of its iterable dataset, so that
    # this knows where both are.
    at_hand = getattr(loader, "num_workers", None) == 0 and hasattr(dataset, "__iter__")
    for owner in (dataset, loader) if at_hand else (loader,):
        if _can_tell(owner):
            return OwnState(owner, argument)
    is_iterator = hasattr(loader, "__next__") and hasattr(loader, "set_state")
    if is_iterator and hasattr(loader, "get_state") or _is_of_grain(loader):
        return StateOfIterators(loader, argument)
    return None


def generators_of(place: dict[str, Any]) -> Any:
    """What `OwnState.generators` gave for a saved place."""
    return _decoded(place["generators"])


def checksum(batch: Batch | int | None) -> int | None:
    """Tells one batch from another; of a checksum itself, and of None, the same."""
    if batch is None or isinstance(batch, int):
        return batch
    total = 0
    for leaf in jax.tree.leaves(batch):
        total = zlib.crc32(np.asarray(leaf).tobytes(), total)
    return total


def _can_tell(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _is_of_huggingface(thing: Any) -> bool:
    return type(thing).__module__.startswith("datasets.") and _can_tell(thing)


def _is_of_grain(thing: Any) -> bool:
    classes = type(thing).__mro__
    return any(cls.__module__.partition(".")[0] == "grain" for cls in classes)


class _NotJson(TypeError):
    """Says which type."""


def _encoded(value: Any) -> Any:
    """A copy of `value` in JSON, with tags for what JSON does not tell apart."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_encoded(item) for item in value]
    if kind is tuple:
        return {_TAG: "tuple", "of": [_encoded(item) for item in value]}
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: _encoded(item) for key, item in value.items()}
        pairs = [[_encoded(key), _encoded(item)] for key, item in value.items()]
        return {_TAG: "dict", "of": pairs}
    if kind in (bytes, bytearray):
        return {_TAG: kind.__name__, "of": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        what = "array" if isinstance(value, np.ndarray) else "number"
        of = base64.b64encode(value.tobytes()).decode()
        return {_TAG: what, "of": of, "as": [value.dtype.str, list(value.shape)]}
    if kind.__module__ == "torch" and kind.__name__ == "Tensor":
        tensor: Any = value
        return {_TAG: "tensor", "of": _encoded(tensor.detach().cpu().numpy())}
    raise _NotJson(f"{kind.__module__}.{kind.__qualname__}")


def _decoded(value: Any) -> Any:
    """The inverse of `_encoded`."""
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _decoded(item) for key, item in value.items()}
    kind, of = value[_TAG], value["of"]
    if kind == "tuple":
        return tuple(_decoded(of))
    if kind == "dict":
        return {_decoded(key): _decoded(item) for key, item in of}
    if kind == "tensor":
        import torch

        return torch.from_numpy(_decoded(of))
    content = bytearray(base64.b64decode(of))
    if kind in ("bytes", "bytearray"):
        return bytes(content) if kind == "bytes" else content
    dtype, shape = value["as"]
    array = np.frombuffer(content, dtype).reshape(shape)
    return array if kind == "array" else array[()]
