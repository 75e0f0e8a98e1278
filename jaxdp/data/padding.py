"""Host batches stacked and padded to what the compiled step takes."""

import functools
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..step import Batch, Group
from .conversion import leaf_name, rows_of


class Packed(NamedTuple):
    """The batches of one dispatch, ready for a compiled step."""

    groups: list[Group]
    split: bool
    """Whether rows are split over the devices, or the batch is whole on each."""
    rows: list[int]
    """How many real rows each optimizer step has. Several steps are one group."""
    shape: Hashable
    """What a compiled step depends on: the split, the steps, each group's sizes."""


class Packer:
    """Stacks and pads batches so that one compiled shape serves them all.

    Where rows are independent, short batches are padded to the size of the largest
    seen, with copies of their own first row (zeros or NaN could poison gradients).
    Where rows interact, batches keep their size, and one that the devices do not divide
    is worked on whole by each of them.

    Args:
        num_shards: sizes are rounded up to a multiple of it.
        what: which batches, for messages: "training".

    Attributes:
        size: rows of a padded batch; 0 before the first.
    """

    def __init__(self, num_shards: int, what: str):
        self.num_shards = num_shards
        self.what = what
        self.rows_interact = False
        self.size = 0
        self._usual: Hashable = None
        self._expected: tuple[Any, ...] = ()
        self._form: tuple[Any, ...] = ()

    def pack(
        self, micro_batches: Sequence[Batch], slots: int = 1, steps: int = 1
    ) -> Packed:
        """Packs micro-batches into `slots` places; places left over hold no real rows.

        Args:
            micro_batches: of `steps` optimizer steps in turn; only the last step may
                have fewer than `slots // steps`.
            slots: of all the steps together.
            steps: how many steps; see `can_stack` for more than one.

        Raises:
            ValueError: if leaves differ from those of earlier batches in more than the
                number of rows; it names each leaf, what it was and what it is.
        """
        micros = [self._checked_leaves(batch) for batch in micro_batches]
        rows = len(micros[0][0])
        if slots == 1 and rows == self.size and not self.rows_interact:
            # Most batches, and as quick as can be: small steps wait for this.
            group = self._as_group([leaf[None] for leaf in micros[0]], (rows,))
            return Packed([group], True, [rows], self._usual)
        sizes = tuple([len(leaves[0]) for leaves in micros])
        each = slots // steps
        sums = [sum(sizes[start : start + each]) for start in range(0, slots, each)]
        split = True
        if self.rows_interact:
            split = all(size % self.num_shards == 0 for size in sizes)
        else:
            micros, sizes = self._padded(micros, sizes, slots)
        groups, shapes, start = [], [], 0
        for stop in range(1, len(micros) + 1):
            if stop == len(micros) or len(micros[stop][0]) != len(micros[start][0]):
                group = self._stacked(micros[start:stop], sizes[start:stop])
                groups.append(group)
                shapes.append((stop - start, len(micros[start][0])))
                start = stop
        return Packed(groups, split, sums, (split, steps, tuple(shapes)))

    def can_stack(self, micro_batches: Sequence[Batch], slots: int, first: int) -> bool:
        """Whether all these would be one group, of the sizes that they have one by one.

        Args:
            micro_batches: of several steps.
            slots: how many places the group has.
            first: how many of the places are the first step's.
        """
        sizes = [rows_of(batch) for batch in micro_batches]
        if not self.rows_interact:
            return self._pads_alike(sizes, first)
        return len({*sizes}) == 1 and len(micro_batches) == slots

    def _pads_alike(self, sizes: list[int], first: int) -> bool:
        """Whether the first step needs as many rows as any after it, or has had more.

        Last bits may depend on the number of padded rows.
        """
        return max(sizes) <= max(self.size, self._rounded(max(sizes[:first])))

    def _rounded(self, rows: int) -> int:
        return math.ceil(rows / self.num_shards) * self.num_shards

    def forget(self) -> None:
        """Takes the next batch for the first."""
        self.size, self._usual = 0, None
        self._expected = self._form = ()

    def start_from(self, rows: int) -> None:
        """Pads as if this had been the size of the largest batch so far; 0 is none."""
        self.size, self._usual = 0, None
        self.pad_to(rows)

    def pad_to(self, rows: int) -> None:
        """From now on batches get so many rows, or a few more, at least."""
        if rows > self.size:
            self.size = self._rounded(rows)
            self._usual = (True, 1, ((1, self.size),))

    def _padded(
        self, micros: list[list[np.ndarray]], sizes: tuple[int, ...], slots: int
    ) -> tuple[list[list[np.ndarray]], tuple[int, ...]]:
        """All of one size, the largest so far, and as many as there are slots."""
        largest = max(sizes)
        self.pad_to(largest)
        missing = slots - len(micros)
        padded = [pad(leaves, self.size) for leaves in micros]
        # The last is of the step that lacks some: NaN in another's stays there.
        return padded + padded[-1:] * missing, sizes + (0,) * missing

    def _stacked(
        self, micros: list[list[np.ndarray]], counts: tuple[int, ...]
    ) -> Group:
        if len(micros) == 1:
            stacked = [leaf[None] for leaf in micros[0]]
        else:
            stacked = [np.stack(leaves) for leaves in zip(*micros, strict=True)]
        return self._as_group(stacked, counts)

    def _as_group(self, stacked: list[np.ndarray], counts: tuple[int, ...]) -> Group:
        return Group(jax.tree.unflatten(self._expected[0], stacked), _counts(counts))

    def _checked_leaves(self, batch: Batch) -> list[np.ndarray]:
        """The leaves of a batch that is like the first one but for its rows."""
        leaves, treedef = jax.tree.flatten(batch)
        found = treedef, [(leaf.shape[1:], leaf.dtype) for leaf in leaves]
        if self._expected != found:
            self._check_form(batch)
            self._expected = found
        return leaves

    def _check_form(self, batch: Batch) -> None:
        """Raises unless the rows are like those of the first batch."""
        leaves, treedef = jax.tree.flatten(batch)
        form = treedef, [(leaf.shape[1:], leaf.dtype) for leaf in leaves]
        if not self._form:
            self._form = form
        elif self._form != form:
            raise ValueError(self._changed(batch, *self._form))

    def _changed(self, batch: Batch, treedef: Any, expected: list[Any]) -> str:
        leaves, new_treedef = jax.tree.flatten(batch)
        start = f"a {self.what} batch differs from the first one"
        if treedef != new_treedef:
            return f"{start} in structure: was {treedef}, is {new_treedef}."
        differences = "; ".join(
            f"{leaf_name(batch, i)} was {dtype} (rows, {_axes(shape)}),"
            f" is {leaf.dtype} (rows, {_axes(leaf.shape[1:])})"
            for i, (leaf, (shape, dtype)) in enumerate(
                zip(leaves, expected, strict=True)
            )
            if (leaf.shape[1:], leaf.dtype) != (shape, dtype)
        )
        return (
            f"{start}: {differences}. Only the number of rows may vary, since every"
            " shape costs a compilation; pad or convert in the dataset or `collate_fn`."
        )


def windows(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """Lists of `size` batches; the last may be shorter."""
    batches = iter(batches)
    while window := list(itertools.islice(batches, size)):
        yield window


def taken(iterator: Iterator[Any], most: int) -> tuple[list[Any], Exception | None]:
    """The next so many, or those before the one that raises, and what it raises."""
    found: list[Any] = []
    try:
        found.extend(itertools.islice(iterator, most))
    except Exception as error:
        return found, error
    return found, None


def pad(
    leaves: list[np.ndarray], size: int, rows: list[np.ndarray] | None = None
) -> list[np.ndarray]:
    """`leaves` with `size` rows: copies of their first, or of the one of `rows`."""
    missing = size - len(leaves[0])
    if missing == 0:
        return leaves
    firsts = rows or [leaf[:1] for leaf in leaves]
    return [
        np.concatenate([leaf, np.broadcast_to(row, (missing, *leaf.shape[1:]))])
        for leaf, row in zip(leaves, firsts, strict=True)
    ]


@functools.lru_cache
def _counts(counts: tuple[int, ...]) -> np.ndarray:
    """Made once for each of the few there are in a run."""
    array = np.asarray(counts, np.int32)[:, None]
    array.flags.writeable = False
    return array


def _axes(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape)) or "-"
