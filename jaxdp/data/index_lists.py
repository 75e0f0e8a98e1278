"""Whether a sampler gives the index lists after a resume that it would have given.

A checkpoint has what a sampler's generators and its `state_dict` say. A sampler may
draw from something else: a global of a module, a closure, an iterator. Then a resumed
run would train on other rows, and nobody would know. So its index lists are noted.
"""

import collections
import operator
import zlib
from collections.abc import Iterator
from typing import Any, Final

from ..basics.console import warn

_FIRST: Final = 4
"""Lists that tell the order of one epoch from that of another."""
_INDICES: Final = 64
"""Of a list; more cost more, and tell no more."""
_KEPT: Final = 10_000
"""Notes of lists that are ahead of the steps, at most."""


def check(noted: Any) -> None:
    """Raises a ValueError unless this may be a state or a note of index lists."""
    is_pair = isinstance(noted, list) and len(noted) == 2
    if not is_pair or any(not isinstance(each, int | None) for each in noted):
        raise ValueError("notes of index lists must be a pair of numbers.")


class IndexLists:
    """What a sampler gave, for a later process to compare with.

    Args:
        argument: how the user calls the loader, for messages.
        sampler: by its class, for messages.
    """

    def __init__(self, argument: str, sampler: str):
        self._argument = argument
        self._sampler = sampler
        self._notes: collections.deque[int | None] = collections.deque(maxlen=_KEPT)
        self._count = 0  # of lists that this epoch has given
        self._first: int | None = None  # of the run's first epoch
        self._vary = False  # from epoch to epoch
        self._is_resumed = self._began_again = self._has_warned = False

    def state_dict(self) -> list[Any]:
        """What to compare the next epochs with; JSON."""
        return [self._first, self._vary]

    def load_state_dict(self, state: list[Any]) -> None:
        """Another process noted `state`, after which an epoch is to begin."""
        self._first, self._vary = state
        self._is_resumed = True

    def note(self, count: int) -> int | None:
        """What tells the first `count` lists of this epoch, if that is known."""
        place = count - 1 - self._count + len(self._notes)
        return self._notes[place] if 0 <= place < len(self._notes) else None

    def noted(self, lists: Iterator[Any], expected: list[int] | None) -> Iterator[Any]:
        """The lists of an epoch from its start, as they come.

        Args:
            lists: what the sampler gives.
            expected: how many of them an earlier process had, and its `note` of them.
        """
        self._notes.clear()
        self._count, total = 0, 0
        for each in lists:
            # An index list may be an iterator, or one index.
            if hasattr(each, "__next__"):
                each = [*each]
            total = _noted(each, total)
            self._count += 1
            self._notes.append(total)
            if self._count == _FIRST:
                self._compare(total)
            if expected is not None and self._count == expected[0]:
                if total not in (None, expected[1]):
                    self._warn(is_sure=True)
            yield each
        if self._count < _FIRST:
            self._compare(total)

    def _compare(self, order: int | None) -> None:
        """The order of this epoch is known now, or will not be."""
        if order is None:
            return
        if self._first is None:
            self._first = order
        elif order != self._first:
            self._vary = True
        elif self._is_resumed:
            # As in a process that has just begun: right only if all epochs are alike.
            self._began_again = True
        self._is_resumed = False
        if self._began_again and self._vary:
            self._warn(is_sure=False)

    def _warn(self, is_sure: bool) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        if is_sure:
            what = (
                f"since the run was resumed, its sampler {self._sampler} gives other"
                " index lists than it would have given, so some rows come twice and"
                " others not at all. It draws from"
            )
        else:
            what = (
                f"its sampler {self._sampler} began the resumed run with the index"
                " lists of the very first epoch, and others followed. If it is not"
                " meant to repeat that order, it may have lost its place, so that some"
                " rows come twice and others not at all: it may draw from"
            )
        warn(
            f"`{self._argument}`: {what} what no checkpoint has, such as a generator"
            " of a module, a closure or an iterator. Make that generator an attribute"
            " of the sampler (torch.Generator, np.random.Generator, random.Random), or"
            " give it `state_dict` and `load_state_dict`, or a `set_epoch` that seeds"
            " it.",
            stacklevel=2,
        )


def _noted(indices: Any, total: int | None) -> int | None:
    """The checksum `total` with an index list or one index; None if that has none.

    What an index shows of itself may be an address, or take long.
    """
    if total is None:
        return None
    try:
        if hasattr(indices, "__getitem__") and not isinstance(indices, str):
            try:
                shown: Any = [_index(each) for each in indices[:_INDICES]]
            except IndexError:  # an array of no dimensions
                shown = _index(indices)
        else:
            shown = _index(indices)
    except (TypeError, ValueError, RuntimeError, KeyError):
        return None
    return zlib.crc32(repr(shown).encode(), total)


def _index(value: Any) -> int | str:
    return value if type(value) is str else operator.index(value)
