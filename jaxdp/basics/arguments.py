"""Checks of single arguments, with errors that name them."""

import contextlib
import datetime
import math
import numbers
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"`{name}` must be one of {listed}; got {value!r}.")


def check_count(
    name: str, value: Any, least: int = 1, most: int | None = None, *, or_else: str = ""
) -> None:
    """Raises unless `value` is an int, or NumPy's, from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        kind = type(value).__name__
        raise TypeError(
            f"`{name}` must be an int{or_else}; got {value!r} of type {kind}."
        )
    if value < least:
        raise ValueError(f"`{name}` must be {least} or more{or_else}; got {value}.")
    if most is not None and value > most:
        raise ValueError(f"`{name}` must be {most} or less{or_else}; got {value}.")


def check_number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    or_else: str = "",
) -> None:
    """Raises unless `value` is a number in bounds; of these `least` is in bounds."""
    is_number = isinstance(value, numbers.Real) or getattr(value, "ndim", None) == 0
    if isinstance(value, bool) or not is_number:
        raise TypeError(
            f"`{name}` must be a number{or_else}; got {value!r} of type"
            f" {type(value).__name__}."
        )

    value = float(value)
    rules = {
        f"{least} or more": least is None or value >= least,
        f"more than {above}": above is None or value > above,
        f"less than {below}": below is None or value < below,
    }
    if math.isnan(value) or not all(rules.values()):
        rule = " and ".join(rule for rule in rules if "None" not in rule)
        raise ValueError(
            f"`{name}` must be {rule or 'a number'}{or_else}; got {value!r}."
        )


def check_is_local(name: str, path: str | os.PathLike[str]) -> None:
    """Raises where `path` is an address, such as `gs://...`, and no file."""
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:/", os.fspath(path)):  # C:/ is a file
        raise ValueError(
            f"`{name}` must be in a file system; got {os.fspath(path)!r}, which"
            " would mean a folder on this disk. Mount the remote folder and pass its"
            ' path here, or copy the files: docs/checkpoints.md, "Buckets".'
        )


def as_number(value: Any) -> float | None:
    """A single number of any kind as a float, an array of one too; else None.

    Waits for the device if it is there.
    """
    array = np.asarray(value)
    is_number = array.dtype.kind in "biuf" or array.dtype.name == "bfloat16"
    is_single = array.ndim == 0 or (array.size == 1 and hasattr(value, "dtype"))
    return float(array.item()) if is_number and is_single else None


Duration = str | datetime.timedelta | Mapping[str, float] | int | float
_KINDS: Final = str, datetime.timedelta, Mapping, int, float


def parse_duration(duration: Any, argument: str = "duration") -> float:
    """Seconds in a duration; `argument` is how errors call it."""
    span = duration
    if isinstance(span, str) and re.fullmatch(r"\s*\d+(:\d+){3}\s*", span):
        names = "days", "hours", "minutes", "seconds"
        span = dict(zip(names, map(int, span.split(":")), strict=True))
    if isinstance(span, Mapping):
        with contextlib.suppress(TypeError):  # of other keywords
            span = datetime.timedelta(**span)
    if isinstance(span, datetime.timedelta):
        span = span.total_seconds()

    seconds = math.nan
    if isinstance(span, int | float) and not isinstance(span, bool):
        seconds = float(span)
    if not 0 <= seconds < math.inf:
        is_span = isinstance(duration, _KINDS) and not isinstance(duration, bool)
        raise (ValueError if is_span else TypeError)(
            f"`{argument}`={duration!r} must be 'DD:HH:MM:SS', such as '00:08:30:00'"
            " for eight and a half hours, a datetime.timedelta, a dict of its keywords"
            " (days, hours, minutes, ...), or a number of seconds; finite and not"
            " negative."
        )
    return seconds
