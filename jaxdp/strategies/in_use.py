"""Programs in use, so that one that is wanted again is not compiled again.

A second trainer often wants the same ones: a trainer for each seed, or each fold. JAX's
cache has them on disk, if it is on.
"""

import collections
import hashlib
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final

import jax

_MOST: Final = 8
_LONGEST: Final = 2**24
"""How many programs stay that nobody uses any more, and how long their text may be,
which contains their constants."""

_used: Final[weakref.WeakValueDictionary[Hashable, Any]] = weakref.WeakValueDictionary()
_recent: Final[collections.deque[Any]] = collections.deque(maxlen=_MOST)


def compiled_once(
    traced: Any, lowered: Any, options: Mapping[str, Any], devices: Sequence[Any]
) -> jax.stages.Compiled:
    """`lowered.compile(options)`, or the same program if this process has it."""
    key = _key(traced, lowered, options, devices)
    compiled = None if key is None else _used.get(key[1:])
    if compiled is None:
        compiled = lowered.compile(dict(options))
    if key is None:
        return compiled
    length, *rest = key
    _used[tuple(rest)] = compiled
    if length <= _LONGEST and compiled not in _recent:
        _recent.append(compiled)
    return compiled


def _key(
    traced: Any, lowered: Any, options: Mapping[str, Any], devices: Sequence[Any]
) -> tuple[Any, ...] | None:
    """The length of a program's text, and what makes it the program it is.

    None where that is not known: a program with effects calls Python, such as
    `jax.debug.print`, and its text does not tell which functions. The programs of
    several processes are compiled by all or by none.
    """
    if traced.jaxpr.effects or jax.process_count() > 1:
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
