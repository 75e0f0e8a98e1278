"""What callbacks share: judging values, reading them late, telling the user."""

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from ..basics.arguments import check_choice, check_count, check_number
from ..basics.console import say
from .base import Callback, Trainer

LAG: Final = 8
"""Steps to stay behind the newest one when reading: never more are in flight, but for
blocks of steps, whose metrics say how far behind to stay."""


def check_monitor(
    trainer: Trainer,
    callback: Callback,
    monitor: str,
    metrics: Mapping[str, float] | None = None,
) -> None:
    """Raises if a fit that starts will have no value of the name `monitor`, or, given
    its `metrics`, if an epoch that ends should have had one."""
    run = trainer.run
    logged = run.logged_names if metrics is None else tuple(metrics)
    is_of_validation = monitor.startswith("val_")
    if metrics is None:
        # A user's callback may log it, and a metric of a pass may have any values.
        roots = {type(other).__module__.split(".")[0] for other in trainer.callbacks}
        is_open = is_of_validation and bool(run.pass_metrics)
        may_come = is_open or bool(roots - {__name__.split(".")[0]})
    else:
        is_next = is_of_validation and not run.progress.val_metrics
        is_later = is_next and any(n.startswith("val_") for n in run.logged_names)
        may_come = is_later or monitor in trainer.history
    if monitor in logged or may_come:
        return

    hint = ""
    if is_of_validation and not any(name.startswith("val_") for name in logged):
        hint = " Names with `val_` need a `val_loader` in `fit`."
    raise ValueError(
        f"`{type(callback).__name__}(monitor={monitor!r})`: nothing of that name is"
        f" logged; what is logged: {', '.join(map(repr, logged))}.{hint}"
    )


def is_better(
    mode: str, value: float, best: float | None, min_delta: float = 0.0
) -> bool:
    """Whether `value` beats `best` by more than `min_delta`.

    NaN beats nothing, and every other value beats NaN and None.
    """
    if math.isnan(value) or best is None or math.isnan(best):
        return not math.isnan(value)
    return value < best - min_delta if mode == "min" else value > best + min_delta


class MetricCheck(Callback):
    """Checks one value after every validation of a fit that has it, or else after every
    epoch that has; counts the checks without improvement."""

    skip_in_fast_dev_run = True
    only_in_training = True
    reads_logged = True

    def __init__(self, monitor: str, patience: int, min_delta: float, mode: str):
        if not isinstance(monitor, str):
            raise TypeError(f"`monitor` must be the name of a metric; got {monitor!r}.")
        check_choice("mode", mode, ("min", "max"))
        check_count("patience", patience, least=0)
        way = "; `mode` says in which direction"
        check_number("min_delta", min_delta, least=0, or_else=way)
        self.monitor = monitor
        self.patience = int(patience)
        self.min_delta = float(min_delta)
        self.mode = mode
        self.wait_count = 0
        self.best_score: float | None = None

    def check(self, trainer: Trainer, value: float) -> None:
        """What a subclass does about a new value."""
        raise NotImplementedError

    def improves(self, value: float) -> bool:
        """Whether `value` is the best so far, which is then kept."""
        if not is_better(self.mode, value, self.best_score, self.min_delta):
            return False
        self.best_score, self.wait_count = value, 0
        return True

    def not_improved(self) -> str:
        """What has happened, in words."""
        best = "none" if self.best_score is None else f"{self.best_score:.6g}"
        checks = "check" if self.wait_count == 1 else "checks"
        return (
            f"{self.monitor} did not improve on {best} for {self.wait_count} {checks}"
        )

    def on_fit_start(self, trainer: Trainer) -> None:
        check_monitor(trainer, self, self.monitor)

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        if trainer.run.is_fitting and self.monitor in metrics:
            self.check(trainer, metrics[self.monitor])

    def on_train_epoch_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        check_monitor(trainer, self, self.monitor, metrics)
        was_checked = self.monitor in trainer.run.progress.val_metrics
        if self.monitor in metrics and not was_checked:
            self.check(trainer, metrics[self.monitor])

    def identity(self, trainer: Trainer) -> str:
        return f"{self.monitor}\n{self.mode}"

    def state_dict(self) -> dict[str, Any]:
        best = None if self.best_score is None else str(self.best_score)
        return {"wait_count": self.wait_count, "best_score": best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wait_count, best = state["wait_count"], state["best_score"]
        self.best_score = None if best is None else float(best)


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
        # on the host
        return np.asarray(self._function(), np.float32 if dtype is None else dtype)


def announce(trainer: Trainer, callback_name: str, text: str) -> None:
    """Tells the user something, once for all processes."""
    if trainer.is_global_zero:
        say(f"{callback_name}: {text}")


def in_notebook() -> bool:
    """Whether a notebook runs this process, and so can show pictures."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")
