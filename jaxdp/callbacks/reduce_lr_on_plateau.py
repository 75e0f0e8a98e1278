"""Lowers the learning rate when a monitored value no longer improves."""

from typing import Any, Literal

import numpy as np

from ..basics.arguments import check_count, check_number, checks_arguments
from .base import Trainer
from .learning_rate_monitor import is_rate, make_no_rate_error
from .monitor import PatienceCallback, announce


class ReduceLROnPlateau(PatienceCallback):
    """Multiplies the learning rate by `factor` when a monitored value stops improving.

        optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)
        Trainer(model, optimizer, callbacks=[ReduceLROnPlateau(patience=5)])

    A check happens after every validation when `monitor` begins with `val_`, and after
    every training epoch otherwise. The new rate is used from the next step on; nothing
    is compiled again. All learning rates of an optimizer are lowered; it must be made
    with `optax.inject_hyperparams`, so that they can be set.

    Args:
        monitor: name of an epoch's value, such as `"val_loss"` or `"accuracy"`.
        factor: the rate is multiplied by this; less than 1.
        patience: the number of checks in a row without improvement.
        verbose: whether to log each new rate.
        mode: `"min"` if smaller is better, `"max"` if larger is; `"auto"` goes by the
            name: `"max"` for names like `accuracy`, `auroc` and `f1`, else `"min"`.
        min_delta: the difference that an improvement exceeds, in the unit of the value.
        cooldown: after a reduction the check of this number is the first that counts,
            as in Keras: 2 skips one check, 1 none.
        min_lr: the lowest rate.

    Attributes:
        wait_count: checks since the last improvement, reduction or cooldown.
        cooldown_count: checks that are left of the cooldown.
        best_score: the best value so far; None before the first check.
    """

    @checks_arguments
    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        factor: float = 0.1,
        patience: int = 10,
        verbose: bool | int = False,
        mode: Literal["auto", "min", "max"] = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ):
        super().__init__(monitor, patience, min_delta, mode)
        check_number("factor", factor, above=0, below=1)
        check_count("cooldown", cooldown, minimum=0)
        check_number("min_lr", min_lr, minimum=0)
        self.factor = float(factor)
        self.verbose = verbose
        self.cooldown = int(cooldown)
        self.min_lr = float(min_lr)
        self.cooldown_count = 0

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        rates = _find_rates(trainer)
        if not rates:
            raise make_no_rate_error(trainer, "ReduceLROnPlateau")
        trainer.set_hyperparams(**rates)  # to what they are: a schedule's raises

    def check(self, trainer: Trainer, value: float) -> None:
        self.cooldown_count = max(self.cooldown_count - 1, 0)
        if not self.update_best(value) and not self.cooldown_count:
            self.wait_count += 1
            if self.wait_count >= self.patience:
                self._reduce(trainer)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"cooldown_count": self.cooldown_count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.cooldown_count = state["cooldown_count"]

    def _reduce(self, trainer: Trainer) -> None:
        lowered = {}
        for name, rate in _find_rates(trainer).items():
            # Rounded like the rate of the optimizer, which might be just below it.
            minimum = np.asarray(self.min_lr, rate.dtype)  # on the host
            new = np.minimum(rate, np.maximum(rate * self.factor, minimum))
            if (new != rate).any():
                lowered[name] = new
        if not lowered:
            return
        trainer.set_hyperparams(**lowered)
        if self.verbose:
            rates = ", ".join(f"{name} is {rate}" for name, rate in lowered.items())
            text = f"{self.describe_wait()}: {rates} from now on"
            announce(trainer, "ReduceLROnPlateau", text)
        self.cooldown_count, self.wait_count = self.cooldown, 0


def _find_rates(trainer: Trainer) -> dict[str, np.ndarray]:
    """Returns the learning rates of the optimizer, by the names to set them by."""
    return {
        name: np.asarray(rate)  # on the host
        for name, rate in trainer.hyperparams.items()
        if is_rate(name)
    }
