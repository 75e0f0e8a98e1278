"""What a user passed as a loader, made a source of batches."""

import sys
from collections.abc import Iterable
from typing import Any

import jax

from .portions import Share
from .source import ALL, Source


def open_loader(loader: Any, argument: str, seed: int, share: Share = ALL) -> Source:
    """The source of batches for what a user passed as `argument`.

    Raises:
        TypeError: if it is not an iterable of batches.
        ValueError: if it is `OnDevice`, in one of several processes.
    """
    on_device = sys.modules.get(f"{__package__}.on_device")
    if on_device is not None and isinstance(loader, on_device.OnDevice):
        if jax.process_count() > 1:
            raise ValueError(
                f"`{argument}` is OnDevice, and this is one of {jax.process_count()}"
                " processes, each of which loads rows of its own; pass the loader"
                " itself."
            )
        return on_device.OnDeviceSource(loader, argument, seed, share)
    torch = sys.modules.get("torch")
    if torch is not None:
        if isinstance(loader, torch.utils.data.DataLoader):
            from .torch_loader import TorchSource

            return TorchSource(loader, argument, seed, share)
        if isinstance(loader, torch.utils.data.IterableDataset):
            from .torch_loader import SeededSource

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
