"""How many optimizer steps a dispatch takes: a number, or one found by timing some."""

import collections
import math
from collections.abc import Callable
from typing import Final

from ..basics.console import say
from ..distributed import find_processes

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
