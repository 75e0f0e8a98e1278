"""The values of a step by name: exact sums and means over real rows of steps and
epochs.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ..basics.console import add_article
from ..basics.tracebacks import NoteOnError
from .micro_batch import Group
from .objective import ObjectiveOutput

IN_FLIGHT: Final = 8
"""The maximum number of dispatched calls before the host waits for one. More would gain
nothing, hold more host batches, and abort the process on jax 0.10.2 with faked devices.
"""

LONG_IN_FLIGHT: Final = 2
"""The same for calls that run several steps."""

MAX_METRICS: Final = 63
"""The maximum number of metrics; fixed, so that the state always has one shape."""


class Facts(NamedTuple):
    """The facts about a step's values that are known once it is traced."""

    names: tuple[str, ...]
    num_classes: int | None
    notes: tuple[str, ...] = ()
    """Notes on the values, which the user sees once."""
    weighted: tuple[str, ...] = ()
    """The names of the values that have weights; others count every row once."""

    def merge(self, other: "Facts") -> "Facts":
        """Merges these facts with those of a step of other shapes.

        Raises:
            ValueError: if the names of the values differ, or if other values have
                weights.
        """
        if (other.names, other.weighted) != (self.names, self.weighted):
            raise ValueError(
                f"the loss and metrics are {', '.join(other.names)} for batches of"
                f" these shapes, and were {', '.join(self.names)} for others; their"
                " names, and which have weights, must not depend on shapes."
            )
        return Facts(
            self.names,
            self.num_classes if self.num_classes == other.num_classes else None,
            tuple(dict.fromkeys((*self.notes, *other.notes))),
            self.weighted,
        )


@jax.tree_util.register_pytree_node_class
class Metrics(Mapping[str, Any]):
    """The metrics of one step by name: lazy, nothing leaves the device until read.

    `metrics["loss"]` waits for the step and returns a NumPy float. All means come in
    one transfer, and each value from `Callback.inside_step` in its own.

    Args:
        facts: its `names` name the values of `means`.
        means: the means of the loss and metrics, in the order of `facts.names`.
        inside: values from `Callback.inside_step`, by name.
        index: the number of this step in a call that runs several steps; else None.
            With it, the first axis of `means` and of `inside` counts the steps.

    Attributes:
        steps_in_flight: the number of later steps after which the device has certainly
            completed this one.
    """

    steps_in_flight = IN_FLIGHT

    def __init__(self, facts: Facts, means: Any, inside: Any, index: int | None = None):
        # JAX rebuilds pytrees with placeholders for leaves, so no types are promised.
        self.facts = facts
        self.means = means
        self.inside = inside
        self.index = index
        self.added: dict[str, Any] = {}
        if index is not None:
            self.steps_in_flight = LONG_IN_FLIGHT * means.shape[0]

    def __getitem__(self, name: str) -> Any:
        if name in self.facts.names:
            # Waits for the device the first time; JAX keeps what it has fetched.
            return self._select_step(self.means)[self.facts.names.index(name)]
        if name in self.added:
            return np.asarray(self.added[name])[()]  # waits for the device
        if name not in self.inside:
            raise KeyError(f"no metric {name!r}; this step has {', '.join(self)}")
        return self._select_step(self.inside[name])[()]

    def _select_step(self, array: Any) -> np.ndarray:
        array = np.asarray(array)  # waits for the device
        return array if self.index is None else array[self.index, ...]

    def add(self, values: Mapping[str, Any]) -> None:
        """Adds values for loggers: numbers, or what NumPy converts when it is read."""
        if taken := values.keys() & {*self.facts.names, *self.inside}:
            raise ValueError(
                f"the name {min(taken)!r} is that of a metric, or of a value of an"
                " `inside_step`, and a callback logs another value by it; rename one of"
                " them."
            )
        self.added |= values

    def __iter__(self) -> Iterator[str]:
        return iter((*self.facts.names, *self.inside, *self.added))

    def __len__(self) -> int:
        return len(self.facts.names) + len(self.inside) + len(self.added)

    def __repr__(self) -> str:
        return f"Metrics({', '.join(self)})"

    def tree_flatten(self) -> tuple[tuple[Any, Any], Facts]:
        return (self.means, self.inside), self.facts

    @classmethod
    def tree_unflatten(cls, facts: Facts, children: Any) -> "Metrics":
        means, inside = children
        return cls(facts, means, inside)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Sums:
    """The loss and metrics summed over rows, by name, and the facts of their trace.

    A pytree of the sums of values, and of weights where there are any.
    """

    sums: Any
    weights: Any
    facts: Facts = dataclasses.field(metadata={"static": True})

    def __add__(self, other: "Sums") -> "Sums":
        """Adds the sums of two batches, whose shapes may differ."""
        facts = self.facts.merge(other.facts)
        ours = dataclasses.replace(self, facts=facts)
        return jax.tree.map(jnp.add, ours, dataclasses.replace(other, facts=facts))

    def to_vector(self) -> Array:
        """Returns the sums of values in the order of the names, then the sums of the
        weights.
        """
        sums = stack_values(self.sums, self.facts.names)
        if not self.facts.weighted:
            return sums
        return jnp.concatenate([sums, stack_values(self.weights, self.facts.weighted)])

    def to_means(self, num_real_rows: Array) -> Array:
        """Returns the mean of each value, in the order of the names.

        If all weights are 0, the mean is 0, and so is its gradient.

        Args:
            num_real_rows: of the batch, on all devices.
        """
        names = self.facts.names
        sums = stack_values(self.sums, names)
        if not self.facts.weighted:
            # Divide one by one: in some programs XLA multiplies a vector by the
            # reciprocal instead, which rounds differently.
            return jnp.stack([value / num_real_rows for value in sums])
        weights = stack_values(
            {n: self.weights.get(n, num_real_rows) for n in names}, names
        )
        return jnp.stack(
            [_ratio(*weighted) for weighted in zip(sums, weights, strict=True)]
        )

    def scale_gradients(self, grads: PyTree, groups: Sequence[Group]) -> PyTree:
        """Converts gradients of a sum over rows into gradients of the mean loss."""
        weight = self.weights.get("loss")
        if weight is None:
            return grads
        factor = _ratio(count_real_rows(groups), weight)
        return jax.tree.map(lambda grad: grad * factor.astype(grad.dtype), grads)


def _ratio(value: Array, weight: Array) -> Array:
    return jnp.where(weight == 0, 0, value / jnp.where(weight == 0, 1, weight))


def count_real_rows(groups: Sequence[Group]) -> Float[Array, ""]:
    """Returns the number of real rows on all devices."""
    num_real_rows = jnp.stack([group.counts.sum() for group in groups]).sum()
    return num_real_rows.astype(sum_dtype())


def sum_values(output: ObjectiveOutput, mask: Array) -> Sums:
    """Sums the loss and each metric over the real rows of a micro-batch."""
    sums, weights = {}, {}
    for name, one in output.by_name.items():
        sums[name] = _sum_over_rows(one.values, mask)
        if one.weights is not None:
            weights[name] = _sum_over_rows(one.weights, mask)
    facts = Facts(tuple(sums), output.num_classes, output.notes, tuple(weights))
    check_num_values(facts.names + facts.weighted)
    return Sums(sums, weights, facts)


def _sum_over_rows(value: Array, mask: Array) -> Array:
    """Sums over real rows, in float32 or wider; a scalar counts for each of them."""
    value = value.astype(jnp.promote_types(value.dtype, jnp.float32))
    if value.ndim == 0:
        return value * mask.sum().astype(value.dtype)
    return jnp.where(mask, value, 0).sum()


def run_step_hooks(
    hooks: Sequence[Callable[..., Any]], arguments: tuple[Any, ...], facts: Facts
) -> dict[str, Array]:
    """Calls the `inside_step` hooks of callbacks, and merges their values by name."""
    inside: dict[str, Array] = {}
    for hook in hooks:
        name = f"{type(getattr(hook, '__self__', hook)).__name__}.inside_step"
        with NoteOnError(f"in {name}, which is compiled with the step"):
            values = hook(*arguments)
        if not isinstance(values, dict):
            is_array = isinstance(values, jax.Array)
            kind = "an array" if is_array else add_article(type(values).__name__)
            raise TypeError(
                f"{name} returned {kind}; it must return a dict of named arrays."
            )
        inside = add_values(inside, values, facts)
    return inside


def add_values(
    inside: dict[str, Array], more: dict[str, Array], facts: Facts
) -> dict[str, Array]:
    """Adds named values to those of a step; raises if a name is taken."""
    if clash := {*more} & {*inside, *facts.names, "epoch", "step"}:
        raise ValueError(
            f"there are two values named {sorted(clash)}: metrics, what `inside_step`"
            " of callbacks returned, and the trainer's own (`skipped`, `loss_scale`,"
            " `epoch`, `step`) must differ in their names. Rename yours."
        )
    return inside | more


def compute_means(totals: np.ndarray, facts: Facts) -> dict[str, float]:
    """Computes exact means over real rows from fetched totals."""
    count = 1 + len(facts.names) + len(facts.weighted)
    summed, lost = totals[:, :count].tolist()  # Python floats are exact enough
    rows, *sums = map(operator.sub, summed, lost)
    # The epoch may have no rows, if every step of it was skipped.
    weights = dict.fromkeys(facts.names, rows)
    weights |= zip(facts.weighted, sums[len(facts.names) :], strict=True)
    return {
        name: total / weights[name] if rows and weights[name] else float("nan")
        for name, total in zip(facts.names, sums, strict=False)
    }


def check_num_values(names: Sequence[str]) -> None:
    """Raises if a step has more than `MAX_METRICS` values and weights."""
    if len(names) > MAX_METRICS:
        raise ValueError(
            f"there are {len(names)} values per step, the loss, its metrics and their"
            f" weights; at most {MAX_METRICS} can be kept."
        )


def stack_values(sums: Mapping[str, Array], names: Sequence[str]) -> Array:
    """Stacks values in the order of `names`, which dicts lose on their way in JAX."""
    return jnp.stack([sums[name].astype(sum_dtype()) for name in names])


def sum_dtype() -> Any:
    """Returns the dtype of sums: float32, or float64 under `jax_enable_x64`."""
    return jax.dtypes.canonicalize_dtype(np.float64)


def add_to_totals(totals: Array, num_real_rows: Array, sums: Array) -> Array:
    """Adds a step's sums, in the dtype of `totals`, with Kahan's compensation.

    Plain float32 sums stop counting rows at 2**24. Row 0 of `totals` holds the sums,
    row 1 the rounding error in them, to be subtracted.
    """
    # XLA fuses these selections with the operations that follow. Concatenating and
    # padding the values would be one more operation, which lengthens a small step.
    num_real_rows, sums = num_real_rows.astype(totals.dtype), sums.astype(totals.dtype)
    places = jnp.arange(totals.shape[1])
    step = jnp.zeros_like(totals[0])
    for place, value in enumerate([num_real_rows, *sums]):
        step = jnp.where(places == place, value, step)
    corrected = step - totals[1]
    summed = totals[0] + corrected
    lost = (summed - totals[0]) - corrected
    # An infinite sum has no rounding error; inf - inf would turn the error into NaN.
    return jnp.stack([summed, jnp.where(jnp.isfinite(lost), lost, 0)])
