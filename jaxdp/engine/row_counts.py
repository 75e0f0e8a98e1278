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

    def placed(
        self, groups: Sequence[Group], step: Callable[..., Any]
    ) -> Sequence[Group]:
        """`groups` as `step` takes them last, with arrays that others may share."""
        placed = self._placed.get(step)
        if placed is None:
            placed = self._placed[step] = {}
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
