"""Spans of time, in the ways that users write them."""

import contextlib
import datetime
import math
import re
from collections.abc import Mapping
from typing import Any, Final

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
