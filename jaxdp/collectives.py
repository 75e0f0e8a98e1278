"""How a compiled step reaches the rows that other devices work on."""

from typing import Final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

DATA: Final = "data"
"""Name of the axis that a batch's rows are split over."""


class Collectives:
    """How a compiled step reaches the other devices' shares. Here: no need to.

    Under `jax.jit` with shardings, and on one device, the step sees the whole batch
    and XLA inserts what communication there is. `AxisCollectives` is for steps that
    see one device's share.
    """

    axis_name: str | None = None
    num_shards: int = 1

    def row_ids(self, rows: int) -> Int[Array, " rows"]:
        """Places in the global batch of the `rows` rows that this step sees."""
        return jnp.arange(rows)

    def gather(self, params: PyTree) -> PyTree:
        """Whole parameters from the shares held here; differentiated through."""
        return params

    def sum_gradients(self, gradients: PyTree) -> PyTree:
        """Sums gradients of all devices' rows; held as params are."""
        return gradients

    def sum(self, values: PyTree) -> PyTree:
        """Sums over all devices' rows."""
        return values

    def mean(self, values: PyTree) -> PyTree:
        """Means over the devices, of floating leaves; others are left alone."""
        return values


class AxisCollectives(Collectives):
    """Explicit collectives over a mapped axis, as in `jax.pmap` and `jax.shard_map`.

    Args:
        axis_name: the axis that the rows of a batch are split over.
        num_shards: its size.
    """

    def __init__(self, axis_name: str, num_shards: int):
        self.axis_name = axis_name
        self.num_shards = num_shards

    def row_ids(self, rows: int) -> Int[Array, " rows"]:
        return jax.lax.axis_index(self.axis_name) * rows + jnp.arange(rows)

    def sum_gradients(self, gradients: PyTree) -> PyTree:
        return self.sum(gradients)

    def sum(self, values: PyTree) -> PyTree:
        return jax.lax.psum(values, self.axis_name)

    def mean(self, values: PyTree) -> PyTree:
        floating, rest = eqx.partition(values, eqx.is_inexact_array)
        return eqx.combine(jax.lax.pmean(floating, self.axis_name), rest)
