"""What each kind of step computes, as a function of flat arrays for `jax.jit`."""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..basics.host_memory import clear_mesh, move_to_device
from ..basics.process import pause_gc
from ..step import OWN_LOOP, Collectives, Facts, Group, Steps, TrainState, Weights
from ..strategies.base import Role

Note = Callable[[Facts], None]
"""Is told what tracing tells of a step."""


class Body(NamedTuple):
    """A step as a function of arrays, and what `DataParallel.compile` is told of it."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    roles: tuple[Role, ...]
    results: Role | tuple[Role, ...]


def train_body(
    pure: Steps, state: TrainState, groups: list[Group], steps: int, note: Note
) -> Body:
    leaves, treedef = jax.tree.flatten(state)

    def train(collectives: Collectives, leaves: Any, groups: list[Group]) -> Any:
        state = treedef.unflatten(leaves)
        state, metrics = pure.train(collectives, state, groups)
        note(metrics.facts)
        return jax.tree.leaves(state), (metrics.means, metrics.inside)

    def train_all(collectives: Collectives, leaves: Any, groups: list[Group]) -> Any:
        (group,) = groups
        batches = jax.tree.map(lambda x: x.reshape(steps, -1, *x.shape[1:]), group)

        def batch(index: Any) -> Group:
            return jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False),
                batches,
            )

        def body(leaves: list[Array], index: Array) -> tuple[Any, Any]:
            # Always the first branch, which XLA does not know. It fuses nothing
            # of the step with what is in one.
            group = jax.lax.cond(index >= 0, batch, lambda _: batch(0), index)
            return train(collectives, leaves, [group])

        # The carry is what crosses into single steps, and so is the batch, so that
        # XLA fuses the same operations in both; other fusions round otherwise.
        with jax.named_scope(OWN_LOOP):
            return jax.lax.scan(body, leaves, jnp.arange(steps))

    function = train if steps == 1 else train_all
    roles = "state", "groups"
    return Body(function, (leaves, groups), roles, ("state", "replicated"))


def evaluate_body(
    pure: Steps, weights: Weights, groups: list[Group], _: int, note: Note
) -> Body:
    leaves, treedef = jax.tree.flatten(weights)

    def evaluate(
        collectives: Collectives,
        leaves: list[Array],
        totals: Array,
        batch_idx: Array,
        groups: list[Group],
    ) -> Any:
        totals, metrics, outputs = pure.evaluate(
            collectives, treedef.unflatten(leaves), totals, batch_idx, *groups
        )
        note(metrics.facts)
        return totals, metrics.means, *([outputs] if keeps else [])

    keeps = pure.keeps_outputs
    roles = "state", "replicated", "replicated", "groups"
    arguments = leaves, pure.new_totals(), np.int32(0), groups
    results: tuple[Role, ...] = ("replicated", "replicated", "rows")
    return Body(evaluate, arguments, roles, results if keeps else results[:2])


def predict_body(
    pure: Steps, weights: Weights, groups: list[Group], _: int, note: Note
) -> Body:
    leaves, treedef = jax.tree.flatten(weights)

    def predict(collectives: Collectives, leaves: Any, groups: list[Group]) -> Any:
        return pure.predict(collectives, treedef.unflatten(leaves), *groups)

    return Body(predict, (leaves, groups), ("state", "groups"), "rows")


BODIES: Final[dict[str, Callable[..., Body]]] = {
    "train": train_body,
    "evaluate": evaluate_body,
    "predict": predict_body,
}
"""A function `(pure, inputs, groups, steps, note) -> Body` for each kind of step."""


def traced(step: Callable[..., Any], *arguments: Any) -> Any:
    """A step over all rows, as JAX sees it."""
    with clear_mesh(), pause_gc():
        return jax.make_jaxpr(
            lambda *given: step(Collectives(), *move_to_device(given))
        )(*arguments)
