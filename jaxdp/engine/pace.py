"""How far the host runs ahead of the device."""

import collections
import operator
from collections.abc import Callable, Iterable
from typing import Any, Final

import jax
from jaxtyping import Array

from ..basics.hardware import get_smallest_memory
from ..step import IN_FLIGHT
from .out_of_memory import check_late

BYTES_IN_FLIGHT: Final = 0.05
"""Of a device's memory, at most, that batches take which wait for their step."""

LEAST_IN_FLIGHT: Final = 2
"""Dispatches, however large: with one, the device would wait for the host."""

# waits for the device
wait: Final[Callable[[Array], object]] = operator.methodcaller("block_until_ready")
"""Waits for the device to be done with an array."""


class InFlight:
    """Bounds how far the host runs ahead of the device.

    Attributes:
        most_bytes: of batches in flight, per device, if that is bounded.
    """

    def __init__(self) -> None:
        self.wait: Callable[[Array], object] = wait
        self.most_bytes: float = float("inf")
        self._waiting: collections.deque[tuple[Array, int]] = collections.deque()
        self._bytes = 0

    def add(self, array: Array, nbytes: int, most: int = IN_FLIGHT) -> None:
        """Counts a dispatch by one of its results, and the bytes of its batches; waits
        for the one `most` ago, or for more."""
        self._waiting.append((array, nbytes))
        self._bytes += nbytes
        while len(self._waiting) > most or (
            self._bytes > self.most_bytes and len(self._waiting) > LEAST_IN_FLIGHT
        ):
            first, first_bytes = self._waiting.popleft()
            self._bytes -= first_bytes
            try:
                self.wait(first)
            except jax.errors.JaxRuntimeError as error:
                check_late(error)
                raise


def most_bytes_in_flight(devices: Iterable[Any]) -> float:
    """What batches may take of a device, of several that of the smallest.

    CPUs and other devices that do not tell how much they have are not bounded.
    """
    memory = get_smallest_memory(devices)
    return float("inf") if memory is None else BYTES_IN_FLIGHT * memory


def num_in_flight(nbytes: int, memory: float) -> int:
    """How many dispatches of so many bytes are in flight on a device at most."""
    fitting = int(BYTES_IN_FLIGHT * memory // max(1, nbytes))
    return min(max(fitting, LEAST_IN_FLIGHT), IN_FLIGHT)
