"""Makes the source of a user's loader; refuses other objects."""

import itertools
import operator
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import jax

from ..step import NOTHING, Batch
from .arrays import Arrays, ArraysSource
from .partition import RowPartition
from .source import ALL_ROWS, IterableSource, ListSource, Source


class _NoLoader:
    """Endless batches for a loss that needs none."""

    def __iter__(self) -> Iterator[Batch]:
        return itertools.repeat(NOTHING)


NO_LOADER: Final = _NoLoader()
"""The training loader if the user passes none."""

_NO_LOADERS: Final = str, bytes, dict
"""Iterables whose items are no batches."""


def open_loader(
    loader: Any,
    argument: str,
    seed: int,
    partition: RowPartition = ALL_ROWS,
    *,
    in_order: bool = False,
) -> Source:
    """Returns the source of a loader that a user passed as `argument`.

    With `in_order`, `Arrays` are not shuffled.
    """
    if isinstance(loader, Arrays):
        return ArraysSource(loader, argument, partition, seed, in_order=in_order)
    torch = sys.modules.get("torch")
    if torch is not None:
        if isinstance(loader, torch.utils.data.DataLoader):
            from .torch_source import make_torch_source

            return make_torch_source(loader, argument, partition, seed)
        if isinstance(loader, torch.utils.data.IterableDataset):
            return IterableSource(loader, argument, partition, seed)

    # Any iterable of batches, but not one of other items.
    is_dataset = torch is not None and isinstance(loader, torch.utils.data.Dataset)
    is_iterable = isinstance(loader, Iterable) or hasattr(loader, "__getitem__")
    arrays = loader if isinstance(loader, tuple) else (loader,)
    is_array = [hasattr(array, "dtype") for array in arrays]
    may_be = [isinstance(array, Mapping) for array in arrays]  # a tree of arrays
    are_arrays = any(is_array) and all(map(operator.or_, is_array, may_be))
    if is_dataset or are_arrays or not is_iterable or isinstance(loader, _NO_LOADERS):
        kind = f"a {type(loader).__name__}" + " of arrays" * isinstance(loader, tuple)
        raise TypeError(
            f"`{argument}` is {kind}, not an iterable of batches; pass a list or a"
            " generator of (x, y) batches; of arrays x and y one loader of both,"
            " jaxdp.Arrays(x, y, batch_size=32), and of x alone jaxdp.Arrays(x); of a"
            " dataset of examples torch.utils.data.DataLoader(dataset, batch_size)."
            " (The trainer has its model: Trainer(model).fit(loader).)"
        )
    if isinstance(loader, list | tuple) and loader and all(map(_is_loader, loader)):
        raise TypeError(
            f"`{argument}` is a {type(loader).__name__} of {len(loader)} loaders, and"
            " must be one. To validate or test on several, name them: {'clean': a,"
            " 'shifted': b}."
        )
    if isinstance(loader, list | tuple):
        return ListSource(loader, argument, partition)
    return IterableSource(loader, argument, partition)


def _is_loader(item: Any) -> bool:
    """Returns whether an item yields batches, and is no batch or array itself."""
    is_array = hasattr(item, "dtype") or isinstance(item, str | bytes | Mapping)
    is_iterable = isinstance(item, Iterable) or hasattr(item, "__getitem__")
    return is_iterable and not is_array and jax.tree_util.all_leaves([item])
