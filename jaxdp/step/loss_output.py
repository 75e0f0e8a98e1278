"""Checks of a loss or a metric that a user's function returned inside a step."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .. import losses
from ..basics.console import add_article


class LossOutput(NamedTuple):
    """A loss or a metric."""

    values: Array
    """`(rows,)`, multiplied by the weights if there are any; or `()`, a mean."""
    weights: Array | None = None
    pair_weights: Array | None = None
    """The weights as they were returned beside the values."""


def check_output(
    argument: str,
    name: str,
    value: Any,
    rows: int,
    weight: Array | None = None,
    shapes: Sequence[tuple[int, ...]] | None = None,
) -> LossOutput:
    """Checks the value, or the pair of values and weights, of a loss or a metric.

    Args:
        argument: where the value is from, for errors.
        name: of the metric, or `"loss"`.
        value: what the user's function returned.
        rows: the number of rows of the batch, padding included.
        weight: the weights of the batch, `(rows,)` or `(rows, ...)`.
        shapes: the shapes that a value without weights may have; None for any.
    """
    row_weights = None
    if is_pair(value):
        value, row_weights = map(jnp.asarray, value)
        if weight is None:
            weight = row_weights
        else:
            after = [1] * (row_weights.ndim - weight.ndim)
            weight = row_weights * weight.reshape(*weight.shape, *after)
    elif shapes is not None:
        _check_shape(argument, value, shapes, rows)
    value = jnp.asarray(value)

    if weight is not None:
        _check_weight(argument, value, weight, rows)
    if name == "loss" and not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(
            f"{argument} has dtype {value.dtype} and can't be differentiated; it must"
            " be floating point."
        )
    wide = jnp.promote_types(value.dtype, jnp.float32)
    if weight is None:
        return LossOutput(
            losses.per_row(value if name == "loss" else value.astype(wide))
        )

    # For each row, sum the weighted values, and sum the weights.
    if weight.ndim < value.ndim:
        value = losses.per_row(value)
    weight = jax.lax.stop_gradient(weight).astype(wide)
    products = jnp.where(weight == 0, 0, value.astype(wide) * weight)
    return LossOutput(
        products.reshape(rows, -1).sum(axis=1),
        weight.reshape(rows, -1).sum(axis=1),
        row_weights,
    )


def _check_shape(argument: str, value: Any, shapes: Sequence[Any], rows: int) -> None:
    """Raises for other shapes: they result if a function of one example is applied to a
    batch, or if predictions and targets broadcast.
    """
    if not eqx.is_array_like(value) or jnp.shape(value) not in shapes:
        raise (ValueError if eqx.is_array_like(value) else TypeError)(
            f"{argument} is {describe(value)} for a batch of {rows} rows; it must be"
            f" one value per row, ({rows},), or a scalar mean, (). Average over other"
            " axes, .mean(axis=1); a function of one example is to be wrapped in"
            " jax.vmap, and one in `filter_value_and_grad` to be passed unwrapped."
        )


def _check_weight(argument: str, values: Array, weights: Array, rows: int) -> None:
    is_fit = values.shape[:1] == (rows,) and weights.shape in (values.shape, (rows,))
    if not is_fit or not jnp.isrealobj(weights):
        raise ValueError(
            f"{argument} has values of shape {values.shape} and weights of shape"
            f" {weights.shape}, {weights.dtype}, for a batch of {rows} rows. Values"
            f" must have the rows, ({rows}, ...), and weights the same shape or"
            f" ({rows},): of ({rows}, 1) pass weights[:, 0], and return no mean, which"
            " can't be weighted any more. (Named values beside the loss go into a dict:"
            " (loss, {name: value}).)"
        )


def check_gradients(loss: LossOutput, params: PyTree) -> None:
    """Raises unless the loss depends on trained leaves, and its weights do not.

    While JAX differentiates, a value with a tangent is a tracer of the same type as
    the parameters; one whose tangent is known to be zero is not.
    """
    leaves = jax.tree.leaves(params)
    if leaves and not isinstance(loss.values, type(leaves[0])):
        raise ValueError(
            "The loss does not depend on any trained parameter in a way that can be"
            " differentiated, so every gradient would be zero. Does the loss use the"
            " model it is given, without argmax, rounding or stop_gradient in between?"
            " Does `filter_spec`, or `params` of its Part, train the leaves that"
            " matter?"
        )
    if leaves and isinstance(loss.pair_weights, type(leaves[0])):
        raise ValueError(
            "the loss is a pair, whose second is the weight of the first, and this"
            " weight depends on the model's parameters. If it is to be a metric, put it"
            " into a dict: (loss, {'name': value}). If it is a weight, make it a"
            " constant: jax.lax.stop_gradient(weight)."
        )


def make_notes(by_name: Mapping[str, LossOutput], rows: int) -> tuple[str, ...]:
    """Returns notes on pairs, which the user may have meant as two values, and on
    scalar metrics, which are means over rows if there are several rows.
    """
    notes = []
    for name, result in by_name.items():
        what = "the loss" if name == "loss" else f"metric {name!r}"
        if result.pair_weights is not None:
            second = "the second is the weight of the first"
            notes.append(f"{what} is a pair (values, weights): {second}")
        elif rows > 1 and result.values.ndim == 0 and name != "loss":
            notes.append(
                f"{what} is a scalar, so over an epoch it is the mean over batches,"
                " weighted by their rows; values (rows,) are averaged exactly, and"
                " jaxdp.PassMetric is for what is no mean over rows, as F1"
            )
    return tuple(notes)


def zero_ignored_rows(weight: Array, *trees: PyTree) -> tuple[PyTree, ...]:
    """Returns the trees with zeros in rows of weight 0."""
    counts = (weight != 0).reshape(len(weight), -1).any(axis=1)

    def zero_rows(leaf: Array) -> Array:
        mask = counts.reshape(-1, *[1] * (leaf.ndim - 1))
        return jnp.where(mask, leaf, jnp.zeros_like(leaf))

    return jax.tree.map(zero_rows, trees)


def is_pair(value: Any) -> bool:
    """Returns True if a value is `(values, weights)`."""
    is_two = isinstance(value, tuple) and len(value) == 2
    return is_two and all(map(eqx.is_array_like, value))


def describe(value: Any) -> str:
    """Returns the kind of a value in words, and its shape or parts."""
    if eqx.is_array(value):
        return f"an array of shape {value.shape}"
    kind = add_article(type(value).__name__)
    if isinstance(value, tuple | list):
        kinds = ("array" if eqx.is_array(x) else type(x).__name__ for x in value[:5])
        return f"{kind} of {len(value)} ({', '.join(kinds)})"
    if isinstance(value, Mapping):
        return f"{kind} with keys {list(value)}"
    return kind
