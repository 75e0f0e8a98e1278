"""Random generators that a loader's parts have of their own, as attributes.

The global ones are seeded for every epoch; these go on from epoch to epoch, and only
their states tell what comes next.
"""

import collections
import functools
import random
import sys
import types
from collections.abc import Iterator, Mapping
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


def find(parts: Mapping[str, Any], apart: Any = None) -> dict[str, Any]:
    """The generators in `parts`, but not in what is `apart`: each once, by its path.

    Such as "sampler.rngs[2]".
    """
    found: dict[str, Any] = {}
    known, seen = _globals(), {id(apart): apart}  # kept, so that no other gets its id
    waiting = collections.deque(parts.items())
    while waiting and len(seen) < _MOST_OBJECTS:
        path, thing = waiting.popleft()
        if id(thing) in seen or type(thing) in _ATOMS:
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

    # What is a mapping by name alone may read files.
    if isinstance(thing, list | tuple | collections.deque | dict):
        if len(thing) <= _MOST_ITEMS:
            items = thing.items() if isinstance(thing, dict) else enumerate(thing)
            for key, value in list(items):
                yield f"{path}[{key!r}]", value
    if kind in _CONTAINERS:
        return

    for name, value in list(getattr(thing, "__dict__", {}).items()):
        yield f"{path}.{name}", value
    for name in _slots(kind):
        yield f"{path}.{name}", getattr(thing, name, None)


@functools.lru_cache(1_000)  # a tensor's class has 800 members, and epochs may be short
def _slots(kind: type) -> list[str]:
    """The attributes that `__slots__` of a class and of its bases name."""
    return [
        name
        for base in kind.__mro__
        for name, member in list(vars(base).items())
        if isinstance(member, types.MemberDescriptorType)
    ]
