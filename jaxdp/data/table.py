"""Batches of a torch `TensorDataset`, whose rows need not be taken apart."""

import itertools
import operator
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from .batches import taken
from .conversion import as_numpy, to_host

_FETCH_AT_ONCE: Final = 2**18
"""Bytes of small batches that are fetched together."""


def table(dataset: Any) -> tuple[tuple[np.ndarray, ...], list[np.ndarray]] | None:
    """The columns of a `TensorDataset`, and indices of subsets of it, outer first."""
    from torch.utils.data import Subset, TensorDataset

    subsets = []
    while type(dataset) is Subset:
        subsets.append(np.asarray(dataset.indices))
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or len(dataset) == 0:
        return None
    columns = [as_numpy(tensor) for tensor in dataset.tensors]
    if any(column is None for column in columns):
        return None
    return tuple([column for column in columns if column is not None]), subsets


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

    def split(parts: list[Any]) -> list[tuple[np.ndarray, ...]]:
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
        batches, start = [], 0
        for part in parts:
            stop = start + len(part)
            batches.append(tuple([column[start:stop] for column in rows]))
            start = stop
        return batches

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
