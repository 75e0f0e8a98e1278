"""Checks the batches of a loader, and converts them to arrays of at most 32 bits."""

import itertools
import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np

from ..basics.console import add_article, join_some
from ..basics.tree import is_key
from ..step import NOTHING, Batch, KeyData, SingleRowBatch, find_batched_leaves
from .batches import leaf_name, take_until_error

_NARROW = {
    np.dtype(np.int64): np.dtype(np.int32),
    np.dtype(np.uint64): np.dtype(np.uint32),
    np.dtype(np.float64): np.dtype(np.float32),
    np.dtype(np.complex128): np.dtype(np.complex64),
}

_PLAIN = {np.dtype(name) for name in ("float32", "int32", "uint8", "bool")}
"""Dtypes that need neither a check nor a conversion."""

_NUMPY: Final = {np.ndarray}
_NO_ROWS: Final = {(), (0,)}
_get_dtype, _get_shape = operator.attrgetter("dtype"), operator.attrgetter("shape")
_get_num_rows = operator.itemgetter(slice(1))

_FETCH_BYTES: Final = 2**18
"""Bytes of small batches that are fetched in one operation."""


def normalize_batch(batch: Any, *, copy: bool = False) -> Batch:
    """Returns a batch as arrays of 32 bits at most, all with the same number of rows.

    JAX's arrays stay where they are; all others become NumPy's. Arrays in a `Whole`
    need no rows, and a batch of these alone is one row. Typed PRNG keys become
    `KeyData`. Lists become tuples, since torch's default collation makes lists of
    tuples; mappings that JAX does not know, such as those of tokenizers, become dicts.

    Arrays on the CPU are not copied, unless they are narrowed, or `copy` is set: for
    sources that may write the next batch into the same memory.
    """
    if type(batch) is list:
        batch = tuple(batch)
    if type(batch) is tuple:  # most batches are, and small steps wait for this
        if not copy and _NUMPY.issuperset(map(type, batch)):
            if _PLAIN.issuperset(map(_get_dtype, batch)):
                num_rows = {*map(_get_num_rows, map(_get_shape, batch))}
                if len(num_rows) == 1 and num_rows.isdisjoint(_NO_ROWS):
                    return batch
    elif isinstance(batch, Mapping) and jax.tree_util.all_leaves([batch]):
        batch = dict(batch)
    leaves, treedef = jax.tree.flatten(batch)
    if any([isinstance(leaf, jax.Array) and is_key(leaf) for leaf in leaves]):
        return normalize_batch(wrap_keys(batch), copy=copy)
    arrays = [_convert(leaf, batch, index, copy) for index, leaf in enumerate(leaves)]
    if not arrays:
        raise TypeError(f"a batch has no arrays in it: {batch!r}.")

    # All leaves have the same number of rows.
    pairs = zip(arrays, find_batched_leaves(treedef), strict=True)
    counts = {len(array) if array.ndim else 0 for array, has_rows in pairs if has_rows}
    if not counts:
        return SingleRowBatch(treedef.unflatten(arrays), NOTHING.row)
    if len(counts) != 1 or 0 in counts:
        named = [f"{leaf_name(batch, i)} {a.shape}" for i, a in enumerate(arrays)]
        raise ValueError(
            "the leaves of a batch must share a leading axis of one or more rows; got"
            f" {join_some(named)}. Single examples must be put together first:"
            " torch.utils.data.DataLoader(dataset, batch_size). Make an array"
            " (np.asarray) of a list of numbers, in which each is a leaf, and put an"
            " array that is the same for every row into a jaxdp.Whole(array)."
        )
    return treedef.unflatten(arrays)


def wrap_keys(tree: Any) -> Any:
    """Returns the tree with typed PRNG keys as `KeyData`."""

    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves = []
    for (path, leaf), has_rows in zip(paths, find_batched_leaves(treedef), strict=True):
        if isinstance(leaf, jax.Array) and is_key(leaf):
            if has_rows and leaf.ndim == 0:
                raise ValueError(
                    f"batch{jax.tree_util.keystr(path)} is a single PRNG key, which has"
                    " no rows. Give each row a key, jax.random.split(key, rows), or"
                    " put one that is for all rows into a jaxdp.Whole(key)."
                )
            leaf = KeyData(jax.random.key_data(leaf), jax.random.key_impl(leaf))
        leaves.append(leaf)
    return treedef.unflatten(leaves)


def _convert(leaf: Any, batch: Any, index: int, copy: bool) -> Any:
    """Returns leaf number `index` of a batch as an array of 32 bits at most.

    Raises if a value would change beyond rounding.
    """
    array: Any = leaf
    if type(array) is np.ndarray and array.dtype in _PLAIN:
        return np.array(array) if copy else array
    if isinstance(leaf, jax.Array):
        if leaf.is_fully_addressable:
            return leaf
        raise ValueError(
            f"{leaf_name(batch, index)} is a jax.Array that spans processes, of"
            " which none has all rows. With `data`='global' each process must have"
            " the whole batch (it takes its rows of it), with 'local' its own rows:"
            " pass an array of this process's devices, such as"
            " jax.device_put(rows, jax.local_devices()[0])."
        )
    array = as_numpy(leaf)
    # Custom dtypes, such as bfloat16, are numbers of the kind "V".
    if (
        array is None
        or array.dtype.char in "gG"  # long double, which JAX lacks
        or (array.dtype.kind in "OUSMmV" and array.dtype.isbuiltin != 2)
    ):
        kind = type(leaf).__name__
        if hasattr(leaf, "dtype"):
            kind += f" of dtype {leaf.dtype}"
        if hasattr(leaf, "layout"):  # a sparse tensor's
            kind += f", {leaf.layout}"
        raise TypeError(
            f"{leaf_name(batch, index)} is {add_article(kind)}, and a batch can only"
            " have arrays of numbers. Drop or convert it in the dataset or in the"
            " loader's `collate_fn`: dict(x) of a mapping, x.filled(0) of a masked"
            " array, and jax.tree_util.register_dataclass for a dataclass."
        )
    if not array.dtype.isnative:  # big-endian, as some files are
        array = array.astype(array.dtype.newbyteorder("="))
    dtype = _NARROW.get(array.dtype)
    # Unless JAX computes in 64 bits.
    if dtype is None or jax.dtypes.canonicalize_dtype(np.int64) == np.int64:
        return np.array(array) if copy else array
    with np.errstate(over="ignore", invalid="ignore"):
        narrowed = array.astype(dtype)
    if dtype.kind in "iu":
        same = narrowed == array
    else:
        same = np.isfinite(narrowed) == np.isfinite(array)
    if not np.all(same):
        raise ValueError(
            f"{leaf_name(batch, index)} is {array.dtype} and has the value"
            f" {array[~np.asarray(same)].flat[0]}, which does not fit into {dtype},"
            " which JAX computes in. Rescale or re-index the values, or call"
            ' jax.config.update("jax_enable_x64", True).'
        )
    return narrowed


def as_numpy(leaf: Any) -> np.ndarray | None:
    """Returns the leaf as an array over the same memory; None if it is no array."""
    if isinstance(leaf, np.ndarray | np.generic):
        is_masked = np.ma.is_masked(leaf)  # the masked numbers would count again
        return None if is_masked else np.asarray(leaf)
    torch = sys.modules.get("torch")
    try:
        if torch is not None and isinstance(leaf, torch.Tensor):
            if leaf.dtype == torch.bfloat16:
                import ml_dtypes

                bits = leaf.detach().view(torch.int16)
                return bits.numpy(force=True).view(ml_dtypes.bfloat16)
            return leaf.numpy(force=True)
    except TypeError:  # sparse and float8 tensors are not supported by NumPy
        return None
    if isinstance(leaf, bool | int | float | complex):
        return np.asarray(leaf)
    return None


def fetch_rows(
    columns: Sequence[Any],
    subsets: list[np.ndarray],
    index_lists: Iterator[Any],
    ahead: bool = True,
) -> Iterator[tuple[np.ndarray, ...]]:
    """Yields the rows of index lists; `ahead` fetches many small batches at once.

    Columns are arrays or tensors on the host. The indices of `subsets` are applied in
    turn, from the outer subset inwards.
    """
    row_bytes = sum(column.nbytes for column in columns) // len(columns[0]) + 1

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
        rows = normalize_batch(
            tuple([take_rows(column, indices) for column in columns])
        )
        stops = [*itertools.accumulate(map(len, parts))]
        slices = [*map(slice, [0, *stops], stops)]
        return zip(*[map(column.__getitem__, slices) for column in rows], strict=True)

    for rows in index_lists:
        first = rows if hasattr(rows, "__len__") else list(rows)
        count = max(1, _FETCH_BYTES // (row_bytes * max(1, len(first))))
        parts, error = take_until_error(index_lists, count - 1 if ahead else 0)
        try:
            yield from split([first, *parts])
        except (IndexError, TypeError, ValueError):  # raises in its own batch's turn
            for part in [first, *parts]:
                yield from split([part])
        if error is not None:
            raise error


def take_rows(column: Any, indices: np.ndarray) -> np.ndarray:
    """Returns rows of an array or a tensor on the host."""
    if not isinstance(column, np.ndarray):
        # Make the view anew each time. torch moves tensors to shared memory when it
        # sends them to workers; an older view would then point to freed memory.
        column = as_numpy(column)
    return column.take(indices, axis=0)
