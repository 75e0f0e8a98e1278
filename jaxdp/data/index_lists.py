"""Whether a sampler gives the index lists after a resume that it would have given.

A checkpoint has what a sampler's `generator` of torch and its `state_dict` say. It may
draw from something else: a generator of NumPy, a module's, an iterator. Then a resumed
run would train on other rows, and nobody would know. So its index lists are noted.
"""

import collections
import operator
import zlib
from collections.abc import Iterator
from typing import Any, Final

from ..basics.console import warn

_INDICES: Final = 64
"""Of a list; more cost more, and tell no more."""
_KEPT: Final = 10_000
"""Notes of lists that are ahead of the steps, at most."""


class IndexLists:
    """What a sampler gave in an epoch, for a later process to compare with."""

    def __init__(self, argument: str, sampler: str):
        self._argument = argument
        self._sampler = sampler
        self._notes: collections.deque[int | None] = collections.deque(maxlen=_KEPT)
        self._count = 0  # of lists that this epoch has given

    def note(self, count: int) -> int | None:
        """What tells the first `count` lists of this epoch, if that is known."""
        place = count - 1 - self._count + len(self._notes)
        return self._notes[place] if 0 <= place < len(self._notes) else None

    def noted(self, lists: Iterator[Any], expected: list[int] | None) -> Iterator[Any]:
        """The lists of an epoch from its start, as they come.

        An earlier process `expected` so many of them to have such a `note`.
        """
        self._notes.clear()
        self._count, total = 0, 0
        for indices in lists:
            # An index list may be an iterator, or one index.
            if hasattr(indices, "__next__"):
                indices = [*indices]
            total = _noted(indices, total)
            self._count += 1
            self._notes.append(total)
            if expected is not None and self._count == expected[0]:
                if total not in (None, expected[1]):
                    self._warn()
            yield indices

    def _warn(self) -> None:
        warn(
            f"`{self._argument}`: after the resume, its sampler {self._sampler}"
            " yields other index lists than the interrupted run would have seen,"
            " so some rows come twice and others not at all. It draws from a"
            " generator that no checkpoint contains, such as one of NumPy, or in a"
            " module. Make it a torch.Generator that is the sampler's attribute"
            " `generator`, or give the sampler `state_dict` and `load_state_dict`, or"
            " a `set_epoch` that seeds it."
        )


def _noted(indices: Any, total: int | None) -> int | None:
    """The checksum `total` with an index list or one index; None if that has none."""
    if total is None:
        return None
    try:
        is_list = hasattr(indices, "__getitem__") and not isinstance(indices, str)
        is_list = is_list and getattr(indices, "ndim", 1)
        shown = [*map(_index, indices[:_INDICES])] if is_list else _index(indices)
    except (TypeError, ValueError, RuntimeError, KeyError):
        return None
    return zlib.crc32(repr(shown).encode(), total)


def _index(value: Any) -> int | str:
    return value if type(value) is str else operator.index(value)
