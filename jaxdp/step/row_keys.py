"""Which rows of a batch are real, the randomness of each, and when it comes."""

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from .collectives import Collectives
from .state import MicroBatch, Weights

_RESERVED: Final = 0xFFFFFFFF
"""Folded into a key where no step or row number ever gets: for validation, and
downwards for the keys of whole micro-batches."""


class MaskAndKeys(NamedTuple):
    """What goes with a batch: which rows are real, their randomness, and the time.

    Its fields are what a `loss_fn` may ask for by name.
    """

    mask: Array
    """`(rows,)`, False for the padding of a ragged batch."""
    keys: PRNGKeyArray
    """`(rows,)`, one key per row."""
    key: PRNGKeyArray
    """One for the whole batch."""
    step: Int[Array, ""]
    """How many optimizer steps are completed."""
    training: bool


def mask_and_keys(
    collectives: Collectives,
    key: Any,
    micro: MicroBatch,
    step: Int[Array, ""],
    *,
    training: bool,
) -> MaskAndKeys:
    """The mask and the keys of the rows seen here.

    A row's key depends on `key` and its place among the real rows of the global
    batch, and so on no padding, device or process.
    """
    seen = jax.tree.leaves(micro.batch)[0].shape[0]
    ids = collectives.row_ids(seen)
    block_rows = seen * collectives.num_shards // len(micro.counts)
    block, place = ids // block_rows, ids % block_rows
    before = jnp.cumsum(micro.counts) - micro.counts
    places = micro.rows_before + before[block] + place
    return MaskAndKeys(
        mask=place < micro.counts[block],
        keys=jax.vmap(jax.random.fold_in, (None, 0))(key, places),
        key=jax.random.fold_in(
            key, jnp.uint32(_RESERVED) - micro.rows_before.astype(jnp.uint32)
        ),
        step=step,
        training=training,
    )


def key_after_update(state_key: Array, step: Int[Array, ""]) -> Any:
    """The key of `after_update` in a step: of no row and no micro-batch."""
    key = jax.random.fold_in(jax.random.wrap_key_data(state_key), step)
    return jax.random.fold_in(key, jnp.uint32(0x80000000))


def key_outside_training(weights: Weights) -> Any:
    """The key of validation and prediction, which is no step's."""
    key = jax.random.wrap_key_data(weights.key)
    return jax.random.fold_in(key, jnp.uint32(_RESERVED))
