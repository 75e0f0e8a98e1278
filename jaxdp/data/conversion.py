"""Batches of a user's loader as NumPy arrays that JAX takes: checked and narrowed."""

import dataclasses
import itertools
import math
import operator
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ..basics.console import join_some
from ..basics.tree import is_key
from ..step import NOTHING, Batch, KeyData, SingleRowBatch, find_batched_leaves
from .batches import Portion, is_there, leaf_name, taken

_NARROW = {
    np.dtype(np.int64): np.dtype(np.int32),
    np.dtype(np.uint64): np.dtype(np.uint32),
    np.dtype(np.float64): np.dtype(np.float32),
    np.dtype(np.complex128): np.dtype(np.complex64),
}


_PLAIN = {np.dtype(name) for name in ("float32", "int32", "uint8", "bool")}
"""What needs neither a check nor a conversion."""

_HOST: Final = {np.ndarray}
_NO_ROWS: Final = {(), (0,)}
_DTYPE, _SHAPE = operator.attrgetter("dtype"), operator.attrgetter("shape")
_ROWS = operator.itemgetter(slice(1))

_LABELS: Final = np.dtype(np.int64)
"""What class numbers mostly are. It needs no check of its kind."""

_UNSIGNED = {
    np.dtype(f"int{bits}"): np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)
}
"""As these, negative numbers are greater than all others: one look finds both."""

_FETCH_AT_ONCE: Final = 2**18
"""Bytes of small batches that are fetched together."""

_MOST: Final = np.iinfo(np.int32).max
"""The greatest number that both narrow kinds of integers have."""

_SPANS = (
    "{} is a jax.Array that spans processes, of which none has all rows. With"
    " `data`='global' each process must have the whole batch (it takes its rows of"
    " it), with 'local' its own rows: pass an array of this process's devices, such"
    " as jax.device_put(rows, jax.local_devices()[0])."
)


def to_host(batch: Any, *, copy: bool = False) -> Batch:
    """A batch as arrays of 32 bits at most, all with the same number of rows.

    JAX's arrays stay where they are; all others come as NumPy's. Those in a `Whole`
    need no rows, and stay in it; a batch of these alone is one row.
    Typed PRNG keys come as `KeyData`. Arrays on the CPU are not copied,
    unless narrowing does, or `copy` asks for it: for sources that may write the next
    batch into the same place. A list is taken as a tuple, since torch's default collate
    makes lists of tuples; a mapping that JAX does not know, such as tokenizers make, as
    a dict.
    """

    if type(batch) is list:
        batch = tuple(batch)
    if type(batch) is tuple:  # which most are, and small steps wait for it
        if not copy and _is_plain(batch):
            return batch
    else:
        if isinstance(batch, Portion):  # of an earlier pass
            return batch
        if isinstance(batch, Mapping) and jax.tree_util.all_leaves([batch]):
            batch = dict(batch)
    leaves, treedef = jax.tree.flatten(batch)

    # Each leaf by itself.
    arrays = []
    for index, leaf in enumerate(leaves):
        if type(leaf) is np.ndarray:  # as most are
            if leaf.dtype in _PLAIN:
                arrays.append(np.array(leaf) if copy else leaf)  # on the host
                continue
            if leaf.dtype is _LABELS and not _has_64_bits():
                arrays.append(_narrow(leaf, batch, index))
                continue
        is_jax = isinstance(leaf, jax.Array)
        if is_jax and is_key(leaf):
            return to_host(with_key_data(batch), copy=copy)
        array: Any = leaf if is_jax else as_numpy(leaf)
        if array is None or not _is_of_numbers(array.dtype):
            raise TypeError(_not_numbers(batch, index, leaf))
        if is_jax:
            if not array.is_fully_addressable:
                raise ValueError(_SPANS.format(leaf_name(batch, index)))
            arrays.append(array)
            continue
        if not array.dtype.isnative:  # big-endian, as some files are
            array = array.astype(array.dtype.newbyteorder("="))
        if array.dtype in _NARROW and not _has_64_bits():
            array = _narrow(array, batch, index)
        elif copy:
            array = np.array(array)
        arrays.append(array)
    if not arrays:
        raise TypeError(f"a batch has no arrays in it: {batch!r}.")

    # All of them: as many rows in each.
    pairs = zip(arrays, find_batched_leaves(treedef), strict=True)
    counts = {len(array) if array.ndim else 0 for array, has_rows in pairs if has_rows}
    if not counts:
        return SingleRowBatch(treedef.unflatten(arrays), NOTHING.row)
    if len(counts) != 1 or 0 in counts:
        named = [f"{leaf_name(batch, i)} {a.shape}" for i, a in enumerate(arrays)]
        remedy = (
            "Single examples must be put together first:"
            " torch.utils.data.DataLoader(dataset, batch_size)."
        )

        if any(
            isinstance(leaf, bool | int | float | complex | np.generic)
            for leaf in leaves
        ):
            remedy = (
                "In a list of numbers, each number is a leaf: make an array of it"
                " (np.asarray) in the dataset or in the loader's `collate_fn`."
            )
        if len(counts) > 1:
            remedy += (
                " Put an array that is the same for every row into a"
                " jaxdp.Whole(array)."
            )
        raise ValueError(
            "the leaves of a batch must share a leading axis of one or more rows; got"
            f" {join_some(named)}. {remedy}"
        )
    return treedef.unflatten(arrays)


def fetch(
    columns: tuple[np.ndarray, ...],
    subsets: list[np.ndarray],
    lists: Iterator[Any],
    ahead: bool = True,
) -> Iterator[tuple[np.ndarray, ...]]:
    """The rows of index lists: with `ahead` of many small batches in one operation."""
    row_bytes = sum(column.nbytes for column in columns) // len(columns[0]) + 1
    lists = (
        one_list if hasattr(one_list, "__len__") else list(one_list)
        for one_list in lists
    )

    def split(parts: list[Any]) -> Iterator[tuple[np.ndarray, ...]]:
        if not all(map(len, parts)):
            raise IndexError("the sampler gave an index list without indices")
        if all([isinstance(part, np.ndarray) for part in parts]):
            indices = np.concatenate(parts)
        else:
            flat = itertools.chain.from_iterable(parts)
            indices = np.fromiter(map(operator.index, flat), np.int64)
        for subset in subsets:
            indices = subset.take(indices)
        rows = to_host(tuple([column.take(indices, axis=0) for column in columns]))
        stops = [*itertools.accumulate(map(len, parts))]
        slices = [*map(slice, [0, *stops], stops)]
        return zip(*[map(column.__getitem__, slices) for column in rows], strict=True)

    # As many small batches together as `_FETCH_AT_ONCE` allows.
    for first in lists:
        many = max(1, _FETCH_AT_ONCE // (row_bytes * max(1, len(first))))
        parts, error = taken(lists, many - 1 if ahead else 0)
        try:
            yield from split([first, *parts])
        except (IndexError, TypeError, ValueError):  # at its own batch, others first
            for part in [first, *parts]:
                yield from split([part])
        if error is not None:
            raise error


def check_targets(batch: Batch, num_classes: int | None) -> None:
    """Raises for a negative weight in a batch `(x, y)` or `(x, y, weight)`, and for an
    integer label that is no class of the model: JAX would clamp and wrap it, silently.

    What is on the devices is not looked at, which would be to wait for them.
    """
    labels: Any
    _, labels, *weights = batch
    if weights and weights[0] is None:
        weights = []
    if num_classes is None and not weights:
        return
    if num_classes is not None and not weights and type(labels) is np.ndarray:
        if _greatest(labels) < num_classes:  # quick: small steps wait for it
            return
    of_tokens = math.prod(labels.shape[2:]) > 1 if num_classes is not None else False
    looked_at = [None if num_classes is None else labels, *weights]
    if any([isinstance(array, jax.Array) for array in looked_at]):
        return
    _check_bounds(*_bounds(looked_at), num_classes, of_tokens)


def _bounds(looked_at: list[Any]) -> tuple[Any, Any, Any]:
    """The least weight, and the least and greatest label."""
    label, *weights = looked_at
    least = weights[0].min() if weights else 0
    if label is None:
        return least, 0, 0
    if weights:
        counting = _counting(weights[0])
        axes = [1] * (label.ndim - 2)
        label = np.where(counting.reshape(*counting.shape, *axes), label, 0)
    return least, label.min(), label.max()


def _check_bounds(
    least: Any, low: Any, high: Any, num_classes: int | None, of_tokens: bool
) -> None:
    """Raises for a least weight, a least label and a greatest that can't be."""
    if not least >= 0:  # NaN, too
        raise ValueError(
            "weights must be 0 or more, since the mean is divided by their sum; this"
            f" batch (x, y, weight) has {least}. For factors with a sign, as advantages"
            " are, multiply the losses by them in a `loss_fn(model, x, y, factor)`."
        )
    if num_classes is not None and (low < 0 or high >= num_classes):
        remedy = (
            "(Rows to be ignored can have any label and the weight 0: (x, y, weight).)"
        )
        if of_tokens:
            remedy = (
                "(To ignore some labels of a row, return (values, weights) from a"
                " `loss_fn`: (losses, y >= 0), the losses being those of"
                " jnp.maximum(y, 0).)"
            )
        if num_classes == 1:
            remedy = "For yes/no targets use loss='binary_cross_entropy'."
        raise ValueError(
            f"labels must be 0 to {num_classes - 1}, of {num_classes} classes; this"
            f" batch has labels from {low} to {high}. {remedy}"
        )


def without_ignored(batch: Batch, is_per_example: bool, in_step: bool) -> Batch:
    """Stacked batches `(x, y, weight)` with other values in rows of weight 0.

    NaN there would reach the gradient of all: 0 times NaN is NaN. As padding does, they
    get a copy of a row that counts, or zeros if none does.

    Args:
        batch: leaves `(batches, rows, ...)`; of two elements it has no weights.
        is_per_example: whether the step is one of functions of one example. If not,
            such rows may have a part in others, and nothing is replaced.
        in_step: whether the step replaces predictions and targets.
    """
    if len(batch) != 3:
        return batch
    if is_there(batch):  # to look whether there are such rows would be to wait
        return _replaced_there(batch) if is_per_example else batch
    if (counts := _counting(batch[2])).all():
        return batch
    if not is_per_example:
        for index, leaf in enumerate(jax.tree.leaves(batch[:1] if in_step else batch)):
            if leaf.dtype.kind not in "iub" and not np.isfinite(leaf[~counts]).all():
                raise ValueError(
                    f"{leaf_name(batch, index)} has NaN or infinity in a row of weight"
                    " 0. Such a row does not count, but the loss, a metric or a model"
                    " with state is given the whole batch, so that it may reach other"
                    " rows. Give it finite values in the dataset or `collate_fn`, or"
                    " take a named loss and metrics, for which it is replaced."
                )
        return batch
    return _replaced(batch, np)


def _replaced(batch: Batch, numpy: Any) -> Batch:
    """The batch with other values where rows do not count, by NumPy or JAX's."""
    counts = _counting(batch[2])
    first = numpy.arange(len(counts)), counts.argmax(axis=1)

    def replaced(leaf: Any) -> Any:
        shape = len(counts), *[1] * (leaf.ndim - 2)
        some = counts.any(axis=1).reshape(shape)
        rows = numpy.where(some, leaf[first], numpy.zeros((), leaf.dtype))
        there = counts.reshape(*counts.shape, *[1] * (leaf.ndim - 2))
        return numpy.where(there, leaf, rows[:, None])

    return *jax.tree.map(replaced, batch[:2]), batch[2]


@jax.jit
def _replaced_there(batch: Batch) -> Batch:
    return _replaced(batch, jnp)


def _counting(weight: Any) -> Any:
    """Which rows of stacked batches `(batches, rows, ...)` have any weight."""
    return (weight != 0).reshape(*weight.shape[:2], -1).any(axis=2)


def as_numpy(leaf: Any) -> np.ndarray | None:
    """The leaf as an array over the same memory, or None if it is no array."""
    if isinstance(leaf, np.ndarray | np.generic):
        hides = np.ma.is_masked(leaf)  # numbers, which would be there again
        return None if hides else np.asarray(leaf)
    torch = sys.modules.get("torch")
    try:
        if torch is not None and isinstance(leaf, torch.Tensor):
            if leaf.dtype == torch.bfloat16:
                import ml_dtypes

                bits = leaf.detach().view(torch.int16)
                return bits.numpy(force=True).view(ml_dtypes.bfloat16)
            return leaf.numpy(force=True)
    except TypeError:  # sparse, float8: no plain numbers
        return None
    if isinstance(leaf, bool | int | float | complex):
        return np.asarray(leaf)
    return None


def with_key_data(tree: Any) -> Any:
    """The tree with typed PRNG keys as `to_host` has them."""

    def data(path: Any, leaf: Any, has_rows: int) -> Any:
        if not (isinstance(leaf, jax.Array) and is_key(leaf)):
            return leaf
        if has_rows and leaf.ndim == 0:
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} is a single PRNG key, which has no"
                " rows. Give each row a key, jax.random.split(key, rows), or put one"
                " that is for all rows into a jaxdp.Whole(key)."
            )
        return KeyData(jax.random.key_data(leaf), jax.random.key_impl(leaf))

    treedef = jax.tree.structure(tree)
    has_rows = treedef.unflatten(find_batched_leaves(treedef))
    return jax.tree_util.tree_map_with_path(data, tree, has_rows)


def _narrow(array: np.ndarray, batch: Any, index: int) -> np.ndarray:
    """`array` in 32 bits, with an error where a value would change beyond rounding."""
    dtype = _NARROW[array.dtype]
    if dtype.kind in "iu":
        narrowed = array.astype(dtype)
        if not array.size or _greatest(array) <= _MOST:
            return narrowed
        same = np.asarray(narrowed == array)
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            narrowed = array.astype(dtype)
        same = np.asarray(np.isfinite(narrowed) == np.isfinite(array))
    if not same.all():
        worst = array[~same].flat[0]
        raise ValueError(
            f"{leaf_name(batch, index)} is {array.dtype} and has the value {worst},"
            f" which does not fit into {dtype}, which JAX computes in. Rescale or"
            ' re-index the values, or call jax.config.update("jax_enable_x64", True).'
        )
    return narrowed


def _greatest(integers: np.ndarray) -> int:
    """The greatest of integers on the host, where negative ones count as very large."""
    unsigned = _UNSIGNED.get(integers.dtype)
    if unsigned is not None:
        integers = integers.view(unsigned)
    return int(np.maximum.reduce(integers, axis=None))


def _has_64_bits() -> bool:
    """Whether JAX computes in 64 bits, and nothing is to be narrowed."""
    return jax.dtypes.canonicalize_dtype(np.int64) == np.int64


def _is_of_numbers(dtype: np.dtype) -> bool:
    if dtype.kind in "fc" and dtype.itemsize > (8 if dtype.kind == "f" else 16):
        return False  # long double
    return dtype.kind not in "OUSMmV" or dtype.isbuiltin == 2


def _is_plain(batch: tuple[Any, ...]) -> bool:
    """Whether a tuple is a batch as it is."""
    if not (
        _HOST.issuperset(map(type, batch)) and _PLAIN.issuperset(map(_DTYPE, batch))
    ):
        return False
    rows = {*map(_ROWS, map(_SHAPE, batch))}
    return len(rows) == 1 and rows.isdisjoint(_NO_ROWS)


def _not_numbers(batch: Any, index: int, leaf: Any) -> str:
    kind = type(leaf).__name__
    if hasattr(leaf, "dtype"):
        kind += f" of dtype {leaf.dtype}"
    if hasattr(leaf, "layout"):
        kind += f", {leaf.layout}"
    advice = "Drop or convert it in the dataset or in the loader's `collate_fn`."
    if isinstance(leaf, Mapping):
        advice = "Make a dict of it, dict(batch), in the loader's `collate_fn`."
    elif isinstance(leaf, np.ma.MaskedArray):
        advice = "Its mask would be lost: pass x.filled(0), and the mask beside it."
    elif dataclasses.is_dataclass(leaf):
        advice = (
            "Make it known to JAX as a tree of arrays:"
            f" jax.tree_util.register_dataclass({type(leaf).__name__})."
        )
    return (
        f"{leaf_name(batch, index)} is a {kind}, and a batch can only have arrays of"
        f" numbers. {advice}"
    )
