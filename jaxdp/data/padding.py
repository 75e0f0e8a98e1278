"""From a user's batches to what the compiled step takes: checked, narrowed, padded.

Where batches come from, torch's `DataLoader` included, is in `loaders`.
"""

import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..step import Batch, Group

_NARROW = {
    np.dtype(np.int64): np.dtype(np.int32),
    np.dtype(np.uint64): np.dtype(np.uint32),
    np.dtype(np.float64): np.dtype(np.float32),
    np.dtype(np.complex128): np.dtype(np.complex64),
}


def to_host(batch: Any, *, copy: bool = False) -> Batch:
    """A batch as NumPy arrays of 32 bits at most, all with the same number of rows.

    Torch tensors on the CPU and JAX arrays on the CPU are not copied, unless narrowing
    does.

    Args:
        batch: a pytree of torch, NumPy or JAX arrays shaped `(rows, ...)`. A list is
            taken as a tuple, since torch's default collate makes lists of tuples.
        copy: whether to copy all memory that is not new, for sources that may write
            the next batch into the same place.

    Raises:
        TypeError: for leaves that are not arrays of numbers.
        ValueError: for leaves that disagree on rows, and values that do not fit into
            32 bits.
    """
    if type(batch) is list:
        batch = tuple(batch)
    leaves, treedef = jax.tree.flatten(batch)
    wide = jax.dtypes.canonicalize_dtype(np.int64) == np.int64
    arrays = []
    for index, leaf in enumerate(leaves):
        array = as_numpy(leaf)
        if array is None or not _is_of_numbers(array.dtype):
            raise TypeError(_not_numbers(batch, index, leaf))
        if not array.dtype.isnative:  # big-endian, as some files are
            array = array.astype(array.dtype.newbyteorder("="))
        if not wide and array.dtype in _NARROW:
            array = _narrow(array, batch, index)
        elif copy:
            array = np.array(array)
        arrays.append(array)
    if not arrays:
        raise TypeError(f"a batch has no arrays in it: {batch!r}.")
    shapes = [array.shape[:1] for array in arrays]
    if shapes.count(shapes[0]) != len(shapes) or not shapes[0] or not shapes[0][0]:
        listed = ", ".join(
            f"{leaf_name(batch, i)} {array.shape}" for i, array in enumerate(arrays[:8])
        )
        more = f" and {len(arrays) - 8} more" if len(arrays) > 8 else ""
        raise ValueError(
            "the leaves of a batch must share a leading axis of one or more rows; got"
            f" {listed}{more}." + _why_no_rows(leaves)
        )
    return treedef.unflatten(arrays)


def leaf_name(batch: Any, index: int) -> str:
    """How a user would write the leaf number `index`: `batch[0]['image']`."""
    paths, _ = jax.tree_util.tree_flatten_with_path(batch)
    return "batch" + jax.tree_util.keystr(paths[index][0])


def check_labels(batch: Batch, num_classes: int) -> None:
    """Raises when an integer label of `(x, y)` batches is no class of the model.

    JAX would clamp a label that is too large and wrap a negative one, silently.
    """
    labels = batch[1]
    low, high = labels.min(), labels.max()
    if low < 0 or high >= num_classes:
        raise ValueError(
            f"labels must be 0 to {num_classes - 1}, as the model gives {num_classes}"
            f" logits; this batch has labels from {low} to {high}."
            + (
                " For yes/no targets use loss='binary_cross_entropy'."
                if num_classes == 1
                else " (Rows to be ignored need a `loss_fn` that leaves them out.)"
            )
        )


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


def rows_of(batch: Batch) -> int:
    """How many rows a host batch has."""
    return len(jax.tree.leaves(batch)[0])


def read_only(batch: Batch) -> Batch:
    """A host batch over the same memory that can't be written to."""
    leaves, treedef = jax.tree.flatten(batch)
    views = [leaf.view() for leaf in leaves]
    for view in views:
        view.flags.writeable = False
    return jax.tree.unflatten(treedef, views)


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


def as_numpy(leaf: Any) -> np.ndarray | None:
    """The leaf as an array over the same memory, or None if it is no array."""
    if isinstance(leaf, np.ndarray | np.generic):
        return np.asarray(leaf)
    torch = sys.modules.get("torch")
    try:
        if torch is not None and isinstance(leaf, torch.Tensor):
            leaf = leaf.detach().cpu()
            if leaf.dtype == torch.bfloat16:
                import ml_dtypes

                return leaf.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
            return leaf.resolve_conj().resolve_neg().numpy()
        if isinstance(leaf, jax.Array):
            return np.asarray(leaf)
    except TypeError:  # sparse, float8, PRNG keys: no plain numbers
        return None
    if isinstance(leaf, bool | int | float | complex):
        return np.asarray(leaf)
    return None


def _narrow(array: np.ndarray, batch: Any, index: int) -> np.ndarray:
    """`array` in 32 bits, with an error where a value would change beyond rounding."""
    dtype = _NARROW[array.dtype]
    with np.errstate(over="ignore", invalid="ignore"):
        narrowed = array.astype(dtype)
    if dtype.kind in "iu":
        same = np.asarray(narrowed == array)
    else:
        same = np.asarray(np.isfinite(narrowed) == np.isfinite(array))
    if not same.all():
        worst = array[~same].flat[0]
        raise ValueError(
            f"{leaf_name(batch, index)} is {array.dtype} and has the value {worst},"
            f" which does not fit into {dtype}, which JAX computes in. Rescale or"
            ' re-index the values, or call jax.config.update("jax_enable_x64", True).'
        )
    return narrowed


def _is_of_numbers(dtype: np.dtype) -> bool:
    if dtype.kind in "fc" and dtype.itemsize > (8 if dtype.kind == "f" else 16):
        return False  # long double
    return dtype.kind not in "OUSMmV" or dtype.isbuiltin == 2


def _why_no_rows(leaves: list[Any]) -> str:
    """What may help where leaves do not share their rows."""
    if any(isinstance(leaf, bool | int | float | complex) for leaf in leaves):
        return (
            " A list of numbers is a leaf for each: make an array of it (np.asarray) in"
            " the dataset or in the loader's `collate_fn`."
        )
    return (
        " Single examples must be put together first:"
        " torch.utils.data.DataLoader(dataset, batch_size)."
    )


def _not_numbers(batch: Any, index: int, leaf: Any) -> str:
    kind = type(leaf).__name__
    if hasattr(leaf, "dtype"):
        kind += f" of dtype {leaf.dtype}"
    if hasattr(leaf, "layout"):
        kind += f", {leaf.layout}"
    advice = "Drop or convert it in the dataset or in the loader's `collate_fn`."
    if isinstance(leaf, Mapping):
        advice = "Make a dict of it, dict(batch), in the loader's `collate_fn`."
    elif dataclasses.is_dataclass(leaf):
        advice = (
            "Make it known to JAX as a tree of arrays:"
            f" jax.tree_util.register_dataclass({type(leaf).__name__})."
        )
    return (
        f"{leaf_name(batch, index)} is a {kind}, and a batch can only have arrays of"
        f" numbers. {advice}"
    )


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
