"""Collectives: the communication of a compiled step with other devices."""

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

DATA: Final = "data"
"""Name of the axis that a batch's rows are split over."""

ResultKind = Literal["gradients", "rows", "replicated"]
"""Kinds of results of `Collectives.over_rows`: gradients like the parameters, values
per row, or small values that every device holds."""

Results = ResultKind | tuple[ResultKind, ...]
OnRows = Callable[["Collectives", Any, Sequence[Any]], Any]
"""A part of a step that uses rows: `function(collectives, inputs, groups)`."""


class Collectives:
    """The communication of a compiled step with other devices.

    In this class every method does nothing: on one device, and under `jax.jit` with
    shardings, the step sees the whole batch, and XLA inserts the communication.
    `AxisCollectives` is for steps that see only the rows of one device.
    """

    num_shards: int = 1

    gathers_params: bool = False
    """Whether devices send each other parameters for a step."""

    def row_ids(self, rows: int) -> Int[Array, " rows"]:
        """Returns the positions of this step's `rows` rows in the global batch."""
        return jnp.arange(rows)

    def over_rows(
        self, function: OnRows, inputs: Any, groups: Sequence[Any], results: Results
    ) -> Any:
        """Runs the part of a step that uses rows: `function(self, inputs, groups)`.

        The rest of the step works on full arrays: the optimizer, and the functions of
        callbacks. In this class both parts see the same arrays.
        """
        return function(self, inputs, groups)

    def weights(self, state: Any) -> Any:
        """Returns the `Weights` of a `TrainState`, at which the step computes
        gradients.
        """
        return state.weights

    def mean_gradients(self, gradients: PyTree) -> PyTree:
        """Returns gradients from `over_rows` in the parameters' shapes, for hooks."""
        return gradients

    def arrange(self, model: PyTree) -> PyTree:
        """Returns `model` as this step calls it; its outputs are the same.

        Under `FSDP`, its units gather their own shards.
        """
        return model

    def gather(self, params: PyTree) -> PyTree:
        """Returns full parameters, gathered from this device's shards."""
        return params

    def sum_gradients(self, gradients: PyTree) -> PyTree:
        """Sums gradients over the rows of all devices.

        Takes gradients of full parameters, and returns them in the layout in which
        parameters are updated. Called once per optimizer step, after all micro-batches.
        """
        return gradients

    def like_gradients(self, params: PyTree) -> PyTree:
        """Returns parameters in the layout of the gradients from `sum_gradients`."""
        return params

    def sum(self, values: PyTree) -> PyTree:
        """Sums over all devices' rows."""
        return values


class AxisCollectives(Collectives):
    """Explicit collectives over a mapped axis, as in `jax.pmap` and `jax.shard_map`.

    For steps whose functions are written for one example: each device gets only its own
    rows.

    Args:
        axis_name: the axis, or axes, over which the rows of a batch are split.
        num_shards: the number of parts.
    """

    def __init__(self, axis_name: str | tuple[str, ...], num_shards: int):
        self.axis_name = axis_name
        self.num_shards = num_shards

    def row_ids(self, rows: int) -> Int[Array, " rows"]:
        return jax.lax.axis_index(self.axis_name) * rows + jnp.arange(rows)

    def sum_gradients(self, gradients: PyTree) -> PyTree:
        return self.sum(gradients)

    def sum(self, values: PyTree) -> PyTree:
        return jax.lax.psum(values, self.axis_name)
