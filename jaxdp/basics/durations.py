"""Spans of time, in the ways that users write them."""

import datetime
from collections.abc import Mapping
from typing import Any, Final

Duration = str | datetime.timedelta | Mapping[str, float] | int | float

_UNITS: Final = ("weeks", "days", "hours", "minutes", "seconds")


def parse_duration(duration: Any, argument: str = "duration") -> float:
    """Seconds in a duration.

    Args:
        duration: `"DD:HH:MM:SS"`, a `datetime.timedelta`, a dict of its keywords, or
            seconds.
        argument: how errors call it.
    """
    seconds = _seconds(duration, argument)
    if not 0 <= seconds < float("inf"):
        raise ValueError(
            f"`{argument}`={duration!r} is {seconds} seconds; it must be finite and not"
            " negative."
        )
    return seconds


def _seconds(duration: Any, argument: str) -> float:
    if isinstance(duration, datetime.timedelta):
        return duration.total_seconds()
    if isinstance(duration, str):
        parts = duration.strip().split(":")
        if len(parts) != 4 or not all(part.isdecimal() for part in parts):
            raise ValueError(
                f"`{argument}`={duration!r} must read 'DD:HH:MM:SS', such as"
                " '00:08:30:00' for eight and a half hours."
            )
        days, hours, minutes, seconds = map(int, parts)
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    if isinstance(duration, Mapping):
        try:
            return datetime.timedelta(**duration).total_seconds()
        except TypeError as error:
            raise ValueError(
                f"`{argument}`={duration!r} must have numbers for some of"
                f" {', '.join(map(repr, _UNITS))}."
            ) from error
    if isinstance(duration, int | float) and not isinstance(duration, bool):
        return float(duration)
    raise TypeError(
        f"`{argument}` is a {type(duration).__name__}, {duration!r}; it must be a"
        " 'DD:HH:MM:SS' string, a datetime.timedelta, a dict or a number of seconds."
    )
