"""What callbacks share: judging values, reading them late, telling the user."""

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..basics.console import say

if TYPE_CHECKING:
    from jaxdp import Trainer

LAG: Final = 8
"""Steps to stay behind the newest one when reading: never more are in flight, but for
blocks of steps, whose metrics say how far behind to stay."""


def check_monitor(trainer: "Trainer", callback_name: str, monitor: str) -> None:
    """Raises when no epoch will have a value of the name `monitor`."""
    logged = tuple(trainer.run.logged_names)
    if monitor in logged:
        return
    hint = ""
    if monitor.startswith("val_") and not any(n.startswith("val_") for n in logged):
        hint = " Names with `val_` need a `val_loader` in `fit`."
    raise ValueError(
        f"`{callback_name}(monitor={monitor!r})`: nothing of that name is logged; what"
        f" is logged: {', '.join(map(repr, logged))}.{hint}"
    )


def is_better(
    mode: str, value: float, best: float | None, min_delta: float = 0.0
) -> bool:
    """Whether `value` beats `best` by more than `min_delta`.

    NaN beats nothing, and every other value beats NaN and None.
    """
    if math.isnan(value):
        return False
    if best is None or math.isnan(best):
        return True
    if mode == "min":
        return value < best - min_delta
    return value > best + min_delta


class LateReads:
    """Metrics of past steps, handed back once the device is surely done with them.

    Reading the metrics of a step waits for it. Those given back here are so old that
    the trainer does not have them in flight any more.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Any, Mapping[str, Any]]] = deque()

    def push(self, step: int, tag: Any, metrics: Mapping[str, Any]) -> None:
        """Keeps `metrics` of step number `step`, with anything to remember it by."""
        self._waiting.append((step, tag, metrics))

    def ready(self, step: int) -> Iterator[tuple[Any, Mapping[str, Any]]]:
        """What can be read without a wait now that `step` was dispatched."""
        while self._waiting:
            pushed, tag, metrics = self._waiting[0]
            if pushed + getattr(metrics, "steps_in_flight", LAG) > step:
                return
            self._waiting.popleft()
            yield tag, metrics

    def drain(self) -> Iterator[tuple[Any, Mapping[str, Any]]]:
        """All the rest, waiting for the device. For the ends of epochs and fits."""
        while self._waiting:
            _, tag, metrics = self._waiting.popleft()
            yield tag, metrics

    def __len__(self) -> int:
        return len(self._waiting)


class Later:
    """A number that is worked out when it is read, for `Metrics.add`."""

    def __init__(self, function: Callable[[], float]):
        self._function = function

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self._function(), np.float32 if dtype is None else dtype)


def announce(trainer: "Trainer", callback_name: str, text: str) -> None:
    """Tells the user something, once for all processes."""
    if trainer.is_global_zero:
        say(f"{callback_name}: {text}")


def in_notebook() -> bool:
    """Whether a notebook runs this process, and so can show pictures."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")
