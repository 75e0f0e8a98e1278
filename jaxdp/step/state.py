"""The inputs of a step: the state of a run, and batches with the keys of their rows."""

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from ..basics.tree import describe_difference, leaf_path
from .collectives import Collectives
from .precision import update_loss_scale

if TYPE_CHECKING:
    from .step_functions import StepFunctions

_RESERVED: Final = 0xFFFFFFFF
"""A number that is folded into keys, higher than that of any step or row: for the key
of validation, and, less the rows before it, for the key of a micro-batch."""

Batch = PyTree
"""Leaves on the host shaped `(rows, ...)`, except those in a `Whole`."""


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


class Group(NamedTuple):
    """Micro-batches of one shape, stacked."""

    batch: PyTree
    """Leaves `(micro_batches, rows, ...)`."""
    counts: Any
    """int32 `(micro_batches, row_blocks)`: real rows in each equal block of a
    micro-batch's rows. One process loads a block: its real rows come first, then its
    padding."""
    whole: PyTree = None
    """Leaves without rows, `(micro_batches, ...)`; they are None in `batch`.
    See `whole.merge_leaves`."""


class MicroBatch(NamedTuple):
    """One micro-batch inside the step, and the number of real rows before it."""

    batch: PyTree
    counts: Int[Array, " row_blocks"]
    whole: PyTree
    rows_before: Int[Array, ""]


def only_micro_batch(group: Group) -> MicroBatch:
    """Returns the micro-batch of a group that consists of one."""
    only = jax.tree.map(lambda x: x[0], group)
    return MicroBatch(only.batch, only.counts, only.whole, jnp.int32(0))


class MaskAndKeys(NamedTuple):
    """The mask, keys and step number that accompany a batch.

    A `loss_fn` may ask for its fields by name.
    """

    mask: Array
    """`(rows,)`, False for the padding of a ragged batch."""
    keys: PRNGKeyArray
    """`(rows,)`, one key per row."""
    key: PRNGKeyArray
    """One for the whole batch."""
    step: Int[Array, ""]
    """The number of completed optimizer steps."""
    training: bool


def mask_and_keys(
    collectives: Collectives,
    key: Any,
    micro: MicroBatch,
    step: Int[Array, ""],
    *,
    training: bool,
) -> MaskAndKeys:
    """Returns the mask and the keys of the rows that this step sees.

    The key of a row depends on `key` and on the position of the row among the real rows
    of the global batch, and so not on padding, devices or processes.
    """
    num_rows = jax.tree.leaves(micro.batch)[0].shape[0]
    ids = collectives.row_ids(num_rows)
    block_rows = num_rows * collectives.num_shards // len(micro.counts)
    block, place = ids // block_rows, ids % block_rows
    before = jnp.cumsum(micro.counts) - micro.counts
    places = micro.rows_before + before[block] + place
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, places)

    return MaskAndKeys(
        mask=place < micro.counts[block],
        keys=keys,
        key=jax.random.fold_in(
            key, jnp.uint32(_RESERVED) - micro.rows_before.astype(jnp.uint32)
        ),
        step=step,
        training=training,
    )


def key_after_update(state_key: Array, step: Int[Array, ""]) -> Any:
    """Returns the key of `after_update` in a step; no row has the same key."""
    key = jax.random.fold_in(jax.random.wrap_key_data(state_key), step)
    return jax.random.fold_in(key, jnp.uint32(0x80000000))


def key_outside_training(weights: Weights) -> Any:
    """Returns the key of validation and prediction, which differs from the keys of
    steps.
    """
    key = jax.random.wrap_key_data(weights.key)
    return jax.random.fold_in(key, jnp.uint32(_RESERVED))


def first_state(
    params: PyTree,
    buffers: PyTree,
    model_state: PyTree,
    step_functions: "StepFunctions",
    seed: int,
    optimizer_layout: Any = None,
) -> TrainState:
    """Returns the state before the first step; it is not placed yet.

    If `optimizer_layout` is given, the optimizer's state is made in these shardings.
    """

    def fix_dtype(leaf: Any) -> Array:
        # A Python number in an optimizer's state would be a weakly typed array. Steps
        # return strongly typed ones, so the second step would need a new program.
        array = jnp.asarray(leaf)
        return jax.lax.convert_element_type(array, array.dtype)

    def strengthen(leaf: Any) -> Any:
        # JAX computes differently with the weakly typed arrays of a model, such as
        # `jnp.array(2.0)`, and checkpoints do not record weak types.
        return fix_dtype(leaf) if getattr(leaf, "weak_type", False) else leaf

    params, buffers, model_state = jax.tree.map(
        strengthen, (params, buffers, model_state)
    )
    init = jax.jit(
        lambda p: jax.tree.map(fix_dtype, step_functions.init_optimizer(p)),
        out_shardings=optimizer_layout,
    )
    return TrainState(
        params=params,
        buffers=buffers,
        model_state=model_state,
        opt_state=init(params),
        key=jax.random.key_data(jax.random.key(seed)),
        step=np.int32(0),
        totals=step_functions.new_totals(),
        loss_scale=step_functions.new_loss_scale(),
    )


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
    leaves = jax.tree.leaves(tree)
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all()
