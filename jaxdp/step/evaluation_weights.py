"""Finds the weights to evaluate if an optimizer takes gradients at others.

`StateLayout.choose_weights` decides between these and those of a callback, such as
`WeightAveraging`.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree
from optax import LookaheadState, MaskedNode
from optax.contrib import SAMState, ScheduleFreeState

from ..basics.host_memory import move_to_device
from ..basics.tree import find_nodes
from .train_state import TrainState


@runtime_checkable
class KeepsWeights(Protocol):
    """An optimizer's state, or a node of it, that holds the weights to evaluate."""

    def evaluated_params(self, params: PyTree) -> PyTree:
        """Returns the weights to evaluate, in the shapes of the trained `params`."""
        ...


def make_weights_view(opt_state: PyTree) -> Callable[[TrainState], TrainState] | None:
    """Returns a function that puts the weights to evaluate into a state, or None.

    None means that the weights to evaluate are those that the optimizer trains.

    Args:
        opt_state: arrays, or their shapes.

    Raises:
        ValueError: for `optax.lookahead`, and for SAM that changes weights in steps.
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=_has_eval_weights)
    if find_nodes(LookaheadState, opt_state):
        raise ValueError(
            "`optimizer`: optax.lookahead trains pairs of fast and slow weights, which"
            " are no model to call. jaxdp.callbacks.WeightAveraging() averages weights."
        )
    if any(node.cache is not None for node in find_nodes(SAMState, opt_state)):
        raise ValueError(
            "`optimizer`: optax.contrib.sam trains adversarial weights in some steps,"
            " which are not to be evaluated; pass opaque_mode=True to it."
        )
    return _replace_params if any(map(_has_eval_weights, nodes)) else None


def _has_eval_weights(node: Any) -> bool:
    return isinstance(node, ScheduleFreeState | KeepsWeights)


def _replace_params(state: TrainState) -> TrainState:
    if not isinstance(jax.tree.leaves(state)[0], jax.Array):  # a plan has only shapes
        return state
    layouts = jax.tree.map(lambda leaf: leaf.sharding, state.params)
    evaluate = jax.jit(evaluated_params, out_shardings=layouts)
    nodes = jax.tree.leaves(state.opt_state, is_leaf=_has_eval_weights)
    nodes = move_to_device([node for node in nodes if _has_eval_weights(node)])
    return state._replace(params=evaluate(state.params, nodes))


def evaluated_params(params: PyTree, opt_state: PyTree) -> PyTree:
    """Returns the weights to evaluate, for an optimizer that has trained `params`."""
    nodes = jax.tree.leaves(opt_state, is_leaf=_has_eval_weights)
    for node in filter(_has_eval_weights, nodes):
        if isinstance(node, ScheduleFreeState):
            average = functools.partial(_average_schedule_free, node.b1)
            params = jax.tree.map(average, params, node.z)
        else:
            params = node.evaluated_params(params)
    return params


def _average_schedule_free(b1: Any, y: Array, z: Any) -> Array:
    """Returns the average `x` of arXiv:2405.15682; trained is `y = b1 x + (1 - b1) z`.

    It is what `optax.contrib.schedule_free_eval_params` returns. `b1` is a number, or
    one for each member of an ensemble.
    """
    if z is None or isinstance(z, MaskedNode):
        return y
    b1 = jnp.asarray(b1)
    b1 = b1.reshape(b1.shape + (1,) * (y.ndim - b1.ndim))
    return ((y - (1 - b1) * z) / b1).astype(y.dtype)
