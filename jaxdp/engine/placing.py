"""How batches come to the devices, and when."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ..data import (
    Dispatch,
    Placed,
    check_targets,
    targeted,
    without_ignored,
)
from ..distributed import RowBlocks
from ..step import CriterionObjective, Facts, Group, Objective, Table
from ..strategies import DataParallel
from .in_flight import Check
from .step import Kind, Program, Step


class Placing:
    """Checks the batches of dispatches, and puts them where their steps take them.

    Args:
        strategy: of the steps.
        steps: by their kinds.
        blocks: which rows are this process's.
        objective: gives the present one.

    Attributes:
        puts_ahead: whether the next dispatch is put on the devices before the present
            one is launched. The engine says so where they are no CPUs: to these the
            compiled call itself brings what is on the host, sooner. A test on CPUs may
            set it.
    """

    def __init__(
        self,
        strategy: DataParallel,
        steps: Mapping[Kind, Step],
        blocks: RowBlocks,
        objective: Callable[[], Objective | None],
    ):
        self.puts_ahead = False
        self._strategy, self._steps, self._blocks = strategy, steps, blocks
        self._objective = objective

    def put(self, kind: Kind, dispatch: Dispatch) -> Dispatch:
        """The same with its batches on the way to the devices, if its step is known.

        What is wrong with them is told when their turn comes.
        """
        program = self._steps[kind].programs.get(dispatch.shape)
        if program is None or not isinstance(program.compiled, jax.stages.Compiled):
            return dispatch
        try:
            return dispatch._replace(placed=self.placed(kind, dispatch, program))
        except ValueError:
            return dispatch

    def placed(self, kind: Kind, dispatch: Dispatch, program: Program) -> Placed:
        """The batches of a dispatch, checked, as its step takes them."""
        if dispatch.placed is not None and dispatch.placed.step is program:
            return dispatch.placed
        step = self._steps[kind]
        checks = self.check_targets(kind, dispatch)
        if kind == "train" and step.facts.weighted:
            dispatch = self._without_ignored(dispatch, step.facts)
        step.packer.forms.keep_sizes()
        groups = self._strategy.place_batch(dispatch.groups, split=dispatch.split)
        if isinstance(program.compiled, jax.stages.Compiled):
            groups = program.with_kept(groups, step.tell)
            if self.puts_ahead or dispatch.are_there:
                groups = _moved(groups, program, all_of_them=self.puts_ahead)
        nbytes = 0
        if self.puts_ahead:
            nbytes = self.bytes_per_device(dispatch)
        return Placed(program, groups, nbytes, checks)

    def bytes_per_device(self, dispatch: Dispatch) -> int:
        """Bytes of the rows that a device has of a dispatch."""
        shards = self._strategy.num_shards * len(self._blocks.own) // self._blocks.count
        return dispatch.nbytes // (max(1, shards) if dispatch.split else 1)

    def check_targets(self, kind: Kind, dispatch: Dispatch) -> tuple[Check, ...]:
        """Raises for wrong targets on the host; gives what checks those on devices."""
        facts = self._steps[kind].facts_of.get(dispatch.forms)
        if facts is None or not isinstance(self._objective(), CriterionObjective):
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
        return tuple(filter(None, checks))

    def unpad(self, kind: Kind) -> None:
        """No batch is padded to the size of one that is refused."""
        if self._blocks.count == 1:  # several processes must stay of one mind
            self._steps[kind].packer.forms.refuse()

    def _without_ignored(self, dispatch: Dispatch, facts: Facts) -> Dispatch:
        """The same with copies of real rows in the place of those of weight 0."""
        objective = self._objective()
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


def _moved(
    groups: Sequence[Group], program: Program, *, all_of_them: bool
) -> Sequence[Group]:
    """`groups` with JAX's arrays as `step` takes them; NumPy's too, if `all_of_them`.

    What is there already, and so laid out, is not copied. Nothing waits for the device.
    """
    flat = [jax.tree.flatten(_of_batches(group)) for group in groups]
    if program.layouts is None:
        positional, _ = program.compiled.input_shardings
        program.layouts = [
            treedef.flatten_up_to(_of_batches(layout))
            for (_, treedef), layout in zip(flat, positional[-1], strict=True)
        ]
    there = []
    for group, (leaves, treedef), layouts in zip(
        groups, flat, program.layouts, strict=True
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
