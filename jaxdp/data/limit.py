"""How many batches a limit lets through: a number of them, or a share of an epoch."""

from typing import Any

import numpy as np


def check_limit(name: str, limit: Any) -> None:
    """Raises unless `limit` is None, a number of batches or a share of them."""
    if limit is None:
        return
    is_whole = isinstance(limit, int | np.integer) and not isinstance(limit, bool)
    if not is_whole and not isinstance(limit, float):
        raise TypeError(
            f"`{name}` must be an int (batches) or a float (share of them); got"
            f" {limit!r} of type {type(limit).__name__}."
        )
    if is_whole and limit < 0:
        raise ValueError(f"`{name}` must be 0 or more batches; got {limit}.")
    if not is_whole and not 0 <= limit <= 1:
        raise ValueError(f"`{name}` as a share must be from 0.0 to 1.0; got {limit}.")


def capped(name: str, limit: int | float | None, available: int | None) -> int | None:
    """`limit` in batches: a float is a share of the `available` ones."""
    check_limit(name, limit)
    if limit is None or (isinstance(limit, float) and limit == 1.0):
        return None  # all of them, however many come
    if not isinstance(limit, float):
        return int(limit)
    if available is None:
        raise ValueError(
            f"`{name}`={limit} is a share of an epoch, and the length of the loader is"
            " not known; pass a number of batches."
        )
    count = int(available * limit)
    if count == 0 and limit and available:
        raise ValueError(
            f"`{name}`={limit} of {available} batches is less than one batch; pass a"
            " larger share, a number of batches, or 0 for none."
        )
    return count
