"""The PRNG keys of a step and of its rows, and the mask of its real rows."""

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from .collectives import Collectives
from .micro_batch import MicroBatch

_RESERVED: Final = 0xFFFFFFFF
"""A number that is folded into keys, higher than that of any step or row: for the key
of validation, and, less the rows before it, for the key of a micro-batch."""


class MaskAndKeys(NamedTuple):
    """The mask, keys and step number that accompany a batch.

    A `loss_fn` may name any of these fields.
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


def make_step_key(key_data: Array, step: Int[Array, ""]) -> Any:
    """Returns the key of a step, from that of the run, whatever the devices are."""
    return jax.random.fold_in(jax.random.wrap_key_data(key_data), step)


def make_after_update_key(key_data: Array, step: Int[Array, ""]) -> Any:
    """Returns the key of `after_update` in a step; no row has the same key."""
    key = make_step_key(key_data, step)
    return jax.random.fold_in(key, jnp.uint32(0x80000000))


def make_evaluation_key(key_data: Array) -> Any:
    """Returns the key of validation and prediction; no step has the same key."""
    key = jax.random.wrap_key_data(key_data)
    return jax.random.fold_in(key, jnp.uint32(_RESERVED))


def make_mask_and_keys(
    collectives: Collectives,
    key: Any,
    micro_batch: MicroBatch,
    step: Int[Array, ""],
    *,
    training: bool,
) -> MaskAndKeys:
    """Returns the mask and the keys of the rows that this step sees.

    The key of a row depends on `key` and on the position of the row among the real rows
    of the global batch, and so not on padding, devices or processes.
    """
    num_rows = jax.tree.leaves(micro_batch.batch)[0].shape[0]
    ids = collectives.row_ids(num_rows)
    block_rows = num_rows * collectives.num_shards // len(micro_batch.counts)
    block, offset = ids // block_rows, ids % block_rows
    before = jnp.cumsum(micro_batch.counts) - micro_batch.counts
    positions = micro_batch.rows_before + before[block] + offset
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, positions)

    return MaskAndKeys(
        mask=offset < micro_batch.counts[block],
        keys=keys,
        key=jax.random.fold_in(
            key, jnp.uint32(_RESERVED) - micro_batch.rows_before.astype(jnp.uint32)
        ),
        step=step,
        training=training,
    )
