"""How many steps the device gets at a time, and how far the host runs ahead of it."""

import collections
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, Final

import jax
from jaxtyping import Array

from ..basics.console import say
from ..basics.hardware import least_memory
from ..distributed import find_processes
from ..step import IN_FLIGHT
from .out_of_memory import check_late

_LONG_STEP: Final = 0.005
_ENOUGH_SECONDS: Final = 0.05
_MOST_STEPS: Final = 64
_MOST_BYTES: Final = 2**26
"""What "auto" aims at: steps no longer than the first of them, in dispatches that keep
the device busy for as long as the second (a hundred arrays take a millisecond to
dispatch), of at most so many steps and bytes of batches."""

_TRIAL_STEPS: Final = 8
_MOST_SIZES: Final = 4
"""Numbers of steps that are compiled for; others run step by step."""


class DispatchSize:
    """The present number, and which smaller ones are worth a program.

    Args:
        steps: `Trainer(steps_per_execution=)`.

    Attributes:
        steps: per dispatch, at most.
        is_on_trial: whether single steps are timed, to find a number.
    """

    def __init__(self, steps: int | str):
        self.is_on_trial = steps == "auto"
        self.steps = 1 if self.is_on_trial else int(steps)
        self._seconds: list[float] = []
        self._seen: collections.Counter[int] = collections.Counter()

    def is_worth_compiling(self, steps: int) -> bool:
        """Whether so many steps at a time are common enough for their own program."""
        if self.steps in (1, steps):
            return self.steps == steps
        self._seen[steps] += 1
        often = [size for size, count in self._seen.most_common() if count > 1]
        return steps in often[:_MOST_SIZES]

    def time(
        self,
        seconds: float,
        size: int,
        epoch: int | None,
        loops_well: Callable[[], bool],
    ) -> None:
        """Takes the time of a single step; the last one needed ends the trial.

        Args:
            seconds: of the step.
            size: of its batches, in bytes.
            epoch: the number of steps in one, if it is known.
            loops_well: tells whether a loop over steps is as fast as they are.
        """
        self._seconds.append(seconds)
        if len(self._seconds) < _TRIAL_STEPS:
            return
        self.is_on_trial = False
        seconds = min(self._seconds[2:])

        # One process's clock decides for all.
        seconds = find_processes().first("steps_per_execution", lambda: seconds)
        enough = math.ceil(_ENOUGH_SECONDS / seconds)
        most = min(_MOST_STEPS, enough, _MOST_BYTES // size)

        # As many as are quick enough, and divide an epoch well.
        if seconds > _LONG_STEP or most < 2:
            most = 1
        elif not loops_well():  # which has said so
            return
        elif epoch is not None:
            # The steps left over at an epoch's end have no program of their own at
            # first, so a size that leaves few is better than the largest one.
            most = min(most, epoch)
            most = min(range(most, most // 2, -1), key=lambda size: epoch % size)

        self.steps = most
        say(
            f"`steps_per_execution`='auto': {most} at a time, because a step takes"
            f" {seconds * 1e3:.3g} ms"
        )


BYTES_IN_FLIGHT: Final = 0.05
"""Of a device's memory, at most, that batches take which wait for their step."""

LEAST_IN_FLIGHT: Final = 2
"""Dispatches, however large: with one, the device would wait for the host."""

# waits for the device
wait: Final[Callable[[Array], object]] = operator.methodcaller("block_until_ready")
"""Waits for the device to be done with an array."""

Check = Callable[[Array], None]
"""Raises for what a result of a step, that is there, shows to be wrong."""


class InFlight:
    """Bounds how far the host runs ahead of the device.

    Attributes:
        most_bytes: of batches in flight, per device, if that is bounded.
    """

    def __init__(self) -> None:
        self.wait: Callable[[Array], object] = wait
        self.most_bytes: float = float("inf")
        self._waiting: collections.deque[tuple[Array, int, tuple[Check, ...]]] = (
            collections.deque()
        )
        self._bytes = self._to_check = 0

    def add(
        self,
        array: Array,
        nbytes: int,
        checks: tuple[Check, ...] = (),
        most: int = IN_FLIGHT,
    ) -> None:
        """Counts a dispatch by one of its results, and the bytes of its batches; waits
        for the one `most` ago, which is then checked, or for more."""
        self._waiting.append((array, nbytes, checks))
        self._bytes += nbytes
        self._to_check += len(checks)
        while len(self._waiting) > most or (
            self._bytes > self.most_bytes and len(self._waiting) > LEAST_IN_FLIGHT
        ):
            self._wait_for_first()

    def check_all(self) -> None:
        """Waits until all is checked that was to be."""
        while self._to_check:
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        array, nbytes, checks = self._waiting.popleft()
        self._bytes -= nbytes
        self._to_check -= len(checks)
        try:
            self.wait(array)
        except jax.errors.JaxRuntimeError as error:
            check_late(error)
            raise
        for check in checks:
            check(array)


def most_bytes_in_flight(devices: Iterable[Any]) -> float:
    """What batches may take of a device, of several that of the smallest.

    CPUs and other devices that do not tell how much they have are not bounded.
    """
    memory = least_memory(devices)
    return float("inf") if memory is None else BYTES_IN_FLIGHT * memory


def num_in_flight(nbytes: int, memory: float) -> int:
    """How many dispatches of so many bytes are in flight on a device at most."""
    fitting = int(BYTES_IN_FLIGHT * memory // max(1, nbytes))
    return min(max(fitting, LEAST_IN_FLIGHT), IN_FLIGHT)
