"""Host batches stacked and padded to the shapes of compiled steps.

Batches of one spec differ only in their number of rows. A step is compiled for each
spec, so each spec has its own padded size.
"""

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
from ..step import Batch, Group, SingleRowBatch, find_batched_leaves, merge_leaves
from .batches import (
    LocalBatch,
    SpecKey,
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

Leaves = list[Any]
"""NumPy's arrays, and JAX's."""

Window = Sequence[Batch]
"""The batches of one optimizer step."""

_Counts = tuple[int, ...]
"""The number of real rows in each block of a batch."""


class Dispatch(NamedTuple):
    """The batches of one call of a compiled step."""

    windows: list[Window]
    """The batches of each optimizer step, as the loader gave them."""
    groups: list[Group]
    split: bool
    """Whether rows are split over the devices, or each device has all of them."""
    rows: list[int]
    """The real rows of each optimizer step. Several steps are one group."""
    shape: Hashable
    """The key of a compiled step: the split, the steps, each group's sizes and spec."""
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
    """Structure, dtypes and shapes of batches without rows, and their padded size."""

    def __init__(self, key: SpecKey):
        self.text = _format_key(key)
        treedef, _ = key
        has_rows = find_batched_leaves(treedef)
        self.unbatched = [i for i, rows in enumerate(has_rows) if not rows]
        node = treedef.node_data()
        self.is_rowless = node is not None and node[0] is SingleRowBatch
        # The structures of the leaves with rows, and of the leaves without rows.
        self.batched_treedef, self.unbatched_treedef = [
            jax.tree.structure(
                treedef.unflatten([rows == kind or None for rows in has_rows])
            )
            for kind in (True, False)
        ]
        self.size = 0  # rows of a padded batch, of all processes
        self.full: _Counts = ()  # real rows in each block of a full batch


class BatchSpecs:
    """The batch specs that one kind of step has had.

    All have the structure and dtypes of the first batch.

    Args:
        kind: the kind of step, for messages.
        num_shards: the number that divides all sizes.
        num_blocks: the number of blocks of rows in a batch.

    Attributes:
        last: facts of the last batch of NumPy arrays that needed no padding: shapes,
            dtypes, counts, and the other fields of its dispatch. A batch of equal
            shapes needs no further checks. None after a size has changed.
    """

    def __init__(self, kind: str, num_shards: int, num_blocks: int):
        self.last: tuple[Any, ...] | None = None
        self._kind = kind
        self._num_shards, self._num_blocks = num_shards, num_blocks
        self._first: SpecKey | None = None
        self._known: dict[SpecKey, BatchSpec] = {}
        self._saved: dict[str, int] = {}  # sizes of specs that no batch has had yet
        self._key: SpecKey | None = None  # of the last batch, if all leaves have rows
        self._spec: BatchSpec

    @property
    def sizes(self) -> dict[str, int]:
        """The padded sizes so far by the specs' texts, for a checkpoint."""
        sizes = dict(self._saved)
        for spec in self._known.values():
            sizes[spec.text] = max(spec.size, sizes.get(spec.text, 0))
        return {text: size for text, size in sizes.items() if size}

    def load_sizes(self, sizes: Mapping[str, int]) -> None:
        """Pads from now on as if these were the sizes so far."""
        self._saved, self._known = dict(sizes), {}
        self._key = self.last = None

    def reset(self) -> None:
        """Treats the next batch as the first."""
        self.load_sizes({})
        self._first = None

    def split_leaves(self, batch: Batch) -> tuple[Leaves, Any, BatchSpec]:
        """Returns the leaves that have rows, those in a `Whole`, and the spec."""
        leaves, treedef = jax.tree.flatten(batch)
        key = treedef, tuple([(leaf.shape[1:], leaf.dtype) for leaf in leaves])
        if key != self._key:
            self._select(make_spec_key(batch), batch)
        if unbatched := self._spec.unbatched:
            rows = [leaf for i, leaf in enumerate(leaves) if i not in unbatched]
            return rows, [leaves[i] for i in unbatched], self._spec
        return leaves, [], self._spec

    def get_size(self, key: SpecKey) -> int:
        """Returns the padded size of a spec so far; 0 if it has none."""
        if key in self._known:
            return self._known[key].size
        return self._saved.get(_format_key(key), 0)

    def round_up(self, rows: int) -> int:
        """Returns the smallest size for this number of rows."""
        return math.ceil(rows / self._num_shards) * self._num_shards

    def grow(self, spec: BatchSpec, rows: int) -> None:
        """Pads batches of this spec to this number of rows at least."""
        if (size := self.round_up(rows)) > spec.size:
            spec.size, self.last = size, None
            spec.full = (size // self._num_blocks,) * self._num_blocks

    def compare(self, batch: Batch) -> str:
        """Returns how a batch differs from the first one; "" if it does not."""
        treedef, shapes = make_spec_key(batch)
        if self._first is None or self._first == (treedef, shapes):
            return ""
        start, (first, expected) = f"a {self._kind} batch", self._first
        if treedef != first:
            old = first.unflatten(range(first.num_leaves))
            difference = describe_difference(old, batch)
            return f"{start} differs from the first one in structure: {difference}."

        triples = zip(expected, shapes, find_batched_leaves(treedef), strict=True)
        changed = [
            f"{leaf_name(batch, i)} was {_format(*was, rows)}, is {_format(*now, rows)}"
            for i, (was, now, rows) in enumerate(triples)
            if was != now
        ]
        return f"{start} differs from the first one: {join_some(changed, '; ')}."

    def describe(self, group: Group) -> str:
        """Returns a note for an error of a step that was compiled for a group."""
        batches = merge_leaves(group.batch, group.whole)
        batch = jax.tree.map(lambda leaf: leaf[0], batches)
        if not (difference := self.compare(batch)):
            return ""
        return (
            f"{difference} The step is compiled once for each shape. If the shapes"
            " should be the same, pad or convert in the dataset or `collate_fn`."
        )

    def _select(self, key: SpecKey, batch: Batch) -> None:
        """Sets the current spec, which may be new."""
        if self._first is None:
            self._first = key
        if _get_dtypes(key) != _get_dtypes(self._first):
            raise ValueError(
                f"{self.compare(batch)} Shapes may vary (the step is compiled"
                " once for each), but structure and dtypes may not: convert in"
                " the dataset or `collate_fn`."
            )
        if key not in self._known:
            spec = self._known[key] = BatchSpec(key)
            self.grow(spec, self._saved.get(spec.text, 0))
        self._spec = self._known[key]
        self._key = None if self._spec.unbatched else key


class Packer:
    """Stacks and pads batches so that one compiled shape serves all of a spec.

    If it pads, every block of a short batch is padded to the largest size of its spec,
    with copies of its own first row (zeros or NaN could poison gradients). If not,
    batches keep their size, and each device computes a batch in full that the devices
    do not divide.

    Sizes are rounded up to a multiple of `num_shards`. If blocks are filled `in_order`,
    all padding is at the end, and the compiled step is that of one process. Every
    process then calls `collect`, which gathers the rows of all blocks into leaves
    shaped `(micro_batches, rows, ...)`.
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
        self.specs = BatchSpecs(kind, num_shards, blocks.count)
        self._in_order = in_order
        self._collect = collect

    @property
    def size(self) -> int:
        """Rows of the largest padded batch so far, of all processes."""
        return max(self.specs.sizes.values(), default=0)

    def reset(self) -> None:
        """Treats the next batch as the first."""
        self.specs.reset()

    def pack(self, windows: list[Window], slots: int = 1) -> Dispatch:
        """Packs the batches of one optimizer step, or of several steps of equal shapes.

        A step has `slots` micro-batches. If its window has fewer, the others have no
        real rows. Micro-batches of one spec form a group.
        """
        # Most windows are one batch with the shapes of the last, and small steps wait
        # for it.
        first, last, steps = windows[0][0], self.specs.last, len(windows)
        is_plain = type(first) is tuple and _NUMPY.issuperset(map(type, first))
        if last and is_plain and steps == slots == 1:
            if [*map(_SHAPE_AND_DTYPE, first)] == last[0]:
                group = Group(tuple(map(_ADD_AXIS, first)), last[1], None)
                return Dispatch(windows, [group], *last[2])

        split, counts, is_equal = [], [], self.pads
        for batch in itertools.chain.from_iterable(windows):
            is_local = type(batch) is LocalBatch
            split.append(self.specs.split_leaves(batch.batch if is_local else batch))
            leaves, _, spec = split[-1]
            counts.append(batch.counts if is_local else (len(leaves[0]),))
            is_equal = is_equal and spec is split[0][2]
        on_device = not all(
            _NUMPY.issuperset(map(type, [*leaves, *unbatched]))
            for leaves, unbatched, _ in split
        )
        spec, count = split[0][2], steps * slots
        if is_equal and counts == [spec.full] * count:
            shape = True, steps, ((count, spec.size, spec.text),)
            of_all = _make_counts(tuple(counts), self._in_order)
            fields = True, [slots * spec.size] * steps, shape
            if is_plain and count == 1:
                self.specs.last = [*map(_SHAPE_AND_DTYPE, first)], of_all, fields
            micros, unbatched = [entry[0] for entry in split], [e[1] for e in split]
            group = _make_group(micros, unbatched, of_all, spec)
            return Dispatch(windows, [group], *fields, on_device)

        sizes = [sum(entry) for entry in counts]
        rows = [sum(sizes[step * slots :][:slots]) for step in range(steps)]
        if any(other is not spec for *_, other in split):
            # Groups are in the order of their specs' texts, which is the same in a
            # resumed process.
            order = sorted(range(len(split)), key=lambda i: split[i][2].text)
            split = [split[i] for i in order]
            counts = [counts[i] for i in order]
            sizes = [sizes[i] for i in order]
        micros, unbatched, specs = ([*entry] for entry in zip(*split, strict=True))

        is_split = True
        if self.pads and not spec.is_rowless:  # which has no rows to pad
            micros, counts = self._pad(micros, counts, specs, count)
            missing = len(micros) - len(specs)
            unbatched += unbatched[-1:] * missing
            specs += specs[-1:] * missing
            sizes = [spec.size for spec in specs]
        elif not all(map(self._fills_shards, counts)):
            is_split = False
            micros = [self._gather(m, c) for m, c in zip(micros, counts, strict=True)]
            counts = [(size,) for size in sizes]

        groups, shapes, start = [], [], 0
        for (spec, size), run in itertools.groupby(zip(specs, sizes, strict=True)):
            stop = start + len(list(run))
            part = slice(start, stop)
            of_all = _make_counts(tuple(counts[part]), self._in_order)
            groups.append(_make_group(micros[part], unbatched[part], of_all, spec))
            shapes.append((stop - start, size, spec.text))
            start = stop
        fields = is_split, rows, (is_split, steps, tuple(shapes))
        if is_plain and steps == slots == 1 and not self.pads:
            shape = [*map(_SHAPE_AND_DTYPE, first)]
            self.specs.last = shape, groups[0].counts, fields
        return Dispatch(windows, groups, *fields, on_device)

    def _pad(
        self,
        micros: list[Leaves],
        counts: list[_Counts],
        specs: list[BatchSpec],
        slots: int,
    ) -> tuple[list[Leaves], list[_Counts]]:
        """Pads each micro-batch to the size of its spec, and fills all slots."""
        for spec, per_block in zip(specs, counts, strict=True):
            self.specs.grow(spec, max(per_block) * self.blocks.count)
        padded = [
            self._pad_rows(leaves, per_block, spec.full[0])
            for leaves, per_block, spec in zip(micros, counts, specs, strict=True)
        ]
        # The slots get copies of the last batch of the same step, so that NaN in
        # another step's batch does not spread.
        missing, no_rows = slots - len(micros), (0,) * self.blocks.count
        return padded + padded[-1:] * missing, counts + [no_rows] * missing

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

    def _fills_shards(self, counts: _Counts) -> bool:
        """Returns whether blocks of these sizes need no padding."""
        shards = self.num_shards // self.blocks.count
        return len(set(counts)) == 1 and counts[0] % shards == 0

    def _gather(self, leaves: Leaves, counts: _Counts) -> Leaves:
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


def _format_key(key: SpecKey) -> str:
    return " ".join(f"{dtype}{list(shape)}" for shape, dtype in key[1])


def _format(shape: tuple[int, ...], dtype: Any, has_rows: bool) -> str:
    if not has_rows:
        return f"{dtype} {shape}"
    return f"{dtype} (rows, {', '.join(map(str, shape)) or '-'})"


def _make_group(
    micros: list[Leaves], unbatched: list[Any], counts: np.ndarray, spec: BatchSpec
) -> Group:
    """Returns the group of micro-batches of one shape, which are stacked."""
    batch = spec.batched_treedef.unflatten(_stack(micros))
    whole = None
    if spec.unbatched:
        whole = spec.unbatched_treedef.unflatten(_stack(unbatched))
    return Group(batch, counts, whole)


def _stack(micros: list[Leaves]) -> Leaves:
    if len(micros) > 1:
        return [stack_leaves(leaves) for leaves in zip(*micros, strict=True)]
    return [
        leaf[None] if type(leaf) is np.ndarray else stack_leaves([leaf])  # no copy
        for leaf in micros[0]
    ]


def have_equal_shapes(windows: list[Window], slots: int) -> bool:
    """Returns whether windows are full and their batches of equal shapes, with rows.

    Small steps wait for this check, so it only flattens each batch.
    """
    batches = list(itertools.chain.from_iterable(windows))
    if len(batches) < slots * len(windows):
        return False
    first, *others = map(_get_full_spec, batches)
    return all([spec == first for spec in others])


def _get_full_spec(batch: Batch) -> Any:
    """Returns the structure of a batch, and the shapes and dtypes of its leaves."""
    if type(batch) is LocalBatch:
        return batch.counts, _get_full_spec(batch.batch)
    leaves, treedef = jax.tree.flatten(batch)
    return treedef, [*map(_SHAPE_AND_DTYPE, leaves)]


@functools.lru_cache
def _make_counts(counts: tuple[_Counts, ...], in_order: bool) -> np.ndarray:
    """Returns the counts as an array, one for all batches of the same counts."""
    array = np.asarray(counts, np.int32)
    if in_order:
        array = array.sum(axis=1, keepdims=True, dtype=np.int32)
    array.flags.writeable = False
    return array
