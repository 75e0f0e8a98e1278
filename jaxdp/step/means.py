"""Exact means over real rows, however they are split into micro-batches."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .ensemble import Ensemble
from .metrics import Facts, check_count, sum_dtype, vector
from .objective import Values
from .row_mixing import mark_values
from .state import Group


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


def count_rows(groups: Sequence[Group]) -> Float[Array, ""]:
    """How many real rows there are, on all devices."""
    total = jnp.stack([group.counts.sum() for group in groups]).sum()
    return total.astype(sum_dtype())


def facts_of(
    found: Values, ensemble: Ensemble | None, most: int, *, interact: bool
) -> Facts:
    """What the values of a batch tell of all; at `most` so many can be kept.

    Args:
        interact: whether rows are known to depend on each other.
    """
    names, weighted = tuple(found.values), tuple(found.weights)
    if ensemble is not None:
        names += tuple(one for name in names for one in ensemble.names(name))
    check_count(names + weighted, most)
    least = int(ensemble is not None)  # the axis of members
    scalars = any(value.ndim == least for value in found.values.values())
    return Facts(names, scalars or interact, found.num_classes, found.notes, weighted)


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
