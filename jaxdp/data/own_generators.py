"""Random generators that a loader's parts have of their own, as attributes.

The global ones are seeded for every epoch; these go on from epoch to epoch, and only
their states tell what comes next.
"""

import collections
import functools
import random
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np

_MOST_ITEMS: Final = 1_000
"""Of a list or dict that is looked through; longer ones are taken for data."""
_MOST_OBJECTS: Final = 5_000
"""That are looked into, the nearest first: 30 ms, at every epoch and save."""
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

_of_each_class = functools.lru_cache(1_000)
"""Worked out once: a tensor's class has 800 members, and epochs may be short."""


def find(parts: Mapping[str, Any], apart: Any = None) -> dict[str, Any]:
    """The generators in `parts`, but not in what is `apart`: each once, by its path.

    Such as "sampler.rngs[2]".
    """
    found: dict[str, Any] = {}
    known, seen = _globals(), {id(apart): apart}  # kept, so that no other gets its id
    waiting = collections.deque(parts.items())
    while waiting and len(seen) < _MOST_OBJECTS:
        path, thing = waiting.popleft()
        if type(thing) in _ATOMS or id(thing) in seen:
            continue
        if (generator := _generator(thing)) is None:
            seen[id(thing)] = thing
            if len(waiting) < _MOST_OBJECTS:
                waiting.extend(_inside(path, thing))
        elif id(generator) not in known:
            known.add(id(generator))
            found[path] = generator
    return found


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
    if not _may_generate(type(thing)):
        return None
    if isinstance(thing, np.random.Generator):
        return thing.bit_generator
    if isinstance(thing, random.Random):
        # What tells its state in its own way has one of its own kind.
        inherits = all(
            getattr(type(thing), name) is getattr(random.Random, name)
            for name in ("getstate", "setstate")
        )
        return thing if inherits else None
    return thing


@_of_each_class
def _may_generate(kind: type) -> bool:
    generators = np.random.Generator, np.random.RandomState, np.random.BitGenerator
    torch = sys.modules.get("torch")
    torchs = () if torch is None else (torch.Generator,)
    return issubclass(kind, (*generators, random.Random, *torchs))


def _inside(path: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """What a container or an object holds, numbers and the like left out."""
    kind = type(thing)
    if isinstance(thing, functools.partial):
        names: Iterable[str] = ("func", "args", "keywords")
        own: Mapping[str, Any] = {}
    elif isinstance(thing, types.MethodType):
        names, own = ("__self__",), {}
    elif _is_closed(kind):
        return
    else:
        names, own = _slots(kind), getattr(thing, "__dict__", {})

    # What is a mapping by name alone may read files.
    if isinstance(thing, list | tuple | collections.deque | dict):
        if len(thing) <= _MOST_ITEMS:
            items = thing.items() if isinstance(thing, dict) else enumerate(thing)
            for key, value in list(items):
                if type(value) not in _ATOMS:
                    yield f"{path}[{key!r}]", value
    if kind in _CONTAINERS:
        return

    for name, value in list(own.items()):
        if type(value) not in _ATOMS:
            yield f"{path}.{name}", value
    for name in names:
        yield f"{path}.{name}", getattr(thing, name, None)


@_of_each_class
def _is_closed(kind: type) -> bool:
    """Whether objects of a class are not looked into."""
    torch = sys.modules.get("torch")
    if torch is not None and kind in (torch.Tensor, torch.nn.Parameter):
        return True
    return issubclass(kind, _CLOSED) or kind.__module__.partition(".")[0] in _FOREIGN


@_of_each_class
def _slots(kind: type) -> list[str]:
    """The attributes that `__slots__` of a class and of its bases name."""
    return [
        name
        for base in kind.__mro__
        for name, member in list(vars(base).items())
        if isinstance(member, types.MemberDescriptorType)
    ]
