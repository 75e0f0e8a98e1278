"""Keeps NaN and infinity out of the model."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ..basics.arguments import check_choice, check_count, check_number
from ..basics.console import some_of, warn
from ..basics.json_checks import each, fields, number, row, whole
from ..basics.tree import leaf_path
from ..engine import StepOptions
from .base import Callback, RollBack, Trainer
from .model_checkpoint import last_checkpoint
from .monitor import LateReads

_FLAGS = "nonfinite_gradients"

_SAVED = fields(
    {"skipped_steps": each(whole())},
    {
        "in_a_row": whole(),
        "rollbacks": whole(),
        "usual": row(whole(), number(), number(0.0)),
    },
)


class NanGuard(Callback):
    """Looks for NaN and infinity in the loss and gradients of every step.

    The compiled step drops an update that is not finite, so it never reaches the model,
    the optimizer state or the means of the epoch. The host reads the findings some
    steps later, so nothing waits. With `spike`, a finite loss far above its running
    mean counts as well. Its update was made by the time it is read, so
    `action="skip"` only warns.

    Args:
        action: `"stop"` raises a FloatingPointError that names the step and what was
            not finite; `trainer.model` is then the last good one. `"skip"` warns and
            drops that update. `"rollback"` continues from the newest
            checkpoint that `ModelCheckpoint` saved before that step, and leaves out
            the batch that caused it; the loader must be able to start again.
        max_skips: with `"skip"`, how many steps in a row may be dropped before a
            FloatingPointError after all.
        max_rollbacks: with `"rollback"`, how many there may be before a
            FloatingPointError.
        spike: a loss is a spike if it is this many standard deviations above its
            running mean, 6.0 for example; None turns this off.
        warmup: how many steps of a fit only build the running mean.

    Attributes:
        skipped_steps: the numbers of the steps that were dropped.
        rollbacks: how often the fit was rolled back.
    """

    looks_inside_blocks = False

    def __init__(
        self,
        action: str = "stop",
        max_skips: int = 10,
        *,
        max_rollbacks: int = 3,
        spike: float | None = None,
        warmup: int = 50,
    ):
        check_choice("action", action, ("stop", "skip", "rollback"))
        check_count("max_skips", max_skips, least=0)
        check_count("max_rollbacks", max_rollbacks, least=0)
        check_count("warmup", warmup, least=0)
        if spike is not None:
            check_number("spike", spike, above=0, or_else=", or None")
        self.action = action
        self.max_skips = max_skips
        self.max_rollbacks = max_rollbacks
        self.spike = spike
        self.warmup = warmup
        self.skipped_steps: list[int] = []
        self.rollbacks = 0

        # What the run has shown so far.
        self._usual = _Usual()
        self._in_a_row = self._restored_in_a_row = 0
        self._trainer: Any = None
        self._leaves: tuple[str, ...] = ()
        self._late = LateReads()
        self._failed = False

    def step_options(self, options: StepOptions) -> StepOptions:
        return options._replace(skip_nonfinite=True)

    def setup(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def inside_step(
        self, grads: PyTree, updates: PyTree, state: Any
    ) -> dict[str, Array]:
        paths = jax.tree_util.tree_leaves_with_path(grads)
        self._leaves = tuple(leaf_path(path) for path, _ in paths)
        return {_FLAGS: jnp.stack([~jnp.isfinite(leaf).all() for _, leaf in paths])}

    def on_fit_start(self, trainer: Trainer) -> None:
        self._late = LateReads()
        self._in_a_row, self._restored_in_a_row = self._restored_in_a_row, 0
        self._failed = False

    def on_train_batch_end(
        self, trainer: Trainer, metrics: Mapping[str, Any], batch_idx: int
    ) -> None:
        step = trainer.global_step
        self._late.push(step, (trainer.current_epoch, step, batch_idx), metrics)
        for where, past in self._late.ready(step):
            self._check(trainer, where, past)

    def on_train_epoch_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        self._check_rest(trainer)

    def on_exception(self, trainer: Trainer, exception: BaseException) -> None:
        self._failed = True

    def on_fit_end(self, trainer: Trainer) -> None:
        if not self._failed:
            self._check_rest(trainer)

    def state_dict(self) -> dict[str, Any]:
        if self._trainer is not None:
            self._check_rest(self._trainer)  # nothing is saved that was not looked at
        return {
            "skipped_steps": list(self.skipped_steps),
            "in_a_row": self._in_a_row,
            "rollbacks": self.rollbacks,
            "usual": list(self._usual),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _SAVED(state, "state")
        self.skipped_steps = list(state["skipped_steps"])
        self._in_a_row = self._restored_in_a_row = state.get("in_a_row", 0)
        self.rollbacks = max(self.rollbacks, state.get("rollbacks", 0))
        self._usual = _Usual(*state.get("usual", ()))

    def _check_rest(self, trainer: Trainer) -> None:
        for where, past in self._late.drain():
            self._check(trainer, where, past)

    def _check(
        self,
        trainer: Trainer,
        where: tuple[int, int, int],
        metrics: Mapping[str, Any],
    ) -> None:
        epoch, step, batch_idx = where
        skipped = bool(metrics["skipped"])
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if not skipped and not self._is_spike(float(metrics["loss"])):
            return

        # What has happened, in words.
        what, usual = self._what(metrics), self._usual
        if skipped:
            self.skipped_steps.append(step)
        else:
            what = (
                f"the loss was {metrics['loss']:.6g}, and {usual.mean:.6g} +-"
                f" {usual.deviation:.3g} is usual"
            )
        place = f"epoch {epoch}, step {step} (batch_idx {batch_idx}): {what}"

        # What to do about it.
        if self.action == "stop":
            model = "The update was not applied: `trainer.model` is the last good one. "
            raise FloatingPointError(
                f"`NanGuard`: {place}. {model if skipped else ''}Lower the"
                " learning rate, clip gradients (`gradient_clip_val`), look at"
                " that batch, or use `NanGuard('skip')` or"
                " `NanGuard('rollback')`."
            )
        if self.action == "rollback":
            raise self._roll_back(trainer, step, (epoch, batch_idx), place)
        if self._in_a_row > self.max_skips:
            raise FloatingPointError(
                f"`NanGuard`: {place}. That makes {self._in_a_row} steps in a row"
                f" without an update, more than `max_skips`={self.max_skips}."
            )
        done = "skipped this update" if skipped else "a spike"
        warn(f"`NanGuard`: {place}; {done}.")

    def _is_spike(self, loss: float) -> bool:
        usual = self._usual
        if self.spike is None:
            return False
        limit = usual.mean + self.spike * usual.deviation
        if usual.count >= max(self.warmup, 2) and loss > limit:
            return True
        self._usual = usual.with_(loss)
        return False

    def _roll_back(
        self, trainer: Trainer, step: int, batch: tuple[int, int], place: str
    ) -> RollBack:
        self._late = LateReads()  # what came after is undone, too
        if self.rollbacks >= self.max_rollbacks:
            raise FloatingPointError(
                f"`NanGuard`: {place}. The fit was rolled back {self.rollbacks} times"
                f" before, and `max_rollbacks`={self.max_rollbacks}."
            )
        path = last_checkpoint(trainer, before=step)
        if path is None:
            raise FloatingPointError(
                f"`NanGuard`: {place}. There is no checkpoint from before that step to"
                " roll back to; add a ModelCheckpoint that saves more often"
                " (`every_n_train_steps`)."
            )
        self.rollbacks += 1
        text = f"`NanGuard`: {place}; going back to {path}, without that batch."
        warn(text)
        return RollBack(path, [batch])

    def _what(self, metrics: Mapping[str, Any]) -> str:
        """What was not finite, by name."""
        bad = np.flatnonzero(metrics[_FLAGS])
        loss = f"the loss was {metrics['loss']:.6g}"
        if not len(bad):
            return f"{loss}, and all gradients were finite"
        names = some_of(self._leaves[i] for i in bad)
        of = "all leaves" if len(bad) == len(self._leaves) else names
        return f"{loss}, with NaN or infinity in the gradients of {of}"


class _Usual(NamedTuple):
    """Running mean and variance of the loss, of about the last hundred steps."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    @property
    def deviation(self) -> float:
        return math.sqrt(self.variance)

    def with_(self, loss: float) -> "_Usual":
        weight = max(1 / (self.count + 1), 0.01)
        off = loss - self.mean
        variance = (1 - weight) * (self.variance + weight * off * off)
        return _Usual(self.count + 1, self.mean + weight * off, variance)
