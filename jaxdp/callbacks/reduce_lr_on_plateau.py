"""Lowers the learning rate when training no longer gets better."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ..basics.arguments import check_choice, check_count, check_number
from ..basics.json_checks import fields, maybe, number_text, whole
from ..engine import RATES
from .base import Callback
from .monitor import announce, check_monitor, is_better

if TYPE_CHECKING:
    from jaxdp import Trainer

_SAVED = fields(
    {
        "wait_count": whole(),
        "cooldown_count": whole(),
        "best_score": maybe(number_text()),
    }
)


class ReduceLROnPlateau(Callback):
    """Multiplies the learning rate by `factor` when a monitored value stops improving.

        optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)
        Trainer(model, optimizer, callbacks=[ReduceLROnPlateau(patience=5)])

    A check happens after every validation when `monitor` begins with `val_`, and after
    every training epoch otherwise. The new rate holds from the next step on, without a
    new compilation. Of several learning rates in the optimizer, all are lowered. The
    optimizer must keep its rate where it can be set, in `optax.inject_hyperparams`.

    Args:
        monitor: name of an epoch's value, such as `"val_loss"` or `"accuracy"`.
        factor: what the rate is multiplied by; less than 1.
        patience: after how many checks in a row without improvement.
        verbose: whether to say so.
        mode: `"min"` when smaller is better, `"max"` when larger is; `"auto"` takes
            `"max"` for names with `acc` in them, and `"min"` otherwise.
        min_delta: what counts as improvement: more than this, in the unit of the value.
        cooldown: how many checks after a reduction are not counted.
        min_lr: the rate is never made smaller than this.

    Attributes:
        wait_count: checks since the last improvement, reduction or cooldown.
        cooldown_count: checks of the cooldown that are left.
        best_score: the best value so far; None before the first check.
    """

    skip_in_fast_dev_run = True

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: bool | int = False,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ):
        if not isinstance(monitor, str):
            raise TypeError(f"`monitor` must be the name of a metric; got {monitor!r}.")
        check_number("factor", factor, above=0, below=1)
        check_count("patience", patience, least=0)
        check_choice("mode", mode, ("auto", "min", "max"))
        way = "; `mode` says in which direction"
        check_number("min_delta", min_delta, least=0, or_else=way)
        check_count("cooldown", cooldown, least=0)
        check_number("min_lr", min_lr, least=0)
        if mode == "auto":
            mode = "max" if "acc" in monitor else "min"
        self.monitor = monitor
        self.factor = float(factor)
        self.patience = int(patience)
        self.verbose = verbose
        self.mode = mode
        self.min_delta = float(min_delta)
        self.cooldown = int(cooldown)
        self.min_lr = float(min_lr)
        self.wait_count = 0
        self.cooldown_count = 0
        self.best_score: float | None = None
        self._fitting = False

    def setup(self, trainer: "Trainer") -> None:
        rates = _rates(trainer)
        if not rates:
            raise ValueError(
                "`ReduceLROnPlateau()`: `optimizer` has no learning rate that can be"
                f" set: none of {', '.join(RATES)} is among the hyperparameters in its"
                f" state ({', '.join(trainer.hyperparams) or 'there are none'}). Build"
                " it with optax.inject_hyperparams, for example"
                " optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)."
            )
        trainer.set_hyperparams(**rates)  # to what they are: a schedule's raises

    def on_fit_start(self, trainer: "Trainer") -> None:
        check_monitor(trainer, "ReduceLROnPlateau", self.monitor)
        self._fitting = True

    def on_fit_end(self, trainer: "Trainer") -> None:
        self._fitting = False

    def on_validation_end(self, trainer: "Trainer", metrics: dict[str, float]) -> None:
        if self._fitting and self.monitor.startswith("val_"):
            self._check(trainer, metrics[self.monitor])

    def on_train_epoch_end(self, trainer: "Trainer", metrics: dict[str, float]) -> None:
        if not self.monitor.startswith("val_"):
            self._check(trainer, metrics[self.monitor])

    def identity(self, trainer: "Trainer") -> str:
        return self.monitor

    def state_dict(self) -> dict[str, Any]:
        best = self.best_score
        return {
            "wait_count": self.wait_count,
            "cooldown_count": self.cooldown_count,
            "best_score": best if best is None or math.isfinite(best) else str(best),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _SAVED(state, "state")
        self.wait_count = state["wait_count"]
        self.cooldown_count = state["cooldown_count"]
        best = state["best_score"]
        self.best_score = None if best is None else float(best)

    def _check(self, trainer: "Trainer", value: float) -> None:
        if self.cooldown_count:
            self.cooldown_count -= 1
            self.wait_count = 0
        if is_better(self.mode, value, self.best_score, self.min_delta):
            self.best_score, self.wait_count = value, 0
        elif not self.cooldown_count:
            self.wait_count += 1
            if self.wait_count >= self.patience:
                self._reduce(trainer)

    def _reduce(self, trainer: "Trainer") -> None:
        before = _rates(trainer)
        lowered = {
            name: max(rate * self.factor, self.min_lr)
            for name, rate in before.items()
            if rate > self.min_lr
        }
        trainer.set_hyperparams(**lowered)
        # In the optimizer's dtype `min_lr` may be rounded up: no reduction, every time.
        new = {n: rate for n, rate in _rates(trainer).items() if rate != before[n]}
        if not new:
            return
        self.cooldown_count, self.wait_count = self.cooldown, 0
        if self.verbose:
            rates = ", ".join(f"{name} is {rate:.6g}" for name, rate in new.items())
            best = "none" if self.best_score is None else f"{self.best_score:.6g}"
            checks = "check" if self.patience == 1 else "checks"
            announce(
                trainer,
                "ReduceLROnPlateau",
                f"{self.monitor} did not improve on {best} for"
                f" {self.patience} {checks}: {rates} from now on",
            )


def _rates(trainer: "Trainer") -> dict[str, Any]:
    """The learning rates in the optimizer's state, by the names to set them by."""
    return {
        name: rate
        for name, rate in trainer.hyperparams.items()
        if name.rpartition("/")[2] in RATES and np.ndim(rate) == 0
    }
