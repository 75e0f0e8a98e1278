"""How a compiled step reaches the rows that other devices work on."""

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

DATA: Final = "data"
"""Name of the axis that a batch's rows are split over."""

ResultKind = Literal["gradients", "rows", "whole"]
"""What a result of `Collectives.over_rows` is: gradients like the parameters, values
per row, or small values that every device holds."""


class RowsInteract(Exception):
    """A step was traced as if its rows were independent, and they are not."""


class Collectives:
    """How a compiled step reaches the other devices' shards. Here: no need to.

    Under `jax.jit` with shardings, and on one device, the step sees the whole batch
    and XLA inserts what communication there is. `AxisCollectives` is for steps that
    see one device's shard.
    """

    axis_names: tuple[str, ...] = ()
    """The axes over which rows are split, if the step sees those of one device."""

    num_shards: int = 1

    def row_ids(self, rows: int) -> Int[Array, " rows"]:
        """Places in the global batch of the `rows` rows that this step sees."""
        return jnp.arange(rows)

    def over_rows(
        self,
        function: Callable[..., Any],
        inputs: Any,
        groups: Sequence[Any],
        results: ResultKind | tuple[ResultKind, ...],
    ) -> Any:
        """`function(collectives, inputs, groups)`: all of a step that looks at rows.

        What comes after it, the optimizer and whatever callbacks trace, is written for
        whole arrays. Here both see the same.
        """
        return function(self, inputs, groups)

    def weights(self, state: Any) -> Any:
        """The `Weights` of a `TrainState` that gradients are taken at."""
        return state.weights

    def mean_gradients(self, gradients: PyTree) -> PyTree:
        """Gradients of `over_rows`, shaped as the parameters are, for hooks."""
        return gradients

    def need_all_rows(self) -> None:
        """Told, while a step is traced, that its rows can't be worked on apart.

        It draws one key for all of them, or takes a mean over them by itself. Where a
        device is shown its own rows only, this must raise `RowsInteract`.
        """

    def arrange(self, model: PyTree) -> PyTree:
        """The model as it is to be called here: the same function of a row."""
        return model

    def gather(self, params: PyTree) -> PyTree:
        """Whole parameters from the shards held here, before they are used."""
        return params

    def sum_gradients(self, gradients: PyTree) -> PyTree:
        """Sums gradients of whole parameters over all devices' rows; held as updated.

        Called once per optimizer step, after all micro-batches.
        """
        return gradients

    def like_gradients(self, params: PyTree) -> PyTree:
        """Parameters, held as `sum_gradients` holds their gradients."""
        return params

    def sum(self, values: PyTree) -> PyTree:
        """Sums over all devices' rows."""
        return values


class AxisCollectives(Collectives):
    """Explicit collectives over a mapped axis, as in `jax.pmap` and `jax.shard_map`.

    For steps whose rows are independent. The others raise `RowsInteract` while they are
    traced; a strategy then compiles them with `Collectives()` over whole batches.

    Args:
        axis_name: the axis, or axes, that the rows of a batch are split over.
        num_shards: how many parts that makes.
    """

    def __init__(self, axis_name: str | tuple[str, ...], num_shards: int):
        self.axis_name = axis_name
        self.axis_names = (axis_name,) if isinstance(axis_name, str) else axis_name
        self.num_shards = num_shards

    def row_ids(self, rows: int) -> Int[Array, " rows"]:
        return jax.lax.axis_index(self.axis_name) * rows + jnp.arange(rows)

    def need_all_rows(self) -> None:
        raise RowsInteract

    def sum_gradients(self, gradients: PyTree) -> PyTree:
        return self.sum(gradients)

    def sum(self, values: PyTree) -> PyTree:
        return jax.lax.psum(values, self.axis_name)
