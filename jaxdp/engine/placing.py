"""How batches come to the devices, and what of them stays: counts and tables."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np
from jaxtyping import Array

from ..basics.console import say
from ..data import (
    Dispatch,
    Packer,
    Placed,
    check_targets,
    targeted,
    without_ignored,
)
from ..distributed import RowBlocks, put
from ..step import CriterionObjective, Facts, Group, Table
from ..strategies import DataParallel
from .in_flight import Check
from .programs import Kind, Program, Programs

_MOST_COUNTS: Final = 128
"""Of one program that are kept; there are more only if batches have all sizes."""


_LAYOUTS: Final[weakref.WeakKeyDictionary[Any, list[Any]]] = weakref.WeakKeyDictionary()
"""How steps take the leaves of their groups, in order."""


class Placing:
    """Checks the batches of dispatches, and puts them where their steps take them.

    Args:
        strategy: of the steps.
        programs: the steps.
        packers: of the batches, by the kind of step.
        blocks: which rows are this process's.

    Attributes:
        puts_ahead: whether the next dispatch is put on the devices before the present
            one is launched. The engine says so where they are no CPUs: to these the
            compiled call itself brings what is on the host, sooner. A test on CPUs may
            set it.
        sizes_taken: the padded sizes of batches that were past all checks, by kind.
    """

    def __init__(
        self,
        strategy: DataParallel,
        programs: Programs,
        packers: Mapping[Kind, Packer],
        blocks: RowBlocks,
    ):
        self.puts_ahead = False
        self.sizes_taken: dict[Kind, Mapping[str, int]] = {kind: {} for kind in packers}
        self._strategy, self._programs = strategy, programs
        self._packers, self._blocks = packers, blocks
        self._counts = Counts()

    def put(self, kind: Kind, dispatch: Dispatch) -> Dispatch:
        """The same with its batches on the way to the devices, if its step is known.

        What is wrong with them is told when their turn comes.
        """
        compiled = self._programs.find(kind, dispatch)
        if not isinstance(compiled, jax.stages.Compiled):
            return dispatch
        try:
            return dispatch._replace(placed=self.placed(kind, dispatch, compiled))
        except ValueError:
            return dispatch

    def placed(self, kind: Kind, dispatch: Dispatch, compiled: Program) -> Placed:
        """The batches of a dispatch, checked, as its step takes them."""
        if dispatch.placed is not None and dispatch.placed.step is compiled:
            return dispatch.placed
        checks = self.check_targets(kind, dispatch)
        if kind == "train" and (facts := self._programs.facts[kind]).weighted:
            dispatch = self._without_ignored(dispatch, facts)  # nothing to do for most
        if self.sizes_taken[kind] != (sizes := self._packers[kind].forms.sizes):
            self.sizes_taken[kind] = dict(sizes)
        groups = self._strategy.place_batch(dispatch.groups, split=dispatch.split)
        # What a step may overwrite is not there for the next one, and a strategy of the
        # user's may return any callable, and counts of its own.
        if isinstance(compiled, jax.stages.Compiled):
            is_shared = self._programs.options.donate != "all"
            if is_shared and type(groups[0].counts) is np.ndarray:
                groups = self._counts.placed(groups, compiled)
            if self.puts_ahead or dispatch.are_there:
                groups = _moved(groups, compiled, all_of_them=self.puts_ahead)
        nbytes = 0
        if self.puts_ahead:
            nbytes = self.bytes_per_device(dispatch)
        return Placed(compiled, groups, nbytes, checks)

    def bytes_per_device(self, dispatch: Dispatch) -> int:
        """Bytes of the rows that a device has of a dispatch."""
        shards = self._strategy.num_shards * len(self._blocks.own) // self._blocks.count
        return dispatch.nbytes // (max(1, shards) if dispatch.split else 1)

    def check_targets(self, kind: Kind, dispatch: Dispatch) -> tuple[Check, ...]:
        """Raises for wrong targets on the host; gives what checks those on devices."""
        facts = self._programs.facts_of.get((kind, dispatch.forms))
        objective = self._programs.steps.objective
        if facts is None or not isinstance(objective, CriterionObjective):
            return ()
        classes = facts.num_classes
        try:
            checks = [
                check_targets(targeted(group, classes), classes)
                for group in dispatch.groups
            ]
        except ValueError:
            self.unpad(kind)
            raise
        return tuple([check for check in checks if check is not None])

    def unpad(self, kind: Kind) -> None:
        """No batch is padded to the size of one that is refused."""
        if self._blocks.count == 1:  # several processes must stay of one mind
            self._packers[kind].forms.start_from(self.sizes_taken[kind])

    def _without_ignored(self, dispatch: Dispatch, facts: Facts) -> Dispatch:
        """The same with copies of real rows in the place of those of weight 0."""
        objective = self._programs.steps.objective
        if not isinstance(objective, CriterionObjective):
            return dispatch  # only its author knows what in a batch is a weight
        apart = not facts.rows_interact
        groups = [
            group._replace(
                batch=without_ignored(group.batch, apart, objective.is_named)
            )
            for group in dispatch.groups
        ]
        return dispatch._replace(groups=groups)


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


def _moved(
    groups: Sequence[Group], step: jax.stages.Compiled, *, all_of_them: bool
) -> Sequence[Group]:
    """`groups` with JAX's arrays as `step` takes them; NumPy's too, if `all_of_them`.

    What is there already, and so laid out, is not copied. Nothing waits for the device.
    """
    flat = [jax.tree.flatten(_of_batches(group)) for group in groups]
    if step not in _LAYOUTS:
        positional, _ = step.input_shardings
        _LAYOUTS[step] = [
            treedef.flatten_up_to(_of_batches(layout))
            for (_, treedef), layout in zip(flat, positional[-1], strict=True)
        ]
    there = []
    for group, (leaves, treedef), layouts in zip(
        groups, flat, _LAYOUTS[step], strict=True
    ):
        # None is the layout of what the step has no use for; and what spans processes
        # was placed by the strategy.
        places = [
            place
            for place, (leaf, layout) in enumerate(zip(leaves, layouts, strict=True))
            if layout is not None and getattr(leaf, "is_fully_addressable", all_of_them)
        ]
        arrays = [leaves[place] for place in places]
        arrays = jax.device_put(arrays, [layouts[place] for place in places])
        for place, array in zip(places, arrays, strict=True):
            leaves[place] = array
        batch, whole = treedef.unflatten(leaves)
        whole = group.whole if whole is None else whole
        there.append(group._replace(batch=batch, whole=whole))
    return there


def _of_batches(group: Group) -> tuple[Any, Any]:
    """What of a group comes with every batch."""
    return group.batch, None if type(group.whole) is Table else group.whole


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
