"""Logs the learning rate of every step, read from the optimizer's state."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ..basics.arguments import check_number, checks_arguments
from ..engine.hyperparams import LEARNING_RATES, find_hyperparams
from .base import Callback, Trainer


class LearningRateMonitor(Callback):
    """Adds the learning rate to the metrics of every step, and so to all loggers.

        optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=schedule)
        Trainer(model, optimizer, callbacks=[LearningRateMonitor()])

    This is the rate of the latest update, read inside the compiled step from the state
    of `optax.inject_hyperparams`; the first step shows `schedule(0)`. The history, and
    the row of an epoch, have the rate of its last step.

    Several rates in an optimizer have names of their own: `lr/<label>` with the label
    of `optax.partition`, or `lr/0`, `lr/1`, ... (see `trainer.hyperparams`). The rates
    of an ensemble's members are `lr[0]`, `lr[1]`, ...

    Args:
        schedule: a number, or a function from the number of earlier steps to the rate,
            to show for an optimizer without its rate in its state.
        name: the name of the metric.
    """

    only_in_training = True

    @checks_arguments
    def __init__(
        self, schedule: float | Callable[[Array], Any] | None = None, name: str = "lr"
    ):
        if schedule is not None and not callable(schedule):
            check_number("schedule", schedule, suffix=", a function, or None")
        self.schedule = schedule
        self.name = name

    def setup(self, trainer: Trainer) -> None:
        held = trainer.hyperparams if self.schedule is None else {}
        if self.schedule is None and not any(map(is_rate, held)):
            raise make_no_rate_error(
                trainer,
                "LearningRateMonitor",
                " Or pass the rate here, as `LearningRateMonitor(schedule=...)`: a"
                " number or a function of the step.",
            )

    def inside_step(
        self, grads: PyTree, updates: PyTree, state: Any
    ) -> dict[str, Array]:
        if self.schedule is not None:
            done = state.step - 1
            rate = self.schedule(done) if callable(self.schedule) else self.schedule
            return {self.name: jnp.asarray(rate, jnp.float32)}
        held = find_hyperparams(state)
        rates = {
            name: hyperparam.leaf for name, hyperparam in held.items() if is_rate(name)
        }
        labels = [name.rpartition("/")[0] or name for name in rates]
        if len({*labels}) < len(labels):  # several rates of one label
            labels = list(rates)
        logged: dict[str, Array] = {}
        for label, rate in zip(labels, rates.values(), strict=True):
            name = self.name if len(rates) == 1 else f"{self.name}/{label}"
            if jnp.ndim(rate) == 1:  # one rate per member of an ensemble
                logged |= {f"{name}[{i}]": jnp.float32(r) for i, r in enumerate(rate)}
            else:
                logged[name] = jnp.float32(rate)
        return logged

    def on_train_epoch_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        latest = trainer.callback_metrics
        # A run that resumes after the last step of an epoch has logged no rate yet.
        # Then the rate comes from the state.
        rates = self.inside_step(None, None, trainer.state)
        for name, rate in rates.items():
            mean = name.partition("[")[0]  # over the members of an ensemble
            if mean != name and mean in latest:
                trainer.log(mean, latest[mean])
            trainer.log(name, latest.get(name, rate))


def make_no_rate_error(
    trainer: Trainer, callback_name: str, remedy: str = ""
) -> ValueError:
    """Returns the error for an optimizer that keeps no learning rate in its state."""
    return ValueError(
        f"`{callback_name}()`: `optimizer` keeps no learning rate in its state: none of"
        f" {', '.join(LEARNING_RATES)} is among its hyperparameters"
        f" ({', '.join(trainer.hyperparams) or 'there are none'}). Build it as"
        f" optax.inject_hyperparams(optax.adam)(learning_rate=1e-3).{remedy}"
    )


def is_rate(name: str) -> bool:
    """Returns True if `name` in `trainer.hyperparams` is a learning rate."""
    return name.rpartition("/")[2] in LEARNING_RATES
