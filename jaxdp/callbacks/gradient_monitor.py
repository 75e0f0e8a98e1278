"""Logs norms of gradients and updates, and finds leaves that do not learn."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ..basics.arguments import check_count, checks_arguments
from ..basics.console import join_some, warn
from ..basics.tree import leaf_path
from ..record import LogRow
from ..strategies.base import adds_state
from .base import Callback, Trainer

_SQUARES: Final = "gradient_monitor/squares"
_ALIVE: Final = "gradient_monitor/alive"
_WARNING: Final = (
    "`GradientMonitor`: {} in the first {} steps: {}. Leaves that are not to be trained"
    " cost less when `filter_spec` leaves them out."
)


class GradientMonitor(Callback):
    """Logs norms of gradients and updates, and finds leaves that do not learn.

    Every `trainer.log_every_n_steps` steps, these values join the metrics of the step,
    and so all loggers:

    - `grad_norm`, the norm of the whole gradient before clipping, and
      `grad_norm/<layer>` for each layer, such as `blocks[3].attention`;
    - `update_ratio`, the norm of the update divided by the norm of the weights it was
      added to, and `update_ratio/<layer>`. With Adam, about 1e-3 is common. Much less
      means that the model hardly learns; much more means that training is unstable.
      (Under `LocalSGD` the update is of the outer weights: zero between outer steps.)

    They are computed inside the compiled step, in one pass over gradients, updates and
    weights; the host reads a few numbers per leaf (array), some steps late.

    After `check_steps` steps, a warning names leaves whose gradient was exactly zero in
    all of them (nothing depends on them, or a layer before them is dead), and leaves
    that had a gradient but were never updated (the optimizer leaves them out).

    Args:
        max_layers: how many layers to log at most; 0 logs only the whole model.
        check_steps: how many steps to look for leaves that do not learn; 0 for none.

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
        self._leaves: tuple[str, ...] = ()
        self._layers: dict[str, list[int]] = {}
        self._checked, self._is_seldom = 0, False
        self._alive: np.ndarray | None = None

    def inside_step(
        self, grads: PyTree, updates: PyTree, state: Any
    ) -> dict[str, Array]:
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(grads)]
        self._leaves = tuple(map(leaf_path, paths))
        self._layers = group_by_layer(paths, self.max_layers)
        weights = jax.tree.map(lambda new, update: new - update, state.params, updates)
        trees = [jax.tree.leaves(tree) for tree in (grads, updates, weights)]
        values = {
            _SQUARES: jnp.stack([jnp.stack([_square(x) for x in t]) for t in trees])
        }
        if self.check_steps:
            values[_ALIVE] = jnp.stack(
                [jnp.stack([(leaf != 0).any() for leaf in tree]) for tree in trees[:2]]
            )
        return values

    def setup(self, trainer: Trainer) -> None:
        self._is_seldom = adds_state(trainer.strategy)
        if self._checked < self.check_steps:
            trainer.record.read_steps(self._check)

    def on_train_batch_end(
        self, trainer: Trainer, metrics: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % trainer.log_every_n_steps == 0:
            metrics.add(self._name_values(metrics))

    def _name_values(self, metrics: Mapping[str, Any]) -> dict[str, "_LazyNumber"]:
        def norm(row: int, leaves: Any) -> float:
            return float(np.sqrt(metrics[_SQUARES][row, leaves].sum(dtype=np.float64)))

        def ratio(leaves: Any) -> float:
            weights, update = norm(2, leaves), norm(1, leaves)
            return update / weights if weights else float(np.inf if update else 0.0)

        values = {}
        every = {"": slice(None)} | {f"/{k}": v for k, v in self._layers.items()}
        for suffix, leaves in every.items():
            values["grad_norm" + suffix] = _LazyNumber(lambda at=leaves: norm(0, at))
            values["update_ratio" + suffix] = _LazyNumber(lambda at=leaves: ratio(at))
        return values

    def _check(self, row: LogRow) -> None:
        if self._checked >= self.check_steps:
            return
        alive = np.array(row.values[_ALIVE])  # waits for the device
        if self._alive is not None and self._alive.shape == alive.shape:
            alive |= self._alive
        self._alive = alive
        self._checked += 1
        if self._checked != self.check_steps:
            return

        # Once, after the last of the first steps.
        for path, has_gradient, is_updated in zip(self._leaves, *alive, strict=True):
            if not has_gradient:
                self.dead.append(path)
            elif not is_updated and not self._is_seldom:
                self.never_updated.append(path)
        if names := join_some(self.dead):
            text = f"the gradient of {names} was exactly zero"
            why = "the loss does not depend on it, or a layer before it is dead"
            warn(_WARNING.format(text, self._checked, why))
        if names := join_some(self.never_updated):
            text = f"{names} had a gradient and no update"
            why = "the optimizer leaves it out, or its rate is zero"
            warn(_WARNING.format(text, self._checked, why))


class _LazyNumber:
    """A number that is computed when it is read, for `Metrics.add`."""

    def __init__(self, function: Callable[[], float]):
        self._function = function

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        # on the host
        return np.asarray(self._function(), np.float32 if dtype is None else dtype)


def group_by_layer(paths: list[Any], max_layers: int) -> dict[str, list[int]]:
    """Returns the indices of leaves by layer: the deepest parts of the model, without
    the last key (`weight`, `bias`), of which there are `max_layers` at most."""
    max_depth = max(map(len, paths), default=0) - 1
    for depth in range(max_depth, 0, -1):
        grouped: dict[str, list[int]] = {}
        for index, path in enumerate(paths):
            cut = path[: max(min(depth, len(path) - 1), 1)]
            grouped.setdefault(leaf_path(cut), []).append(index)
        if len(grouped) <= max_layers:
            return grouped
    return {}


def _square(leaf: Array) -> Array:
    """Returns the sum of squares, in float32."""
    wide = jnp.abs(leaf).astype(jnp.float32)
    return jnp.sum(wide * wide)
