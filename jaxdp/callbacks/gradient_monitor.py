"""Logs norms of gradients and updates, and finds leaves that do not learn."""

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ..basics.arguments import check_count, checks_arguments
from ..basics.console import join_some, warn
from ..basics.tree import leaf_path
from ..record import LogRow
from .base import Callback, Trainer

_SQUARES: Final = "gradient_monitor/squares"
"""Sums of squares `(3, leaves)`: of gradients, updates and the weights before them."""


class GradientMonitor(Callback):
    """Logs norms of gradients and updates, and finds leaves that do not learn.

    Every `trainer.log_every_n_steps` steps, all loggers get:

    - `grad_norm`, the norm of the whole gradient before clipping, and
      `grad_norm/<layer>` for each layer, such as `blocks[3].attention`;
    - `update_ratio`, the norm of the update divided by the norm of the weights it was
      added to, and `update_ratio/<layer>`. With Adam, about 1e-3 is common: much less
      means that the model hardly learns, much more that training is unstable. (If
      `after_update` changes the weights, the divisor is the changed weights minus the
      update.)

    They are computed inside the compiled step; the host reads them some steps late.

    After `check_steps` steps, a warning names leaves (arrays) whose gradient was zero
    in all of them, and leaves that had a gradient but were never updated.

    Args:
        max_layers: how many layers to log at most; 0 logs only the whole model.
        check_steps: how many steps to look for leaves that do not learn; 0 for none.
            With `LocalSGD`, whose weights change at outer steps alone, more than its
            `every`.

    Attributes:
        dead: paths of the leaves without a gradient, after the check.
        never_updated: paths of the leaves with a gradient but without an update.
    """

    @checks_arguments
    def __init__(self, max_layers: int = 16, check_steps: int = 10):
        check_count("max_layers", max_layers, minimum=0)
        check_count("check_steps", check_steps, minimum=0)
        self.max_layers = max_layers
        self.check_steps = check_steps
        self.dead: list[str] = []
        self.never_updated: list[str] = []
        self._leaves: list[str] = []
        self._layers: dict[str, list[int]] = {}
        self._run_id: str | None = None
        self._checked = 0
        self._alive: Any = False  # which of `_SQUARES` were ever more than zero

    def inside_step(
        self, grads: PyTree, updates: PyTree, state: Any
    ) -> dict[str, Array]:
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(grads)]
        self._leaves = list(map(leaf_path, paths))
        grouped = group_by_layer(paths, self.max_layers)
        named = {f"/{name}": leaves for name, leaves in grouped.items()}
        self._layers = {"": [*range(len(paths))], **named}
        weights = jax.tree.map(lambda new, update: new - update, state.params, updates)
        trees = map(jax.tree.leaves, (grads, updates, weights))
        return {
            _SQUARES: jnp.stack([jnp.stack([*map(_sum_squares, t)]) for t in trees])
        }

    def setup(self, trainer: Trainer) -> None:
        if self._run_id != trainer.record.run_id:  # the model may be another one
            self._run_id, self._checked, self._alive = trainer.record.run_id, 0, False
            self.dead, self.never_updated = [], []
        trainer.record.read_steps(functools.partial(self._read, trainer))

    def _read(self, trainer: Trainer, row: LogRow) -> None:
        """Adds the norms of a step to its row, which loggers get after this."""
        is_logged = row.step % trainer.log_every_n_steps == 0
        if not is_logged and self._checked >= self.check_steps:
            return
        metrics: Any = row.values
        squares = np.asarray(metrics[_SQUARES])  # waits for the device
        for layer, leaves in self._layers.items() if is_logged else ():
            gradient, update, weight = np.sqrt(squares[:, leaves].sum(axis=1))
            with np.errstate(all="ignore"):  # infinite where the weights are zero
                ratio = update / weight if update else update
            metrics.add({f"grad_norm{layer}": gradient, f"update_ratio{layer}": ratio})
        if self._checked < self.check_steps:
            self._checked, self._alive = self._checked + 1, self._alive | (squares != 0)
            if self._checked == self.check_steps:
                self._warn_of_idle_leaves()

    def _warn_of_idle_leaves(self) -> None:
        """Sets `dead` and `never_updated`, and warns of the leaves in them."""
        has_gradient, is_updated, _ = self._alive
        leaves = np.asarray(self._leaves)  # on the host
        self.dead = leaves[~has_gradient].tolist()
        self.never_updated = leaves[has_gradient & ~is_updated].tolist()
        for leaves, problem in (
            (self.dead, "zero gradients (the loss does not depend on them, or a layer"
             " before them is dead)"),
            (self.never_updated, "a gradient and no update (the optimizer leaves them"
             " out, its rate is zero, or it updates after more than `check_steps`)"),
        ):  # fmt: skip
            if leaves:
                warn(
                    f"`GradientMonitor`: in the first {self._checked} steps, these"
                    f" leaves had {problem}: {join_some(leaves)}. Leaves that are not"
                    " to be trained cost less when `filter_spec` leaves them out."
                )


def group_by_layer(paths: list[Any], max_layers: int) -> dict[str, list[int]]:
    """Returns the indices of leaves by layer: the deepest parts of the model, without
    the last key (`weight`, `bias`), of which there are `max_layers` at most."""
    for depth in range(max(map(len, paths), default=0) - 1, 0, -1):
        grouped: dict[str, list[int]] = {}
        for index, path in enumerate(paths):
            layer = path[: max(min(depth, len(path) - 1), 1)]
            grouped.setdefault(leaf_path(layer), []).append(index)
        if len(grouped) <= max_layers:
            return grouped
    return {}


def _sum_squares(leaf: Array) -> Array:
    """Returns the sum of squares, in float32: zero if all values are below 1e-19."""
    return jnp.sum(jnp.square(jnp.abs(leaf).astype(jnp.float32)))
