"""Limits on how far the host runs ahead of the device.

Metrics wait in `Record` (`record.py`).
"""

import collections
import operator
from collections.abc import Callable
from typing import Final

import jax
from jaxtyping import Array

from ..step import IN_FLIGHT
from .out_of_memory import add_remedies

MAX_PART_IN_FLIGHT: Final = 0.05
"""The maximum part of a device's memory for batches that wait for their step."""

_MIN_IN_FLIGHT: Final = 2
"""The minimum limit: with one dispatch in flight, the device would wait for the host.
"""

# waits for the device
wait: Final[Callable[[Array], object]] = operator.methodcaller("block_until_ready")
"""Waits for the device to finish an array."""


class InFlightQueue:
    """Bounds the dispatches, and the bytes of their batches, that a device has queued.

    Attributes:
        wait: blocks until an array is computed.
        max_bytes: of the batches in flight, per device.
    """

    def __init__(self) -> None:
        self.wait: Callable[[Array], object] = wait
        self.max_bytes: float = float("inf")
        self._waiting: collections.deque[tuple[Array, int]] = collections.deque()
        self._bytes = 0

    def add(self, array: Array, nbytes: int, max_dispatches: int = IN_FLIGHT) -> None:
        """Counts a dispatch by one of its results and the bytes of its batches.

        Waits for the oldest dispatches while too many dispatches, or too many bytes,
        are in flight.
        """
        self._waiting.append((array, nbytes))
        self._bytes += nbytes
        while len(self._waiting) > max_dispatches or (
            self._bytes > self.max_bytes and len(self._waiting) > _MIN_IN_FLIGHT
        ):
            oldest, oldest_bytes = self._waiting.popleft()
            self._bytes -= oldest_bytes
            try:
                self.wait(oldest)
            except jax.errors.JaxRuntimeError as error:
                add_remedies("an earlier step", error)
                raise


def num_in_flight(nbytes: int, memory: float) -> int:
    """Returns the maximum number of dispatches of `nbytes` each on a device."""
    fitting = int(MAX_PART_IN_FLIGHT * memory // max(1, nbytes))
    return min(max(fitting, _MIN_IN_FLIGHT), IN_FLIGHT)
