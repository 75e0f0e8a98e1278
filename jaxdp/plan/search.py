"""The search for the largest batch that fits."""

import math
from collections.abc import Callable, Mapping


def largest(peak: Callable[[int], float], limit: int, start: int = 1) -> int:
    """The largest number whose peak is within the limit, if peaks grow with it.

    A peak is nearly a constant and a part in proportion, so the line through two of
    them leads close, and a few more compilations decide.
    """
    known: dict[int, float] = {}

    def fits(number: int) -> bool:
        if number not in known:
            known[number] = peak(number)
        return known[number] <= limit

    low, high = 0, None
    number = start
    while True:
        if fits(number):
            low = number
        else:
            high = number
        if high == low + 1:
            return low
        guess = _on_the_line(known, limit)
        if high is None:
            # Never more than 16 times at once, lest a program takes long to compile.
            number = max(low + 1, min(2 * low if guess is None else guess, 16 * low))
        else:
            middle = (low + high) // 2
            number = middle if guess is None else min(max(guess, low + 1), high - 1)
            if len(known) > 8:
                number = middle
            # A peak that moves in steps (of padding, of tiles) may lie off the line.
            if number in known:
                number = middle
        if high is None and number >= 1 << 40:
            return number


def _on_the_line(known: Mapping[int, float], limit: int) -> int | None:
    """Where the line through the two last known peaks around the limit reaches it."""
    if len(known) < 2:
        return None
    below = sorted(n for n in known if known[n] <= limit)
    above = sorted(n for n in known if limit < known[n] < math.inf)
    pair = (below + above)[-2:] if not above else (below[-1:] + above[:2])[:2]
    if len(pair) < 2:
        return None
    (x, y), (u, v) = ((n, known[n]) for n in pair)
    if v <= y:
        return None
    return int(x + (limit - y) * (u - x) / (v - y))
