"""Values that callbacks log, on their way to rows, means and the history."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..basics.arguments import as_number
from ..distributed import Processes
from ..step import Metrics
from .progress import Progress


class Logged:
    """Takes the values that hooks give to `Trainer.log` to where they belong.

    From the hooks of a validation they go to its values, from those at the end of an
    epoch or a fit to what these log, and from all others to the row of the step and to
    the epoch, which has the last one of each name.

    Attributes:
        row: the metrics of the step whose hooks run, or None.
    """

    def __init__(self, processes: Processes, progress: Progress):
        self.row: Metrics | None = None
        self._processes, self._progress = processes, progress
        self._values: dict[str, float] | None = None
        self._added: dict[str, float] = {}
        self._before_a_row: dict[str, float] = {}
        self._own: set[str] = set()
        self._last_row: Metrics | None = None
        self._older: dict[str, float] = {}  # than that row
        self._newer: dict[str, float] = {}
        self._has_steps = False

    @property
    def is_open(self) -> bool:
        """Whether values belong somewhere, though no fit may be running."""
        return self._values is not None or self._has_steps

    def log(self, name: str, value: Any, taken: tuple[str, ...]) -> None:
        """`Trainer.log`; `taken` are the names of the trainer's own values."""
        given = self._values if self._values is not None else self.row or {}
        if not isinstance(name, str):
            raise TypeError(f"`log`: `name` must be a str; got {name!r}.")
        is_taken = name in ("epoch", "step", *taken) or name in (*given,)
        if is_taken and name not in self._own:
            raise ValueError(
                f"`log`: the name {name!r} is taken by a value that is logged anyway;"
                " use another one."
            )
        number = self._processes.first(f"log({name!r})", lambda: _number(name, value))
        self._own.add(name)
        self._newer[name] = number

        if self._values is not None:
            self._values[name] = self._added[name] = number
            return
        self._progress.logged[name] = number
        if self.row is None:
            self._before_a_row[name] = number
        else:
            self.row.add({name: number})

    def of_step(self, metrics: Metrics) -> None:
        """From now on hooks are those of the step with these metrics."""
        self.row = self._last_row = metrics
        if self._newer:
            self._older |= self._newer
            self._newer = {}
        if self._before_a_row:
            metrics.add(self._before_a_row)
            self._before_a_row = {}

    def last_values(self) -> dict[str, float]:
        """The last value of each name; waits for the device."""
        row = {
            # waits for the device
            name: np.asarray(value)
            for name, value in (self._last_row or {}).items()
        }
        of_step = {
            name: float(number) for name, number in row.items() if number.ndim == 0
        }
        return {**self._older, **of_step, **self._newer}

    @contextlib.contextmanager
    def of_own_loop(self) -> Iterator[None]:
        """Inside, there are steps without a fit."""
        self._has_steps = True
        try:
            yield
        finally:
            self.row, self._has_steps = None, False

    @contextlib.contextmanager
    def into(self, values: dict[str, float]) -> Iterator[dict[str, float]]:
        """Inside, what is logged goes into `values`, and alone into what this gives."""
        outer = self._values, self._added
        self._newer |= values
        self.row, self._values, self._added = None, values, {}
        try:
            yield self._added
        finally:
            self._values, self._added = outer


def _number(name: str, value: Any) -> float:
    number = as_number(value)
    if number is None:
        raise TypeError(
            f"`log`: the value of {name!r} must be one number; got {value!r} of type"
            f" {type(value).__name__}."
        )
    return number
