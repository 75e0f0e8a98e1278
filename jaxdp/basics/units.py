"""Formats numbers for people: bytes, seconds, percentages."""

import math
from typing import Final

_PARTS: Final = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
_POWERS: Final = [(1000.0 ** (6 - n), prefix) for n, prefix in enumerate("EPTGMk")]


def format_bytes(number: float) -> str:
    """Formats `12345678` as `12.35 MB`."""
    return format_short(number) + "B" if number >= 1000 else f"{number:.0f} B"


def format_seconds(number: float) -> str:
    """Formats `0.0123` as `12.3 ms`, 125 as `2 min 5 s`."""
    if number >= 59.5:
        minutes, seconds = divmod(round(number), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
    for unit, size in _PARTS:
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number * 1e9:.3g} ns"


def format_short(number: float) -> str:
    """Formats `12345678` as `12.35 M`, by powers of 1000."""
    for size, prefix in _POWERS:
        if abs(number) >= size:
            return f"{number / size:.4g} {prefix}"
    return f"{number:.4g} "


def format_percent(share: float) -> str:
    """Formats a share with three digits: 43.2%, 0.0259%; "-" if it is not finite."""
    return f"{100 * share:.3g}%" if math.isfinite(share) else "-"


def format_number(value: float) -> str:
    """Formats a number in short: 0.001, 12, 13.1 k, 5 M; "-" if it is not finite."""
    return format_short(value).rstrip() if math.isfinite(value) else "-"
