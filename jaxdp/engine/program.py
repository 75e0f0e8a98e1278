"""A compiled step, and what of its arguments stays on the devices between calls."""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import numpy as np
from jaxtyping import Array

from ..data import Dispatch
from ..distributed import put
from ..step import Group, Products, Table

_MOST_COUNTS: Final = 128
"""Of one program that are kept; there are more only if batches have all sizes."""


class Program:
    """A step compiled for batches of one form.

    Attributes:
        compiled: what runs: a `jax.stages.Compiled`, unless a user's strategy has made
            it.
        steps: how many optimizer steps a call takes. Rows and micro-batches are those
            of all of them, padding included.
        is_known: whether it is a `jax.stages.Compiled`, which tells its layouts.
        donated: whether it may overwrite the state that it is given.
        products: matrix operations of all devices, as traced; None if a part can't be
            counted, or another function has compiled it.
        ends: the function, as `last_function` names it, that its model should not end
            with.
        compile_seconds: what it took to compile, and to trace if that is not known.
        trace_seconds: what it took to trace.
    """

    products: Products | None = None
    ends: str | None = None
    trace_seconds: float | None = None
    compile_seconds = 0.0

    def __init__(
        self, compiled: Any, dispatch: Dispatch, groups: list[Group], donate: str
    ):
        self.compiled = compiled
        self.steps, self.rows = len(dispatch.rows), rows_in(groups)
        self.micro_batches = sum(len(group.counts) for group in groups)
        self.donated = donate != "none"
        # What a step may overwrite is not there for the next one, and a strategy of the
        # user's may return any callable, and counts of its own.
        self.is_known = isinstance(compiled, jax.stages.Compiled)
        self._keeps = self.is_known and donate != "all"
        self._layouts: list[Any] | None = None  # of the leaves of groups, in order
        self._counts: dict[Any, Array] = {}
        self._last_counts: tuple[Any, Any] = (None, None)  # of the call before

    def with_kept(self, groups: Any, tell: Callable[[str], None]) -> Any:
        """`groups` with what of them stays on the devices: row counts, and tables.

        Most batches have as many rows as one before, and what comes from the host is
        sent to each device by itself: 50 us for four bytes on eight of them.
        """
        group, *others = groups
        before, placed = self._last_counts
        if group.counts is before and group.whole is None and not others:
            return [Group(group.batch, placed, None)]
        if not self._keeps or type(group.counts) is not np.ndarray:
            return groups
        kept = self._counts
        if len(kept) > _MOST_COUNTS:
            kept.clear()
        counted = []
        for place, group in enumerate(groups):
            counts, whole = group.counts, group.whole
            key = place, counts.tobytes()
            if key not in kept:
                sharding = self._shardings(place).counts
                # None where the step has no use for them, as prediction has not.
                kept[key] = counts if sharding is None else put(counts, sharding)
            if type(whole) is Table:
                if not whole.placed:
                    tell(_kept(whole))
                whole = self._placed(whole, place)
            counted.append(Group(group.batch, kept[key], whole))
            self._last_counts = counts, kept[key]
        return counted

    def moved(self, groups: Sequence[Group], *, all_of_them: bool) -> Sequence[Group]:
        """`groups` with JAX's arrays as it takes them; NumPy's too, if `all_of_them`.

        What is there already, and so laid out, is not copied. Nothing waits for the
        device.
        """
        flat = [jax.tree.flatten(_of_batches(group)) for group in groups]
        if self._layouts is None:
            positional, _ = self.compiled.input_shardings
            self._layouts = [
                treedef.flatten_up_to(_of_batches(layout))
                for (_, treedef), layout in zip(flat, positional[-1], strict=True)
            ]
        there = []
        for group, (leaves, treedef), layouts in zip(
            groups, flat, self._layouts, strict=True
        ):
            # None is the layout of what the step has no use for; and what spans
            # processes was placed by the strategy.
            places = [
                place
                for place, (leaf, layout) in enumerate(
                    zip(leaves, layouts, strict=True)
                )
                if layout is not None
                and getattr(leaf, "is_fully_addressable", all_of_them)
            ]
            arrays = [leaves[place] for place in places]
            arrays = jax.device_put(arrays, [layouts[place] for place in places])
            for place, array in zip(places, arrays, strict=True):
                leaves[place] = array
            batch, whole = treedef.unflatten(leaves)
            whole = group.whole if whole is None else whole
            there.append(group._replace(batch=batch, whole=whole))
        return there

    def _placed(self, table: Table, place: int) -> Table:
        """A table as this program takes it, placed once for all that take it so."""
        known = table.placed.setdefault("programs", weakref.WeakKeyDictionary())
        if self not in known:
            layouts = self._shardings(place).whole
            layouts = jax.tree.leaves(layouts, is_leaf=lambda x: x is None)
            leaves, treedef = jax.tree.flatten(table.tree)
            placed = []
            for number, (leaf, sharding) in enumerate(
                zip(leaves, layouts, strict=True)
            ):
                if sharding is not None and (number, sharding) not in table.placed:
                    table.placed[number, sharding] = put(leaf, sharding)
                placed.append(table.placed.get((number, sharding), leaf))
            known[self] = Table(treedef.unflatten(placed))
        return known[self]

    def _shardings(self, place: int) -> Group:
        positional, _ = self.compiled.input_shardings
        return positional[-1][place]


def _kept(table: Table) -> str:
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(table.tree))
    return (
        f"`jaxdp.Arrays`: {size / 1e6:.3g} MB are kept on each device, where"
        " the steps take their rows; on_device=False leaves them on the host"
    )


def _of_batches(group: Group) -> tuple[Any, Any]:
    """What of a group comes with every batch."""
    return group.batch, None if type(group.whole) is Table else group.whole


def rows_in(groups: list[Group]) -> int:
    """All rows of the micro-batches, padding included."""
    return sum(math.prod(jax.tree.leaves(group.batch)[0].shape[:2]) for group in groups)
