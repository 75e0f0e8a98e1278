"""What a user passed as a loader, made a source of batches."""

import sys
from collections.abc import Iterable
from typing import Any

from .shares import Share
from .source import ALL, Source


def open_loader(loader: Any, argument: str, seed: int, share: Share = ALL) -> Source:
    """The source of batches for what a user passed as `argument`.

    Raises:
        TypeError: if it is not an iterable of batches.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        if isinstance(loader, torch.utils.data.DataLoader):
            from .torch_source import TorchSource

            return TorchSource(loader, argument, seed, share)
        if isinstance(loader, torch.utils.data.IterableDataset):
            from .torch_source import SeededSource

            return SeededSource(loader, argument, seed, share)
        if isinstance(loader, torch.utils.data.Dataset):
            raise TypeError(
                f"`{argument}` is a {type(loader).__name__}, a torch Dataset, which"
                " gives single examples; wrap it: torch.utils.data.DataLoader(dataset,"
                " batch_size)."
            )
    if hasattr(loader, "dtype") or isinstance(loader, str | bytes | dict):
        raise TypeError(
            f"`{argument}` is a {type(loader).__name__}, not an iterable of batches;"
            " pass a DataLoader, a list or a generator of (x, y) batches."
        )
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise TypeError(
            f"`{argument}` is a {type(loader).__name__} and can't be iterated; pass a"
            " DataLoader, a list or a generator of batches."
        )
    return Source(loader, argument, share)
