"""Random generators that a loader's parts have of their own, as attributes.

The global ones are seeded for every epoch; these go on from epoch to epoch, and only
their states tell what comes next. They are found where a part, or what it is made of,
holds them, and their states are kept in JSON.
"""

import collections
import functools
import itertools
import operator
import random
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from .random_states import kind_of, set_state, state_of, try_state

_NOTHING: Final[Mapping[int, Any]] = types.MappingProxyType({})
_MOST_ITEMS: Final = 10_000
"""Of a list or dict that is looked through; longer ones are taken for data."""
_MOST_OBJECTS: Final = 20_000
"""That are looked into, the nearest first: 0.2 s."""
_FEW: Final = 200
"""Objects that may be looked into at every epoch and save: 2 ms."""
_SMALL: Final = 100
"""Items of a container that all tell whether it is data; of others, the first ones."""
_ATOMS: Final = {bool, int, float, complex, str, bytes, type(None), np.ndarray}
_CONTAINERS: Final = {list, tuple, dict, collections.deque}
_CLOSED: Final = (
    types.ModuleType,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    np.generic,
)
_FOREIGN: Final = set(
    "jax jaxlib jaxdp equinox optax multiprocessing threading logging weakref"
    " pandas polars pyarrow h5py PIL".split()
)
"""Packages whose objects decide no batches, and lead far away."""


class Found:
    """The generators that some parts hold.

    Attributes:
        by_path: the generators by where they are, as "sampler.rngs[2]"; each once.
        seen: what was looked into, by `id`.
        is_whole: whether that is all that there is.
    """

    def __init__(self, parts: Mapping[str, Any], apart: Mapping[int, Any] = _NOTHING):
        """Looks for them.

        Args:
            parts: by name.
            apart: what is not to be looked into, by `id`.
        """
        self.by_path: dict[str, Any] = {}
        self.seen: dict[int, Any] = {}
        known = _globals()
        waiting = collections.deque(parts.items())
        while waiting and len(self.seen) < _MOST_OBJECTS:
            path, thing = waiting.popleft()
            if id(thing) in self.seen or id(thing) in apart or _is_data(thing):
                continue
            if (found := _generator(thing)) is None:
                self.seen[id(thing)] = thing  # kept, so that no other gets its id
                waiting.extend(_inside(path, thing))
            elif id(found) not in known:
                known.add(id(found))
                self.by_path[path] = found
        self.is_whole = not waiting

    def shares_with(self, other: "Found") -> bool:
        """Whether a generator is in both."""
        return len(self.without(other).by_path) < len(self.by_path)

    def without(self, other: "Found") -> "Found":
        """Those that `other` has not."""
        theirs = set(map(id, other.by_path.values()))
        left = Found({})
        left.by_path = {p: g for p, g in self.by_path.items() if id(g) not in theirs}
        return left

    def __or__(self, other: "Found") -> "Found":
        both = Found({})
        both.by_path = self.by_path | other.by_path
        return both

    def state_dict(self) -> dict[str, Any]:
        """The states, for `load_state_dict`; JSON."""
        return {path: state_of(each) for path, each in self.by_path.items()}

    def load_state_dict(self, states: Any) -> None:
        """Has the generators go on from `states`, those of them that are there.

        Raises:
            ValueError: if these are no states of such generators; all are as before.
        """
        check(states)
        there = []
        for path, state in states.items():
            generator = self.by_path.get(path)
            if generator is not None and kind_of(generator) == state["kind"]:
                try_state(state, path, generator)
                there.append((generator, state))
        for generator, state in there:
            set_state(generator, state)


class Search:
    """Finds the generators of parts, and looks again where that may find others.

    Of few objects it always does. Of many it waits for another part, or for another
    attribute of one.
    """

    def __init__(self) -> None:
        self._found: Found | None = None
        self._apart: Mapping[int, Any] = _NOTHING
        self._looks: list[Any] = []

    def __call__(
        self, parts: Mapping[str, Any], apart: Mapping[int, Any] = _NOTHING
    ) -> Found:
        """As `Found` does."""
        looks = list(_attributes(parts))
        found = self._found
        if (
            found is None
            or len(found.seen) <= _FEW
            or len(looks) != len(self._looks)
            or not all(map(operator.is_, looks, self._looks))
            or (apart is not self._apart and apart.keys() != self._apart.keys())
        ):
            found = self._found = Found(parts, apart)
            self._apart, self._looks = apart, looks
        return found


def _attributes(parts: Mapping[str, Any]) -> Iterator[Any]:
    """The parts, and what may hold generators of their attributes."""
    for part in parts.values():
        yield part
        for each in list(getattr(part, "__dict__", {}).values()):
            if not _is_data(each):
                yield each


def check(states: Any) -> None:
    """Raises a ValueError unless `states` may be some that `Found.state_dict` gave."""
    if not isinstance(states, dict) or len(states) > _MOST_OBJECTS:
        raise ValueError(
            f"states of generators must be a dict of them by name; got a"
            f" {type(states).__name__}."
        )
    for path, state in states.items():
        if not isinstance(state, dict) or set(state) != {"kind", "state"}:
            raise ValueError(f"the state of the generator {path!r} is none.")
        try_state(state, path)


def _globals() -> set[int]:
    """The generators that all share: they are seeded for every epoch."""
    shared: Any = np.random.get_state.__self__  # type: ignore[attr-defined]
    pythons: Any = random.getstate.__self__  # type: ignore[attr-defined]
    found = [shared, shared._bit_generator, pythons]
    torch = sys.modules.get("torch")
    found += [] if torch is None else [torch.default_generator]
    return set(map(id, found))


def _generator(thing: Any) -> Any:
    """What has the state, if this is a generator."""
    if isinstance(thing, np.random.Generator):
        return thing.bit_generator
    if isinstance(thing, np.random.RandomState | np.random.BitGenerator):
        return thing
    if isinstance(thing, random.Random):
        # What tells its state in its own way has one of its own kind.
        inherits = all(
            getattr(type(thing), name) is getattr(random.Random, name)
            for name in ("getstate", "setstate")
        )
        return thing if inherits else None
    torch = sys.modules.get("torch")
    is_torchs = torch is not None and isinstance(thing, torch.Generator)
    return thing if is_torchs else None


def _inside(path: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """What a container or an object holds."""
    if isinstance(thing, functools.partial):
        yield f"{path}.func", thing.func
        yield f"{path}.args", thing.args
        yield f"{path}.keywords", thing.keywords
        return
    if isinstance(thing, types.MethodType):
        yield f"{path}.__self__", thing.__self__
        return
    kind = type(thing)
    if isinstance(thing, _CLOSED) or kind.__module__.partition(".")[0] in _FOREIGN:
        return
    if isinstance(thing, list | tuple | collections.deque | Mapping):
        # What is a mapping by name alone may read files.
        is_plain = not isinstance(thing, Mapping) or isinstance(thing, dict)
        if is_plain and len(thing) <= _MOST_ITEMS:
            items = thing.items() if isinstance(thing, dict) else enumerate(thing)
            for key, value in list(items):
                if not _is_data(value):  # or every row would get a path
                    yield f"{path}[{key!r}]", value
    if kind in _CONTAINERS:
        return
    for name, value in list(getattr(thing, "__dict__", {}).items()):
        yield f"{path}.{name}", value
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = base.__dict__.get(name)
            if isinstance(member, types.MemberDescriptorType):
                value = getattr(thing, name, None)
                yield f"{path}.{name}", value


def _is_data(value: Any, depth: int = 4) -> bool:
    """Whether nothing can be in it, as in the names of files and their labels."""
    kind = type(value)
    if kind in _ATOMS or _is_tensor(kind):
        return True
    if kind not in _CONTAINERS or not depth:
        return False
    items = value.values() if kind is dict else value
    if len(value) > _SMALL:
        items = itertools.islice(items, 8)
    return all(_is_data(each, depth - 1) for each in list(items))


def _is_tensor(kind: type) -> bool:
    return kind.__name__ in ("Tensor", "Parameter") and kind.__module__ in (
        "torch",
        "torch.nn.parameter",
    )
