"""How far the host runs ahead of the device."""

import collections
import operator
from collections.abc import Callable
from typing import Final

from jaxtyping import Array

from ..step import IN_FLIGHT

# waits for the device
wait: Final[Callable[[Array], object]] = operator.methodcaller("block_until_ready")
"""Waits for the device to be done with an array."""

_Check = Callable[[Array], None] | None


class InFlight:
    """Bounds how far the host runs ahead of the device."""

    def __init__(self) -> None:
        self.wait: Callable[[Array], object] = wait
        self._waiting: collections.deque[tuple[Array, _Check]] = collections.deque()

    def add(self, array: Array, most: int = IN_FLIGHT, check: _Check = None) -> None:
        """Counts a dispatch by one of its results; waits for the one `most` ago, which
        is then checked."""
        self._waiting.append((array, check))
        while len(self._waiting) > most:
            self._wait_for_first()

    def check_all(self) -> None:
        """Waits until all is checked that was to be."""
        while any(check is not None for _, check in self._waiting):
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        array, check = self._waiting.popleft()
        self.wait(array)
        if check is not None:
            check(array)
