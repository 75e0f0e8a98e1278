"""From a traced step to the program that runs: compiled once in a process.

A second trainer often wants the same programs: a trainer for each seed, or each fold.
JAX's cache has them on disk, if it is on.
"""

import collections
import hashlib
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import NamedSharding

from ..step import CallsPython, calls_python
from .xla_options import options_for

_MOST: Final = 8
_LONGEST: Final = 2**24
"""How many programs stay that nobody uses any more, and how long their text may be,
which contains their constants."""

_used: Final[weakref.WeakValueDictionary[Hashable, Any]] = weakref.WeakValueDictionary()
_recent: Final[collections.deque[Any]] = collections.deque(maxlen=_MOST)


def compiled(
    traced: Any,
    arguments: tuple[Any, ...],
    options: Mapping[str, Any],
    instead: dict[str, Any] | None = None,
) -> tuple[jax.stages.Compiled, str]:
    """The program of a traced step, and with several processes a digest of its text.

    Args:
        traced: what `trace` of a jitted step has returned.
        arguments: what it was traced for.
        options: the user's, of XLA.
        instead: options in the place of those that are fast on the hardware.

    Raises:
        CallsPython: if the program calls Python that may raise. An error that
            leaves it would strand the other devices (with several faked ones, jax
            0.10.2 aborts the process), so the engine takes one device.
    """
    is_to_run = any(isinstance(x, jax.Array) for x in jax.tree.leaves(arguments))
    if is_to_run and jax.process_count() == 1 and calls_python(traced.jaxpr):
        raise CallsPython("a step calls Python that may raise")
    options = options_for(traced.jaxpr, arguments, instead, options)
    lowered = traced.lower()
    if jax.process_count() > 1:
        text = lowered.as_text().encode()
        digest = hashlib.blake2b(text, digest_size=6).hexdigest()
        return lowered.compile(dict(options)), digest

    key = _key(traced, lowered, options, _devices_of(arguments))
    program = None if key is None else _used.get(key[1:])
    if program is None:
        program = lowered.compile(dict(options))
    if key is not None:
        length, *rest = key
        _used[tuple(rest)] = program
        if length <= _LONGEST and program not in _recent:
            _recent.append(program)
    return program, ""


def _key(
    traced: Any, lowered: Any, options: Mapping[str, Any], devices: Sequence[Any]
) -> tuple[Any, ...] | None:
    """The length of a program's text, and what makes it the program it is.

    None where that is not known: a program with effects calls Python, such as
    `jax.debug.print`, and its text does not tell which functions.
    """
    if traced.jaxpr.effects:
        return None
    text = lowered.as_text().encode()
    try:
        # Which arguments it has, of those it is given; the others are not in the text,
        # but checked by each call.
        kept = tuple(sorted(lowered._lowering.compile_args["kept_var_idx"]))
        kept = kept, *map(str, jax.tree.leaves(lowered.in_avals))
        trees = lowered.in_tree, lowered.out_tree
        hash(trees)
    except (AttributeError, KeyError, TypeError):
        return None
    chosen = tuple(sorted((name, str(value)) for name, value in options.items()))
    return len(text), hashlib.sha256(text).digest(), kept, trees, chosen, tuple(devices)


def _devices_of(arguments: tuple[Any, ...]) -> list[Any]:
    """What a program runs on that takes these, in its order."""
    leaves = jax.tree.leaves(arguments)
    sharding = next(leaf.sharding for leaf in leaves if hasattr(leaf, "sharding"))
    if isinstance(sharding, NamedSharding):
        return np.asarray(sharding.mesh.devices).ravel().tolist()
    return sorted(sharding.device_set, key=lambda device: device.id)
