"""A program: a step compiled for batches of one shape."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from ..distributed import make_global_array
from ..step import Group

_MAX_COUNTS: Final = 128
"""Row counts on the devices per program. Only batches of all sizes have more."""


class PlacedBatches(NamedTuple):
    """Batches as the last argument of a program."""

    groups: Any
    nbytes: int
    """Bytes on a device before the step; 0 if the call itself moves them there."""


class Program:
    """A step compiled for batches of one shape, and the transfer of such batches to it.

    `CompiledStep.programs` keeps all programs.

    Attributes:
        compiled: a `jax.stages.Compiled`, or the jitted step if JAX debugs it.
        num_steps: the number of optimizer steps of a call.
        groups: the shapes of the batches of all processes, padding included.
        donates: whether it may overwrite the state that it gets.
        is_compiled: whether it is a `jax.stages.Compiled`, which has shardings.
        jaxpr: the traced step, which plans read; None if JAX debugs the step.
        may_raise: whether it calls Python that may raise, so that each call is waited
            for before its results are used.
        checks_targets: whether the labels or weights of batches are checked.
        num_classes: the number of classes that labels may have; None for no labels.
        compile_seconds: the time to trace and compile it.
    """

    jaxpr: Any = None
    may_raise = checks_targets = False
    num_classes: int | None = None
    compile_seconds = 0.0

    def __init__(self, compiled: Any, num_steps: int, groups: list[Group], donate: str):
        self.compiled, self.num_steps, self.groups = compiled, num_steps, groups
        self.donates = donate != "none"
        self.is_compiled = isinstance(compiled, jax.stages.Compiled)
        # A step that overwrites its batches overwrites their counts, so the next step
        # can't reuse these.
        self._reuses_counts = self.is_compiled and donate != "all"
        self._shardings: list[Any] | None = None  # of the groups' leaves
        self._counts: dict[int, tuple[np.ndarray, Any]] = {}

    def reuse_counts(self, groups: Any) -> Any:
        """Returns the groups with their row counts as arrays on the devices.

        Most batches have the rows of an earlier one, and an array of the host is sent
        to each device separately: 50 us for four bytes on eight devices.
        """
        if not self._reuses_counts:
            return groups
        known, placed = self._counts, []
        for batch, counts, whole in groups:
            if type(counts) is np.ndarray:  # the packer has one array for equal counts
                _, counts = known.get(id(counts)) or self._put_counts(counts)
            placed.append(Group(batch, counts, whole))
        return placed

    def _put_counts(self, counts: np.ndarray) -> tuple[np.ndarray, Any]:
        if len(self._counts) > _MAX_COUNTS:
            self._counts.clear()
        *_, (group, *_) = self.compiled.input_shardings[0]  # all groups share them
        # A prediction does not use the counts, and so has no sharding for them.
        is_used = group.counts is not None
        placed = make_global_array(counts, group.counts) if is_used else counts
        # The entry refers to the array, so no other array can have its id.
        self._counts[id(counts)] = counts, placed
        return counts, placed

    def transfer(self, groups: Sequence[Group], *, include_numpy: bool) -> list[Group]:
        """Returns the groups with JAX's arrays in the program's shardings, and with
        NumPy's arrays if `include_numpy`.

        Does not copy an array that already has its sharding. Does not wait for the
        device.
        """
        leaves, treedef = jax.tree.flatten(groups)
        shardings = self._shardings
        if shardings is None:
            *_, of_groups = self.compiled.input_shardings[0]
            shardings = self._shardings = treedef.flatten_up_to(of_groups)
        # An argument that the step does not use has no sharding. The strategy has
        # placed arrays that span processes.
        indices = [
            i
            for i, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True))
            if sharding is not None
            and getattr(leaf, "is_fully_addressable", include_numpy)
        ]
        arrays = jax.device_put(
            [leaves[i] for i in indices], [shardings[i] for i in indices]
        )
        for i, array in zip(indices, arrays, strict=True):
            leaves[i] = array
        return treedef.unflatten(leaves)
