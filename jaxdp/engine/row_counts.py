"""Row counts that the devices keep."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

from jaxtyping import Array

from ..distributed import put
from ..step import Group

_MOST_COUNTS: Final = 128
"""Of one program that are kept; there are more only if batches have all sizes."""


class Counts:
    """How many rows of a batch are real, kept on the devices.

    Most batches have as many as one before, and what comes from the host is sent to
    each device by itself: 50 us for four bytes on eight of them.
    """

    def __init__(self) -> None:
        # Of programs that are gone, nothing stays.
        self._placed: weakref.WeakKeyDictionary[Any, dict[Any, Array]] = (
            weakref.WeakKeyDictionary()
        )
        self._last: Callable[[], Any] = lambda: None  # step, most often the next one
        self._of_last: dict[Any, Array] = {}

    def placed(
        self, groups: Sequence[Group], step: Callable[..., Any]
    ) -> Sequence[Group]:
        """`groups` as `step` takes them last, with arrays that others may share."""
        if self._last() is not step:
            self._last = weakref.ref(step)
            self._of_last = self._placed.setdefault(step, {})
        placed = self._of_last
        if len(placed) > _MOST_COUNTS:
            placed.clear()
        found = []
        for place, group in enumerate(groups):
            counts = group.counts
            key = place, counts.tobytes()
            if key not in placed:
                positional, _ = step.input_shardings
                sharding = positional[-1][place].counts
                # None where the step has no use for them, as prediction has not.
                placed[key] = counts if sharding is None else put(counts, sharding)
            found.append(Group(group.batch, placed[key], group.whole))
        return found
