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
        if isinstance(loader, torch.utils.data.Dataset):
            raise TypeError(
                f"`{argument}` is a {type(loader).__name__}, a torch Dataset, which"
                " gives single examples; wrap it: torch.utils.data.DataLoader(dataset,"
                " batch_size)."
            )

    # Any iterable of batches, but not one of other items.
    arrays = loader if isinstance(loader, tuple) else (loader,)
    is_array = [hasattr(array, "dtype") for array in arrays]
    may_be = [isinstance(array, Mapping) for array in arrays]  # a tree of arrays
    if any(is_array) and all(map(operator.or_, is_array, may_be)):
        kind = "a tuple of arrays"
        if arrays is not loader:
            kind = f"an array of shape {arrays[0].shape}"
        raise TypeError(
            f"`{argument}` is {kind}, not an iterable of batches. Of arrays x and y"
            " pass one loader of both: jaxdp.Arrays(x, y, batch_size=32); of x alone,"
            " jaxdp.Arrays(x)."
        )
    is_iterable = isinstance(loader, Iterable) or hasattr(loader, "__getitem__")
    if not is_iterable or isinstance(loader, str | bytes | dict):
        raise TypeError(
            f"`{argument}` is a {type(loader).__name__}, not an iterable of batches;"
            " pass a DataLoader, a list or a generator of (x, y) batches, or of arrays"
            " jaxdp.Arrays(x, y, batch_size=32). (The trainer has its model:"
            " Trainer(model).fit(loader).)"
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
