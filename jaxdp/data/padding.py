"""Host batches stacked and padded to what the compiled step takes."""

import functools
import itertools
import math
from collections.abc import Callable, Hashable
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from ..distributed import RowBlocks
from ..step import Batch, Group
from .batches import Portion, counts_of, leaf_name, shown

_ONE_BLOCK: Final = RowBlocks()

_Leaves = list[np.ndarray]
_Counts = tuple[int, ...]
"""How many real rows each block of a batch has."""


class Dispatch(NamedTuple):
    """The batches that one call of a compiled step works on, as it takes them."""

    windows: list[list[Batch]]
    """The batches of each optimizer step, as they came."""
    groups: list[Group]
    split: bool
    """Whether rows are split over the devices, or the batch is whole on each."""
    rows: list[int]
    """How many real rows each optimizer step has. Several steps are one group."""
    shape: Hashable
    """What a compiled step depends on: the split, the steps, each group's sizes."""


class Packer:
    """Stacks and pads batches so that one compiled shape serves them all.

    Where rows are independent, every block of a short batch is padded to the size of
    the largest seen, with copies of its own first row (zeros or NaN could poison
    gradients). Where rows interact, batches keep their size, and one that the devices
    do not divide is worked on whole by each of them.

    Sizes are rounded up to a multiple of `num_shards`. If portions fill the blocks
    `in_order`, all padding is at the end, and the compiled step is that of one process.
    All processes call `collect`: from leaves `(micro_batches, rows of own blocks, ...)`
    to the same with the rows of all blocks.
    """

    def __init__(
        self,
        num_shards: int,
        what: str,
        blocks: RowBlocks = _ONE_BLOCK,
        in_order: bool = True,
        collect: Callable[[_Leaves], _Leaves] = list,
    ):
        self.num_shards = num_shards
        self.what = what
        self.blocks = blocks
        self.rows_interact = False
        self.size = 0  # rows of a padded batch, of all processes
        self._in_order = in_order
        self._collect = collect
        self._full: tuple[int, ...] = ()
        self._usual: Hashable = None
        self._form: tuple[Any, ...] = ()

    def pack(self, windows: list[list[Batch]], slots: int = 1) -> Dispatch:
        """Packs the batches of optimizer steps; see `can_stack` for more than one.

        A step has room for so many batches as there are slots; what the last one leaves
        over holds no real rows. Leaves may differ in their number of rows alone.
        """
        batches = [batch for window in windows for batch in window]
        micros = [self._checked_leaves(shown(batch)) for batch in batches]
        counts = [counts_of(batch) for batch in batches]
        steps = len(windows)
        is_alone = slots == steps == 1
        if is_alone and counts[0] == self._full and not self.rows_interact:
            # Most batches, and as quick as can be: small steps wait for this.
            groups = [self._group(micros, counts)]
            return Dispatch(windows, groups, True, [self.size], self._usual)

        sizes = [sum(each) for each in counts]
        rows = [sum(sizes[step * slots :][:slots]) for step in range(steps)]

        split = True
        if not self.rows_interact:
            micros, counts = self._padded(micros, counts, steps * slots)
            sizes = [self.size] * len(micros)
        elif not all(map(self._fills_shards, counts)):
            split = False
            micros = [self._whole(m, c) for m, c in zip(micros, counts, strict=True)]
            counts = [(size,) for size in sizes]

        groups, shapes, start = [], [], 0
        for size, run in itertools.groupby(sizes):
            stop = start + len(list(run))
            groups.append(self._group(micros[start:stop], counts[start:stop]))
            shapes.append((stop - start, size))
            start = stop
        shape = split, steps, tuple(shapes)
        return Dispatch(windows, groups, split, rows, shape)

    def real_rows(self, leaf: Any, batch: Batch, *, own: bool = False) -> np.ndarray:
        """Values of the rows of a packed `batch` that are no padding, on the host.

        With `own`, those of this process's blocks are enough.
        """
        if not isinstance(batch, Portion):
            return np.asarray(leaf)[: counts_of(batch)[0]]
        each = len(leaf) // self.blocks.count
        blocks = self.blocks.own if own else range(self.blocks.count)
        if own and not leaf.is_fully_replicated:
            shards = {s.index[0].start or 0: s.data for s in leaf.addressable_shards}
            found = np.concatenate([np.asarray(shards[at]) for at in sorted(shards)])
            starts = range(0, len(found), each)
        else:
            found, starts = np.asarray(leaf), [block * each for block in blocks]
        return np.concatenate(
            [
                found[start : start + batch.counts[block]]
                for start, block in zip(starts, blocks, strict=True)
            ]
        )

    def can_stack(self, windows: list[list[Batch]], slots: int) -> bool:
        """Whether steps would be one group, of the sizes that they have one by one."""
        counts = [counts_of(batch) for window in windows for batch in window]
        if self.rows_interact:
            return len({*counts}) == 1 and len(counts) == slots * len(windows)
        # The first step must need as many rows as any after it, or have had more: last
        # bits may depend on the number of padded rows.
        sizes = [max(each) * self.blocks.count for each in counts]
        return max(sizes) <= max(self.size, self._rounded(max(sizes[:slots])))

    def _rounded(self, rows: int) -> int:
        return math.ceil(rows / self.num_shards) * self.num_shards

    def forget(self) -> None:
        """Takes the next batch for the first."""
        self.start_from(0)
        self._form = ()

    def start_from(self, rows: int) -> None:
        """Pads as if this had been the size of the largest batch so far; 0 is none."""
        self.size, self._full, self._usual = 0, (), None
        self.pad_to(rows)

    def pad_to(self, rows: int) -> None:
        """From now on batches get so many rows, or a few more, at least."""
        if rows > self.size:
            self.size = self._rounded(rows)
            self._full = (self.size // self.blocks.count,) * self.blocks.count
            self._usual = (True, 1, ((1, self.size),))

    def _padded(
        self, micros: list[_Leaves], counts: list[_Counts], slots: int
    ) -> tuple[list[_Leaves], list[_Counts]]:
        """All of one size, the largest so far, and so many that all slots are full."""
        self.pad_to(max(map(max, counts)) * self.blocks.count)
        size, missing = self._full[0], slots - len(micros)
        padded = [
            self._with_padding(leaves, each, size)
            for leaves, each in zip(micros, counts, strict=True)
        ]
        # The last is of the step that lacks some: NaN in another's stays there.
        nothing = (0,) * self.blocks.count
        return padded + padded[-1:] * missing, counts + [nothing] * missing

    def _with_padding(self, leaves: _Leaves, counts: _Counts, size: int) -> _Leaves:
        """The rows of this process's blocks, each block padded to `size`."""
        own = [counts[block] for block in self.blocks.own]
        if own == [size] * len(own):
            return leaves
        stops = list(itertools.accumulate(own))

        def padded(leaf: np.ndarray) -> np.ndarray:
            parts = []
            for count, stop in zip(own, stops, strict=True):
                missing = (size - count, *leaf.shape[1:])
                parts.append(leaf[stop - count : stop])
                parts.append(np.broadcast_to(leaf[:1], missing))
            return np.concatenate(parts)

        return [padded(leaf) for leaf in leaves]

    def _fills_shards(self, counts: _Counts) -> bool:
        """Whether blocks of so many rows need no padding."""
        shards = self.num_shards // self.blocks.count
        return len(set(counts)) == 1 and counts[0] % shards == 0

    def _whole(self, leaves: _Leaves, counts: _Counts) -> _Leaves:
        """The real rows of all processes: where rows interact and do not divide."""
        if self.blocks.count == 1:
            return leaves
        shards = self.num_shards // self.blocks.count
        size = math.ceil(max(counts) / shards) * shards
        local = self._with_padding(leaves, counts, size)
        collected = self._collect([leaf[None] for leaf in local])
        starts = range(0, self.blocks.count * size, size)
        real = [slice(s, s + c) for s, c in zip(starts, counts, strict=True)]
        return [np.concatenate([leaf[0, r] for r in real]) for leaf in collected]

    def _group(self, micros: list[_Leaves], counts: list[_Counts]) -> Group:
        """Micro-batches of one size, stacked."""
        if len(micros) == 1:  # no copy
            stacked = [leaf[None] for leaf in micros[0]]
        else:
            stacked = [np.stack(leaves) for leaves in zip(*micros, strict=True)]
        batch = jax.tree.unflatten(self._form[0], stacked)
        return Group(batch, _counts(tuple(counts), self._in_order))

    def _checked_leaves(self, batch: Batch) -> _Leaves:
        """The leaves of a batch that is like the first one but for its rows."""
        leaves, treedef = jax.tree.flatten(batch)
        found = treedef, [(leaf.shape[1:], leaf.dtype) for leaf in leaves]
        if not self._form:
            self._form = found
        elif self._form != found:
            raise ValueError(self._changed(batch, *self._form))
        return leaves

    def _changed(self, batch: Batch, treedef: Any, expected: list[Any]) -> str:
        leaves, new_treedef = jax.tree.flatten(batch)
        start = f"a {self.what} batch differs from the first one"
        if treedef != new_treedef:
            return f"{start} in structure: was {treedef}, is {new_treedef}."

        def shown(shape: tuple[int, ...], dtype: Any) -> str:
            return f"{dtype} (rows, {', '.join(map(str, shape)) or '-'})"

        found = [(leaf.shape[1:], leaf.dtype) for leaf in leaves]
        differences = "; ".join(
            f"{leaf_name(batch, i)} was {shown(*was)}, is {shown(*now)}"
            for i, (was, now) in enumerate(zip(expected, found, strict=True))
            if was != now
        )
        return (
            f"{start}: {differences}. Only the number of rows may vary, since every"
            " shape costs a compilation; pad or convert in the dataset or `collate_fn`."
        )


@functools.lru_cache
def _counts(counts: tuple[_Counts, ...], in_order: bool) -> np.ndarray:
    """Made once for each of the few there are in a run."""
    array = np.asarray(counts, np.int32)
    if in_order:
        array = array.sum(axis=1, keepdims=True, dtype=np.int32)
    array.flags.writeable = False
    return array
