"""From what a user passes as a loader to the source of its batches."""

import itertools
import operator
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import equinox as eqx
import jax

from ..step import NOTHING, Batch
from .arrays import Arrays, ArraysSource
from .shares import Share
from .source import ALL, IterableSource, ListSource, Source


class _NoLoader:
    """Batches for a loss that takes none, without end."""

    def __iter__(self) -> Iterator[Batch]:
        return itertools.repeat(NOTHING)


NO_LOADER: Final = _NoLoader()
"""What is trained on without a loader."""


def open_loader(
    loader: Any, argument: str, seed: int, share: Share = ALL, **of_arrays: Any
) -> Source:
    """The source of batches for what a user passed as `argument`, if it gives some.

    `of_arrays` are further arguments of `ArraysSource`.
    """
    if isinstance(loader, Arrays):
        return ArraysSource(loader, argument, share, seed, **of_arrays)
    torch = sys.modules.get("torch")
    if torch is not None:
        if isinstance(loader, torch.utils.data.DataLoader):
            from .torch_source import torch_source

            return torch_source(loader, argument, share, seed)
        if isinstance(loader, torch.utils.data.IterableDataset):
            return IterableSource(loader, argument, share, seed)
        if isinstance(loader, torch.utils.data.Dataset):
            raise TypeError(
                f"`{argument}` is a {type(loader).__name__}, a torch Dataset, which"
                " gives single examples; wrap it: torch.utils.data.DataLoader(dataset,"
                " batch_size)."
            )

    # Any iterable, but not what iterates over something else.
    arrays = loader if isinstance(loader, tuple) else (loader,)
    is_array = [hasattr(array, "dtype") for array in arrays]
    may_be = [isinstance(array, Mapping) for array in arrays]  # a tree of arrays
    if any(is_array) and all(map(operator.or_, is_array, may_be)):
        what = ", ".join(
            f"an array of shape {array.shape}" if known else "a dict"
            for array, known in zip(arrays, is_array, strict=True)
        )
        what = f"a tuple of {what}" if arrays is loader else what
        raise TypeError(
            f"`{argument}` is {what}, not an iterable of batches. Of arrays x and y"
            " pass one loader of both: jaxdp.Arrays(x, y, batch_size=32); of x alone,"
            " jaxdp.Arrays(x)."
        )
    if isinstance(loader, str | bytes | dict):
        raise TypeError(
            f"`{argument}` is a {type(loader).__name__}, not an iterable of batches;"
            " pass a DataLoader, a list or a generator of (x, y) batches, or of arrays"
            " jaxdp.Arrays(x, y, batch_size=32)."
        )
    if isinstance(loader, list | tuple) and loader and all(map(_is_loader, loader)):
        raise TypeError(
            f"`{argument}` is a {type(loader).__name__} of {len(loader)} loaders, and"
            " must be one. To validate or test on several, name them: {'clean': a,"
            " 'shifted': b}."
        )
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        is_model = isinstance(loader, eqx.Module)
        model = " (The trainer has its model: Trainer(model).fit(loader).)" * is_model
        raise TypeError(
            f"`{argument}` is a {type(loader).__name__} and can't be iterated; pass a"
            f" DataLoader, a list or a generator of batches.{model}"
        )
    if isinstance(loader, list | tuple):
        return ListSource(loader, argument, share)
    return IterableSource(loader, argument, share)


def _is_loader(found: Any) -> bool:
    """Whether it gives batches, and is none itself: no array, no tree of arrays."""
    is_array = hasattr(found, "dtype") or isinstance(found, str | bytes | Mapping)
    gives = isinstance(found, Iterable) or hasattr(found, "__getitem__")
    return gives and not is_array and jax.tree_util.all_leaves([found])
