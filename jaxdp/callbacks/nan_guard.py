"""Drops updates with NaN or infinity, and stops the fit or warns."""

import functools
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ..basics.arguments import check_count, checks_arguments
from ..basics.console import join_some, warn
from ..basics.tree import leaf_path
from ..engine import StepOptions
from ..record import LogRow
from .base import Callback, Trainer

_FLAGS = "nonfinite_gradients"


class NanGuard(Callback):
    """Looks for NaN and infinity in the loss and gradients of every step.

    The compiled step drops an update that is not finite, so it never reaches the model,
    the optimizer state or the means of the epoch. The host reads the findings some
    steps later, so nothing waits.

    Under "16-mixed" gradients overflow now and then while the loss is finite. Such a
    step is skipped to lower the loss scale, and is no finding, unless more than
    `max_skips` of them come in a row.

    Args:
        action: `"stop"` raises a FloatingPointError that names the step and what was
            not finite. `"end"` warns and ends the fit as `trainer.should_stop` does,
            without an exception. `"skip"` warns and drops that update.
        max_skips: with `"skip"`, how many steps in a row may be dropped before a
            FloatingPointError after all.

    Attributes:
        skipped_steps: the numbers of the steps that were dropped, without those that
            only lower a loss scale.
    """

    only_in_training = True

    @checks_arguments
    def __init__(
        self, action: Literal["stop", "end", "skip"] = "stop", max_skips: int = 10
    ):
        check_count("max_skips", max_skips, minimum=0)
        self.action = action
        self.max_skips = max_skips
        self.skipped_steps: list[int] = []
        self._in_a_row = 0
        self._leaves: tuple[str, ...] = ()
        self._failed = False

    def step_options(self, options: StepOptions) -> StepOptions:
        return options._replace(skip_nonfinite=True)

    def setup(self, trainer: Trainer) -> None:
        self._failed = False
        trainer.record.read_steps(functools.partial(self._check, trainer))

    def inside_step(
        self, grads: PyTree, updates: PyTree, state: Any
    ) -> dict[str, Array]:
        paths = jax.tree_util.tree_leaves_with_path(grads)
        self._leaves = tuple(leaf_path(path) for path, _ in paths)
        return {_FLAGS: jnp.stack([~jnp.isfinite(leaf).all() for _, leaf in paths])}

    def on_exception(self, trainer: Trainer, exception: BaseException) -> None:
        self._failed = True

    def state_dict(self) -> dict[str, Any]:
        return {"skipped_steps": list(self.skipped_steps), "in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped_steps = list(state["skipped_steps"])
        self._in_a_row = state.get("in_a_row", 0)

    def _check(self, trainer: Trainer, row: LogRow) -> None:
        metrics, is_skipped = row.values, bool(row.values["skipped"])
        self._in_a_row = self._in_a_row + 1 if is_skipped else 0
        if self._failed or not is_skipped:
            return
        # An overflow under "16-mixed", which halves its loss scale.
        is_scaled = "loss_scale" in metrics and np.isfinite(metrics["loss"])
        if is_scaled and self._in_a_row <= self.max_skips:
            return
        self.skipped_steps.append(row.step)
        place = f"epoch {row.epoch}, step {row.step} (batch_idx {row.batch_idx})"
        text = f"`NanGuard`: {place}: {self._describe_bad_values(metrics)}"
        if self.action == "end":
            if not trainer.should_stop:
                warn(f"{text}. The update was not applied; the fit ends.")
            trainer.should_stop = True
        elif self.action == "skip" and self._in_a_row <= self.max_skips:
            warn(f"{text}; skipped this update.")
        else:
            count, self._in_a_row = self._in_a_row, 0
            raise FloatingPointError(
                f"{text}. The update was not applied ({count} in a row):"
                " `trainer.model` is the last good one. Lower the learning rate, clip"
                " gradients (`gradient_clip_val`), look at that batch, or use"
                " `NanGuard('skip', max_skips=...)`; `NanGuard('end')` ends the fit"
                " without an exception."
            )

    def _describe_bad_values(self, metrics: Mapping[str, Any]) -> str:
        """Returns a sentence that names the values that are not finite."""
        bad = np.flatnonzero(metrics[_FLAGS])
        loss = f"the loss was {metrics['loss']:.6g}"
        if not len(bad):
            return f"{loss}, and all gradients were finite"
        names = join_some(self._leaves[i] for i in bad)
        affected = "all leaves" if len(bad) == len(self._leaves) else names
        return f"{loss}, with NaN or infinity in the gradients of {affected}"
