"""Exact means over real rows, however they are split into micro-batches."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .jaxprs import OWN_LOOP, has_convolutions
from .metrics import Facts, sum_dtype, vector
from .objective import Values
from .precision import widen
from .row_mixing import mark_values
from .state import Group, MicroBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Sums:
    """The loss and metrics summed over rows, by name, beside what tracing found out.

    A pytree whose leaves are the sums and those of the weights, where there are any.
    """

    sums: Any
    weights: Any
    hidden: Any
    """How many rows' losses have NaN or infinity of weight 0; None without weights."""
    facts: Facts = dataclasses.field(metadata={"static": True})

    def __add__(self, other: "Sums") -> "Sums":
        """Sums over the rows of both, whose batches may be of other shapes."""
        facts = self.facts.joined(other.facts)
        ours = dataclasses.replace(self, facts=facts)
        return jax.tree.map(jnp.add, ours, dataclasses.replace(other, facts=facts))

    def in_order(self) -> Array:
        """Sums of values in the order of the names, then those of the weights."""
        sums = vector(self.sums, self.facts.names)
        if not self.facts.weighted:
            return sums
        return jnp.concatenate([sums, vector(self.weights, self.facts.weighted)])

    def means(self, total: Array) -> Array:
        """The mean of each value, in the order of the names.

        A mean over weights that are all 0 is 0, as its gradient is.

        Args:
            total: how many real rows there are.
        """
        names = self.facts.names
        sums = vector(self.sums, names)
        if not self.facts.weighted:
            # One by one: XLA turns a vector's division by a number into a product with
            # the reciprocal in some programs, which rounds otherwise.
            return jnp.stack([weighted / total for weighted in sums])
        weights = vector({n: self.weights.get(n, total) for n in names}, names)
        return jnp.stack(
            [_ratio(*weighted) for weighted in zip(sums, weights, strict=True)]
        )

    def weigh_gradients(self, grads: PyTree, groups: Sequence[Group]) -> PyTree:
        """Gradients of the sum of losses over rows, as those of the mean loss."""
        weight = self.weights.get("loss")
        if weight is None:
            return grads
        factor = _ratio(count_rows(groups), weight)
        return jax.tree.map(lambda grad: grad * factor.astype(grad.dtype), grads)


def _ratio(value: Array, weight: Array) -> Array:
    return jnp.where(weight == 0, 0, value / jnp.where(weight == 0, 1, weight))


def over_micro_batches(
    gradients: Callable[[PyTree, MicroBatch], tuple[PyTree, PyTree, Sums]],
    params: PyTree,
    model_state: PyTree,
    groups: Sequence[Group],
    *,
    unroll: bool,
) -> tuple[PyTree, PyTree, Sums]:
    """Sums `gradients` over the micro-batches in order, by a scan within a group.

    With `unroll` the scan is no loop in the program if there are convolutions in it.
    """

    def body(carry: tuple[PyTree, PyTree], micro: MicroBatch) -> tuple[Any, Sums]:
        grads, model_state = carry
        more, model_state, summed = gradients(model_state, micro)
        return (jax.tree.map(jnp.add, grads, more), model_state), summed

    rows_before = jnp.int32(0)
    before_these: Any = None

    for group in groups:
        counts = group.counts.sum(axis=1)
        before = rows_before + jnp.cumsum(counts) - counts
        rows_before = rows_before + counts.sum()
        micros = MicroBatch(*group, before)

        if len(group.counts) == 1:
            micro = jax.tree.map(lambda x: x[0], micros)
            grads, model_state, summed = gradients(model_state, micro)
        else:
            zeros = widen(jax.tree.map(jnp.zeros_like, params))
            start, first = (zeros, model_state), jax.tree.map(lambda x: x[0], micros)
            unrolled = unroll and has_convolutions(jax.make_jaxpr(body)(start, first))
            with jax.named_scope(OWN_LOOP):
                (grads, model_state), parts = jax.lax.scan(
                    body, start, micros, unroll=len(group.counts) if unrolled else 1
                )
            summed = jax.tree.map(lambda x: x.sum(axis=0), parts)

        if before_these is not None:
            before, sums = before_these
            grads, summed = jax.tree.map(jnp.add, before, grads), sums + summed
        before_these = grads, summed

    grads, summed = before_these
    return grads, model_state, summed


def count_rows(groups: Sequence[Group]) -> Float[Array, ""]:
    """How many real rows there are, on all devices."""
    total = jnp.stack([group.counts.sum() for group in groups]).sum()
    return total.astype(sum_dtype())


def sums_of(found: Values, mask: Array, facts: Facts) -> Sums:
    """Sums over the real rows of a micro-batch, of its loss and of each metric."""
    seen = found.values, found.weights
    values, weights = seen if facts.rows_interact else mark_values(seen)
    over = _over_rows if found.members is None else jax.vmap(_over_rows, (-1, None))
    sums = {name: over(value, mask) for name, value in values.items()}
    if found.members is not None:  # of sums: under Members no rows are exchanged
        sums = found.members(sums)
    weights = {name: _over_rows(weight, mask) for name, weight in weights.items()}
    hidden = None if found.hidden is None else _over_rows(found.hidden, mask)
    return Sums(sums, weights, hidden, facts)


def _over_rows(value: Array, mask: Array) -> Array:
    """Sum over real rows, in float32 or wider; a scalar counts for each of them."""
    value = value.astype(jnp.promote_types(value.dtype, jnp.float32))
    if value.ndim == 0:
        return value * mask.sum().astype(value.dtype)
    return jnp.where(mask, value, 0).sum()
