"""Host batches stacked and padded to the shapes of compiled steps.

Batches of one spec differ only in their number of rows. A step is compiled for each
spec, so each spec has its own padded size.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from ..basics.console import join_some
from ..basics.tree import describe_difference
from ..distributed import RowBlocks
from ..step import Batch, Group, SingleRowBatch, find_batched_leaves
from .batches import (
    LocalBatch,
    SpecKey,
    format_key,
    get_local,
    leaf_name,
    make_spec_key,
    select_rows,
    stack_leaves,
)

_ONE_BLOCK: Final = RowBlocks()
_SHAPE_AND_DTYPE: Final = operator.attrgetter("shape", "dtype")
_ADD_AXIS: Final = operator.itemgetter(None)
"""Makes the array of a single micro-batch: one more axis in front."""
_NUMPY: Final = {np.ndarray}
_SPEC_AND_SIZE: Final = operator.attrgetter("spec", "size")

Leaves = list[Any]
"""NumPy's arrays, and JAX's."""

Window = Sequence[Batch]
"""The batches of one optimizer step."""

_Counts = tuple[int, ...]
"""The number of real rows in each block of a batch."""


class Dispatch(NamedTuple):
    """The batches of one call of a compiled step, which takes one or more optimizer
    steps."""

    windows: list[Window]
    """The batches of each optimizer step, as the loader gave them."""
    groups: list[Group]
    """Stacks of micro-batches of one spec: those of all steps together."""
    split: bool
    """Whether rows are split over the devices, or each device has all of them."""
    rows: list[int]
    """The real rows of each optimizer step."""
    shape: Hashable
    """The key of a program: the split, the steps, each group's sizes and spec."""
    has_device_arrays: bool = False
    """Whether a loader gave JAX's arrays, which are on devices already."""
    placed: Any = None
    """The groups on their way to the devices, ahead of their turn."""

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, padding included."""
        leaves = [leaf for group in self.groups for leaf in jax.tree.leaves(group)]
        return sum(leaf.nbytes for leaf in leaves)


class BatchSpec:
    """Structure, dtypes and shapes of batches without their rows."""

    def __init__(self, key: SpecKey):
        self.text = format_key(key)
        treedef, _ = key
        has_rows = find_batched_leaves(treedef)
        self.unbatched = [i for i, rows in enumerate(has_rows) if not rows]
        # The structures of the leaves with rows, and of the leaves without rows.
        self.batched_treedef, self.unbatched_treedef = [
            jax.tree.structure(
                treedef.unflatten([rows == kind or None for rows in has_rows])
            )
            for kind in (True, False)
        ]


@dataclasses.dataclass(slots=True)
class _HostMicroBatch:
    """A micro-batch before it is stacked: its leaves with rows, those in a `Whole`, and
    its spec."""

    leaves: Leaves
    unbatched: Leaves
    spec: BatchSpec
    counts: _Counts
    size: int
    """Its rows, or those that it is padded to."""


class _LastBatch(NamedTuple):
    """The last batch of NumPy arrays, if it needed no padding.

    The next batch needs no further checks if its shapes are the same.
    """

    shapes: list[Any]
    """The shape and dtype of each array."""
    counts: np.ndarray
    fields: tuple[bool, list[int], Hashable]
    """The other fields of its `Dispatch`."""


class Packer:
    """Stacks and pads batches so that one compiled shape serves all of a spec.

    All batches have the structure and dtypes of the first one. If it pads, every block
    of a short batch is padded to the largest size of its spec, with copies of its own
    first row (zeros or NaN could poison gradients). If not, batches keep their size,
    and each device computes a batch in full that the devices do not divide.

    Sizes are rounded up to a multiple of `num_shards`. If blocks are filled `in_order`,
    all padding is at the end, and the compiled step is that of one process. Every
    process then calls `collect`, which gathers the rows of all blocks into leaves
    shaped `(micro_batches, rows, ...)`.

    Attributes:
        sizes: the padded sizes so far by the specs' texts, as checkpoints have them.
    """

    def __init__(
        self,
        num_shards: int,
        kind: str,
        blocks: RowBlocks = _ONE_BLOCK,
        in_order: bool = True,
        collect: Callable[[Leaves], Leaves] = list,
        pads: bool = True,
    ):
        self.num_shards, self.kind, self.blocks = num_shards, kind, blocks
        self.pads = pads
        self._in_order = in_order
        self._collect = collect
        self._specs: dict[SpecKey, BatchSpec] = {}
        self._last_spec: BatchSpec
        self.reset()

    def reset(self) -> None:
        """Treats the next batch as the first."""
        self._first_key: SpecKey | None = None
        self.load_sizes({})

    def load_sizes(self, sizes: Mapping[str, int]) -> None:
        """Pads from now on as if these were the sizes so far."""
        # Other devices may have saved them.
        self.sizes = {spec: self.round_up(size) for spec, size in sizes.items()}
        # The key of the last batch, if all of its leaves have rows.
        self._last_key: SpecKey | None = None
        # None after a size has changed.
        self._last_batch: _LastBatch | None = None

    @property
    def size(self) -> int:
        """Rows of the largest padded global batch so far; 0 before the first.

        The rows of all processes are counted together.
        """
        return max(self.sizes.values(), default=0)

    def round_up(self, rows: int) -> int:
        """Returns the smallest size for this number of rows."""
        return math.ceil(rows / self.num_shards) * self.num_shards

    def describe_change(self, batch: Batch) -> str:
        """Returns how a batch differs from the first one; "" if it does not."""
        key = treedef, shapes = make_spec_key(batch)
        first, expected = self._first_key or key
        start = f"a {self.kind} batch differs from the first one"
        if treedef != first:
            old = first.unflatten(range(first.num_leaves))
            return f"{start} in structure: {describe_difference(old, batch)}."
        triples = zip(expected, shapes, find_batched_leaves(treedef), strict=True)
        changed = [
            f"{leaf_name(batch, i)} was {_format(*was, rows)}, is {_format(*now, rows)}"
            for i, (was, now, rows) in enumerate(triples)
            if was != now
        ]
        return f"{start}: {join_some(changed, '; ')}." if changed else ""

    def pack(self, windows: list[Window], slots: int = 1) -> Dispatch:
        """Packs the batches of one optimizer step, or of several steps of equal shapes.

        A step has `slots` micro-batches. If its window has fewer, the others have no
        real rows. Micro-batches of one spec form a group.
        """
        # Most windows are one batch with the shapes of the last, and small steps wait
        # for it.
        first, last, steps = windows[0][0], self._last_batch, len(windows)
        is_plain = type(first) is tuple and _NUMPY.issuperset(map(type, first))
        if last and is_plain and steps == slots == 1:
            if [*map(_SHAPE_AND_DTYPE, first)] == last.shapes:
                group = Group(tuple(map(_ADD_AXIS, first)), last.counts, None)
                return Dispatch(windows, [group], *last.fields)

        batches = itertools.chain.from_iterable(windows)
        micro_batches = [*map(self._split_leaves, batches)]
        on_device = not all(
            _NUMPY.issuperset(map(type, [*micro.leaves, *micro.unbatched]))
            for micro in micro_batches
        )
        # All windows but the last are full.
        sizes = [micro.size for micro in micro_batches]
        rows = [sum(sizes[step * slots :][:slots]) for step in range(steps)]
        # Groups are in the order of their specs' texts, which is the same in a resumed
        # process.
        if len(micro_batches) > 1:
            micro_batches.sort(key=lambda micro: micro.spec.text)
        is_split, was_padded = True, False
        has_rows = not isinstance(get_local(first), SingleRowBatch)
        if self.pads and has_rows:
            was_padded = self._pad(micro_batches, steps * slots)
        elif not all(self._needs_no_padding(micro.counts) for micro in micro_batches):
            is_split = False
            for micro in micro_batches:
                micro.leaves = self._gather_rows(micro.leaves, micro.counts)
                micro.counts = (micro.size,)

        groups, shapes = [], []
        runs = itertools.groupby(micro_batches, _SPEC_AND_SIZE)
        for (spec, size), of_one_shape in runs:
            run = list(of_one_shape)
            counts = _make_counts(tuple([m.counts for m in run]), self._in_order)
            batch = spec.batched_treedef.unflatten(_stack([m.leaves for m in run]))
            whole = None
            if spec.unbatched:
                unbatched = _stack([m.unbatched for m in run])
                whole = spec.unbatched_treedef.unflatten(unbatched)
            groups.append(Group(batch, counts, whole))
            shapes.append((len(run), size, spec.text))
        fields = is_split, rows, (is_split, steps, tuple(shapes))
        if is_plain and steps == slots == 1 and not was_padded:
            last_shapes = [*map(_SHAPE_AND_DTYPE, first)]
            self._last_batch = _LastBatch(last_shapes, groups[0].counts, fields)
        return Dispatch(windows, groups, *fields, on_device)

    def _split_leaves(self, batch: Batch) -> _HostMicroBatch:
        """Returns the leaves of a batch, with its spec, which may be new."""
        local = get_local(batch)
        leaves, treedef = jax.tree.flatten(local)
        key = treedef, tuple([(leaf.shape[1:], leaf.dtype) for leaf in leaves])
        if key != self._last_key:
            self._switch_spec(make_spec_key(local), local)
        unbatched = [leaves[i] for i in self._last_spec.unbatched]
        if unbatched:
            leaves = [
                leaf
                for i, leaf in enumerate(leaves)
                if i not in self._last_spec.unbatched
            ]
        is_local = isinstance(batch, LocalBatch)
        counts = batch.counts if is_local else (len(leaves[0]),)
        return _HostMicroBatch(leaves, unbatched, self._last_spec, counts, sum(counts))

    def _switch_spec(self, key: SpecKey, batch: Batch) -> None:
        """Sets the spec of the last batch; raises if it may not follow the first."""
        if self._first_key is None:
            self._first_key = key
        if _get_dtypes(key) != _get_dtypes(self._first_key):
            raise ValueError(
                f"{self.describe_change(batch)} Shapes may vary (the step is compiled"
                " once for each), but structure and dtypes may not: convert in"
                " the dataset or `collate_fn`."
            )
        if key not in self._specs:
            self._specs[key] = BatchSpec(key)
        self._last_spec = self._specs[key]
        self._last_key = None if self._last_spec.unbatched else key

    def _pad(self, micro_batches: list[_HostMicroBatch], slots: int) -> bool:
        """Pads each micro-batch to the size of its spec, and fills all slots.

        Returns:
            Whether there is a row of padding.
        """
        blocks, was_padded = self.blocks.count, len(micro_batches) < slots
        for micro in micro_batches:
            size = self.round_up(max(micro.counts) * blocks)
            if size > self.sizes.get(micro.spec.text, 0):
                self.sizes[micro.spec.text], self._last_batch = size, None
        for micro in micro_batches:
            micro.size = self.sizes[micro.spec.text]
            per_block = micro.size // blocks
            if micro.counts != (per_block,) * blocks:
                was_padded = True
                micro.leaves = self._pad_rows(micro.leaves, micro.counts, per_block)
        # The slots get copies of the last batch of the same step, so that NaN in
        # another step's batch does not spread.
        if (missing := slots - len(micro_batches)) > 0:
            micro_batches += [
                dataclasses.replace(micro_batches[-1], counts=(0,) * blocks)
            ] * missing
        return was_padded

    def _pad_rows(self, leaves: Leaves, counts: _Counts, size: int) -> Leaves:
        """Pads each block of this process to `size` rows."""
        local_counts = [counts[block] for block in self.blocks.local]
        if local_counts == [size] * len(local_counts):
            return leaves
        stops = list(itertools.accumulate(local_counts))

        index = np.zeros((len(stops), size), np.int32)  # the padding is of row 0
        for block, (count, stop) in enumerate(zip(local_counts, stops, strict=True)):
            index[block, :count] = range(stop - count, stop)
        return [select_rows(leaf, index.ravel()) for leaf in leaves]

    def _needs_no_padding(self, counts: _Counts) -> bool:
        """Returns whether blocks of these sizes need no padding."""
        shards = self.num_shards // self.blocks.count
        return len(set(counts)) == 1 and counts[0] % shards == 0

    def _gather_rows(self, leaves: Leaves, counts: _Counts) -> Leaves:
        """Returns the real rows of all processes, for a batch that is not split."""
        if self.blocks.count == 1:
            return leaves
        shards = self.num_shards // self.blocks.count
        size = math.ceil(max(counts) / shards) * shards
        local = self._pad_rows(leaves, counts, size)
        collected = self._collect([stack_leaves([leaf]) for leaf in local])
        starts = range(0, self.blocks.count * size, size)
        real = [slice(s, s + c) for s, c in zip(starts, counts, strict=True)]
        return [np.concatenate([leaf[0, r] for r in real]) for leaf in collected]


def _get_dtypes(key: SpecKey) -> Any:
    treedef, leaves = key
    return treedef, [dtype for _, dtype in leaves]


def _format(shape: tuple[int, ...], dtype: Any, has_rows: bool) -> str:
    if not has_rows:
        return f"{dtype} {shape}"
    return f"{dtype} (rows, {', '.join(map(str, shape)) or '-'})"


def _stack(micro_batches: list[Leaves]) -> Leaves:
    if len(micro_batches) > 1:
        return [stack_leaves(leaves) for leaves in zip(*micro_batches, strict=True)]
    return [
        leaf[None] if type(leaf) is np.ndarray else stack_leaves([leaf])  # no copy
        for leaf in micro_batches[0]
    ]


def have_equal_shapes(windows: list[Window], slots: int) -> bool:
    """Returns whether windows are full and their batches of equal shapes, with rows.

    Small steps wait for this check, so it only flattens each batch.
    """
    specs: list[Any] = []
    for batch in itertools.chain.from_iterable(windows):
        counts = batch.counts if type(batch) is LocalBatch else None
        leaves, treedef = jax.tree.flatten(get_local(batch))
        specs.append((counts, treedef, [*map(_SHAPE_AND_DTYPE, leaves)]))
    is_full = len(specs) == slots * len(windows)
    return is_full and all([spec == specs[0] for spec in specs])


@functools.lru_cache
def _make_counts(counts: tuple[_Counts, ...], in_order: bool) -> np.ndarray:
    """Returns the counts as an array, one for all batches of the same counts."""
    array = np.asarray(counts, np.int32)
    if in_order:
        array = array.sum(axis=1, keepdims=True, dtype=np.int32)
    array.flags.writeable = False
    return array
