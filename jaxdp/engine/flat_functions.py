"""The step functions with flat lists of arrays as arguments, as `jax.jit` gets them."""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..step import (
    OWN_LOOP,
    Collectives,
    Facts,
    Group,
    StepFunctions,
    TrainState,
    Weights,
)
from ..strategies.base import Role

SetFacts = Callable[[Facts], None]
"""Receives the facts about a step that tracing has found."""


class FlatFunction(NamedTuple):
    """A step function of flat lists of arrays, as `DataParallel.compile` takes it."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    roles: tuple[Role, ...]
    results: Role | tuple[Role, ...]


def make_train_function(
    step_functions: StepFunctions,
    state: TrainState,
    groups: list[Group],
    num_steps: int,
    set_facts: SetFacts,
) -> FlatFunction:
    """Returns the function of one train step, or of a loop over `num_steps`."""
    leaves, treedef = jax.tree.flatten(state)

    def train(collectives: Collectives, leaves: Any, groups: list[Group]) -> Any:
        state = treedef.unflatten(leaves)
        state, metrics = step_functions.train(collectives, state, groups)
        set_facts(metrics.facts)
        return jax.tree.leaves(state), (metrics.means, metrics.inside)

    def train_all(collectives: Collectives, leaves: Any, groups: list[Group]) -> Any:
        (group,) = groups
        batches = jax.tree.map(lambda x: x.reshape(num_steps, -1, *x.shape[1:]), group)

        def select_batch(index: Any) -> Group:
            return jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False),
                batches,
            )

        def body(leaves: list[Array], index: Array) -> tuple[Any, Any]:
            # `index` is never negative, which XLA can't know. So the selection stays a
            # branch, XLA does not fuse it with the step, and the step rounds as a
            # single one does.
            group = jax.lax.cond(
                index >= 0, select_batch, lambda _: select_batch(0), index
            )
            return train(collectives, leaves, [group])

        # The carry and the batch have the arguments of a single step, so that XLA fuses
        # the same operations in both programs. Other fusions round differently.
        with jax.named_scope(OWN_LOOP):
            return jax.lax.scan(body, leaves, jnp.arange(num_steps))

    function = train if num_steps == 1 else train_all
    roles = "state", "groups"
    return FlatFunction(function, (leaves, groups), roles, ("state", "replicated"))


def make_evaluate_function(
    step_functions: StepFunctions,
    weights: Weights,
    groups: list[Group],
    _: int,
    set_facts: SetFacts,
) -> FlatFunction:
    """Returns the function that adds a batch to the sums of an evaluation."""
    leaves, treedef = jax.tree.flatten(weights)

    def evaluate(
        collectives: Collectives,
        leaves: list[Array],
        totals: Array,
        batch_idx: Array,
        groups: list[Group],
    ) -> Any:
        totals, metrics, outputs = step_functions.evaluate(
            collectives, treedef.unflatten(leaves), totals, batch_idx, *groups
        )
        set_facts(metrics.facts)
        return totals, metrics.means, *([outputs] if keeps_outputs else [])

    keeps_outputs = step_functions.keeps_outputs
    roles = "state", "replicated", "replicated", "groups"
    arguments = leaves, step_functions.init_totals(), np.int32(0), groups
    results: tuple[Role, ...] = ("replicated", "replicated", "rows")
    return FlatFunction(
        evaluate, arguments, roles, results if keeps_outputs else results[:2]
    )


def make_predict_function(
    step_functions: StepFunctions,
    weights: Weights,
    groups: list[Group],
    _: int,
    set_facts: SetFacts,
) -> FlatFunction:
    """Returns the function of predictions for a batch."""
    leaves, treedef = jax.tree.flatten(weights)

    def predict(collectives: Collectives, leaves: Any, groups: list[Group]) -> Any:
        return step_functions.predict(collectives, treedef.unflatten(leaves), *groups)

    return FlatFunction(predict, (leaves, groups), ("state", "groups"), "rows")


FLAT_FUNCTIONS: Final[dict[str, Callable[..., FlatFunction]]] = {
    "train": make_train_function,
    "evaluate": make_evaluate_function,
    "predict": make_predict_function,
}
"""A function `(step_functions, inputs, groups, num_steps, set_facts)` for each kind of
step."""
