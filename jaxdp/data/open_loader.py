"""Makes the source of a user's loader; refuses other objects."""

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import jax

from ..basics.arguments import is_int
from ..basics.console import add_article
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
    details = loader, argument, partition, seed
    if isinstance(loader, Arrays):
        return ArraysSource(*details, in_order=in_order)
    is_dataset = False
    if torch := sys.modules.get("torch"):
        data = torch.utils.data
        if isinstance(loader, data.DataLoader):
            from .torch_source import make_torch_source

            return make_torch_source(*details)
        if isinstance(loader, data.IterableDataset):
            return IterableSource(*details)
        is_dataset = isinstance(loader, data.Dataset)

    is_batch = False  # a single one, of arrays or trees of them
    if isinstance(loader, tuple):
        kinds = {hasattr(x, "dtype") for x in loader if not isinstance(x, Mapping)}
        is_batch = kinds == {True}
    if is_dataset or is_batch or not _is_iterable(loader):
        kind = add_article(type(loader).__name__) + " of arrays" * is_batch
        is_epochs = argument == "val_loader" and is_int(loader)
        hint = f" (For {loader} epochs: max_epochs={loader}.)" if is_epochs else ""
        raise TypeError(
            f"`{argument}` is {kind}, not an iterable of batches; pass a list or a"
            " generator of (x, y) batches. For arrays x and y pass one loader of both,"
            " jaxdp.Arrays(x, y, batch_size=32), for x alone jaxdp.Arrays(x), and for a"
            " table the arrays of its `to_numpy()`; for a dataset of examples,"
            " torch.utils.data.DataLoader(dataset, batch_size). (The trainer has its"
            f" model: Trainer(model).fit(loader).){hint}"
        )
    if not isinstance(loader, list | tuple):
        # It draws from global generators as the user has seeded them.
        return IterableSource(*details, seeds_draws=False)
    all_leaves = jax.tree_util.all_leaves  # a loader is a leaf, a batch is not
    if loader and all(_is_iterable(item) and all_leaves([item]) for item in loader):
        raise TypeError(
            f"`{argument}` is a {type(loader).__name__} of {len(loader)} loaders, and"
            " must be one. To validate or test on several, name them: {'clean': a,"
            " 'shifted': b}."
        )
    return ListSource(*details)


def _is_iterable(item: Any) -> bool:
    """Returns whether an item may yield batches."""
    is_table = hasattr(item, "to_numpy") and hasattr(item, "columns")
    is_array = hasattr(item, "dtype") or is_table
    is_other = is_array or isinstance(item, str | bytes | Mapping)
    return not is_other and (isinstance(item, Iterable) or hasattr(item, "__getitem__"))
