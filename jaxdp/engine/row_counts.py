"""What of batches the devices keep: row counts, and the arrays that rows are of."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
from jaxtyping import Array

from ..basics.console import say
from ..distributed import put
from ..step import Group, Table

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
        self._told: set[int] = set()  # of tables of so many bytes

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
        counted = []
        for place, group in enumerate(groups):
            counts = group.counts
            key = place, counts.tobytes()
            if key not in placed:
                positional, _ = step.input_shardings
                sharding = positional[-1][place].counts
                # None where the step has no use for them, as prediction has not.
                placed[key] = counts if sharding is None else put(counts, sharding)
            whole = group.whole
            if type(whole) is Table:
                self._tell(whole)
                whole = _on_devices(whole, step, place)
            counted.append(Group(group.batch, placed[key], whole))
        return counted

    def _tell(self, table: Table) -> None:
        """Says once of tables of a size that they are kept, not of each in a loop."""
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(table.tree))
        if not table.placed and size not in self._told:
            self._told.add(size)
            say(
                f"`jaxdp.Arrays`: {size / 1e6:.3g} MB are kept on each device, where"
                " the steps take their rows; on_device=False leaves them on the host"
            )


def _on_devices(table: Table, step: Callable[..., Any], place: int) -> Table:
    """A table as `step` takes it, placed once for all steps that take it so."""
    known = table.placed.setdefault("steps", weakref.WeakKeyDictionary())
    if step not in known:
        positional, _ = step.input_shardings  # pyright: ignore
        layouts = positional[-1][place].whole
        leaves, treedef = jax.tree.flatten(table.tree)
        placed = []
        for number, leaf in enumerate(leaves):
            sharding = jax.tree.leaves(layouts, is_leaf=lambda x: x is None)[number]
            if sharding is not None and (number, sharding) not in table.placed:
                table.placed[number, sharding] = put(leaf, sharding)
            placed.append(table.placed.get((number, sharding), leaf))
        known[step] = Table(treedef.unflatten(placed))
    return known[step]
