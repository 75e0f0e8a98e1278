"""Keeps NaN and infinity out of the model."""

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ..tree import leaf_path
from .base import Callback
from .monitor import LateReads

_FLAGS = "nonfinite_gradients"


class NanGuard(Callback):
    """Looks for NaN and infinity in the loss and gradients of every step.

    The compiled step drops an update that is not finite, so that the model, the
    optimizer's state and the means of the epoch never see it. What was found is read
    some steps later, when the device is done with them, and so costs no wait.

    Args:
        action: `"stop"` raises a FloatingPointError that names the step and what was
            not finite; `trainer.model` is then the last good one. `"skip"` warns and
            goes on without that update.
        max_skips: with `"skip"`, how many steps in a row may be dropped before a
            FloatingPointError after all.

    Attributes:
        skipped_steps: the numbers of the steps that were dropped.
    """

    looks_inside_blocks = False

    def __init__(self, action: str = "stop", max_skips: int = 10):
        if action not in ("stop", "skip"):
            raise ValueError(
                f"`NanGuard(action={action!r})` must be 'stop' (raise an error) or"
                " 'skip' (warn, and go on without the update)."
            )
        if isinstance(max_skips, bool) or not isinstance(max_skips, int):
            raise TypeError(
                f"`NanGuard(max_skips={max_skips!r})` must be a whole number of steps."
            )
        if max_skips < 0:
            raise ValueError(
                f"`NanGuard(max_skips={max_skips})` must be 0 or more steps in a row."
            )
        self.action = action
        self.max_skips = max_skips
        self.skipped_steps: list[int] = []
        self._in_a_row = 0
        self._leaves: tuple[str, ...] = ()
        self._late = LateReads()
        self._failed = False

    def setup(self, trainer: Any) -> None:
        trainer.skip_nonfinite = True

    def inside_step(
        self, grads: PyTree, updates: PyTree, state: Any
    ) -> dict[str, Array]:
        paths = jax.tree_util.tree_leaves_with_path(grads)
        self._leaves = tuple(leaf_path(path) for path, _ in paths)
        return {_FLAGS: jnp.stack([~jnp.isfinite(leaf).all() for _, leaf in paths])}

    def on_fit_start(self, trainer: Any) -> None:
        self._late = LateReads()
        self._in_a_row = 0
        self._failed = False

    def on_train_batch_end(
        self, trainer: Any, metrics: Mapping[str, Any], batch_idx: int
    ) -> None:
        step = trainer.global_step
        place = _Place(trainer.current_epoch, step, batch_idx)
        self._late.push(step, place, metrics)
        for where, past in self._late.ready(step):
            self._check(where, past)

    def on_train_epoch_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        self._check_rest()

    def on_exception(self, trainer: Any, exception: BaseException) -> None:
        self._failed = True

    def on_fit_end(self, trainer: Any) -> None:
        if not self._failed:
            self._check_rest()

    def state_dict(self) -> dict[str, Any]:
        return {"skipped_steps": list(self.skipped_steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped_steps = list(state["skipped_steps"])

    def _check_rest(self) -> None:
        for where, past in self._late.drain():
            self._check(where, past)

    def _check(self, where: "_Place", metrics: Mapping[str, Any]) -> None:
        if not metrics["skipped"]:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        self.skipped_steps.append(where.step)
        place = (
            f"epoch {where.epoch}, step {where.step} (batch_idx {where.batch_idx}):"
            f" {self._what(metrics)}"
        )
        if self.action == "stop":
            raise FloatingPointError(
                f"`NanGuard`: {place}. The update was not applied: `trainer.model` is"
                " the last good one. Lower the learning rate, clip gradients"
                " (`gradient_clip_val`), look at that batch, or go on without it with"
                " `NanGuard('skip')`."
            )
        if self._in_a_row > self.max_skips:
            raise FloatingPointError(
                f"`NanGuard`: {place}. That makes {self._in_a_row} steps in a row"
                f" without an update, more than `max_skips`={self.max_skips}."
            )
        warnings.warn(
            f"`NanGuard`: {place}; skipped this update.", UserWarning, stacklevel=2
        )

    def _what(self, metrics: Mapping[str, Any]) -> str:
        """What was not finite, by name."""
        loss = metrics["loss"]
        bad = np.flatnonzero(metrics[_FLAGS])
        if not np.isfinite(loss):
            text = f"the loss was {loss}"
            if len(bad) == len(self._leaves):
                return f"{text}, and so was every gradient"
        else:
            text = f"the loss was finite ({loss:.6g})"
        if not len(bad):
            return f"{text}, gradients were finite"
        names = [self._leaves[i] for i in bad[:5]]
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        gradients = "gradient" if len(bad) == 1 else "gradients"
        return (
            f"{text}, and NaN or infinity was in the {gradients} of"
            f" {', '.join(names)}{more}"
        )


class _Place(NamedTuple):
    epoch: int
    step: int
    batch_idx: int
