"""The state that training changes, and the rules by which a step replaces it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ..basics.tree import describe_difference, leaf_path
from .precision import update_loss_scale


class TrainState(NamedTuple):
    """Everything that training changes: it is placed, donated, saved and restored.

    A pytree of arrays; leaves that `filter_spec` does not train are in `buffers`.
    """

    params: PyTree
    """The trained leaves of the model; None elsewhere."""
    buffers: PyTree
    """The other arrays of the model, which only `after_update` changes; None
    elsewhere."""
    model_state: PyTree
    """The `eqx.nn.State`, or None."""
    opt_state: PyTree
    key: Any
    """uint32, the data of the seed's PRNG key: a typed key takes jit's slow path."""
    step: Any
    """int32 `()`. Number of completed optimizer steps."""
    totals: Any
    """`(2, metrics)`, of `sum_dtype`: sums over this epoch, first of real rows; see
    `metrics.add_to_totals`."""
    loss_scale: Any = None
    """`precision.LossScale` under "16-mixed", or None."""

    @property
    def weights(self) -> "Weights":
        """The part that evaluation needs."""
        return Weights(self.params, self.buffers, self.model_state, self.key, self.step)


class Weights(NamedTuple):
    """The fields of a `TrainState` that evaluation and prediction read."""

    params: PyTree
    buffers: PyTree
    model_state: PyTree
    key: Any
    step: Any


def match_dtypes(old: PyTree, new: PyTree, what: str) -> PyTree:
    """Casts `new` to the dtypes of `old`, so that it fits the first step's program."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(old)
    leaves, new_treedef = jax.tree.flatten(new)
    if treedef != new_treedef:
        raise TypeError(
            f"The {what} has another structure after a step:"
            f" {describe_difference(old, new)}."
        )
    for (path, before), after in zip(paths, leaves, strict=True):
        if jnp.shape(before) != jnp.shape(after):
            raise TypeError(
                f"The {what} has another shape after a step: {leaf_path(path)} was"
                f" {jnp.shape(before)}, is {jnp.shape(after)}."
            )
    return jax.tree.map(lambda o, n: jnp.asarray(n).astype(o.dtype), old, new)


def keep_old_if_nonfinite(
    old: TrainState, new: TrainState, means: Array, finite: Array
) -> tuple[TrainState, dict[str, Array]]:
    """Returns the new state, or the old one if the step is not `finite`, and values to
    log.

    Either state gets the next loss scale, if there is one.
    """
    skipped, named = old._replace(step=new.step), {}
    if old.loss_scale is not None:
        # If only the gradients overflow, the loss is finite and still counts.
        is_loss = jnp.isfinite(means).all()
        totals = jnp.where(is_loss, new.totals, old.totals)
        scale = update_loss_scale(old.loss_scale, finite)
        new, skipped = (
            state._replace(totals=totals, loss_scale=scale) for state in (new, skipped)
        )
        named["loss_scale"] = old.loss_scale.scale
    new = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, skipped)
    return new, named | {"skipped": ~finite}


def is_finite(tree: PyTree) -> Array:
    """Returns whether all values are finite, as a traced bool."""
    leaves = jax.tree.leaves(tree)
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all()
