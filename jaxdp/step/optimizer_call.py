"""The call of an optimizer, with the loss if it asks for it; clipping before it.

`optax.lbfgs`, line searches and `optax.contrib.sam` in its opaque mode evaluate the
loss at other parameters than the current ones.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree
from optax.contrib import SAMState

from ..basics.tree import find_nodes
from .train_state import TrainState

_LINE_SEARCHES: Final = (
    optax.ScaleByBacktrackingLinesearchState,
    optax.ScaleByZoomLinesearchState,
)


def add_clipping(
    optimizer: optax.GradientTransformation, norm: float | None
) -> optax.GradientTransformation:
    """Returns the optimizer, preceded by clipping of the gradients to a global norm.

    Without `norm`, it is the optimizer itself.
    """
    if norm is None:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(float(norm)), optimizer)


def conjugate_leaves(grads: PyTree) -> PyTree:
    """Conjugates complex gradients, so that they point uphill; JAX's do not."""
    return jax.tree.map(
        lambda leaf: jnp.conj(leaf) if jnp.iscomplexobj(leaf) else leaf, grads
    )


def run_optimizer(
    optimizer: optax.GradientTransformationExtraArgs,
    grads: PyTree,
    state: TrainState,
    loss: Array,
    evaluate: Callable[[PyTree], tuple[Array, PyTree]],
) -> tuple[PyTree, PyTree]:
    """Returns the optimizer's updates and new state.

    Args:
        optimizer: may ask for the loss by name, `value`, `value_fn`, `grad`, `grad_fn`.
        grads: JAX's gradient of the loss.
        state: the state before the step.
        loss: the mean over the batch.
        evaluate: `(params) -> (loss, JAX's gradient)` at other parameters. It is traced
            only if the optimizer calls one of the functions.
    """

    @jax.custom_jvp
    def value_fn(params: PyTree) -> Array:
        return evaluate(params)[0]

    @value_fn.defjvp
    def _(primals: Any, tangents: Any) -> tuple[Array, Array]:  # pyright: ignore
        # Use the gradient of the step instead of differentiating through micro-batches
        # and collectives. That needs no more memory, and rounds as steps do.
        value, grads = evaluate(*primals)
        products = jax.tree.map(lambda g, t: (g * t).sum().real, grads, *tangents)
        total = sum(jax.tree.leaves(products), start=jnp.zeros_like(value))
        return value, total.astype(value.dtype)

    def grad_fn(params: PyTree, *_: Any) -> PyTree:
        return conjugate_leaves(evaluate(params)[1])

    uphill = conjugate_leaves(grads)
    offered = {"value": loss, "value_fn": value_fn, "grad": uphill, "grad_fn": grad_fn}
    if find_nodes(optax.ScaleByBacktrackingLinesearchState, state.opt_state):
        # It computes the slope from JAX's gradient, while optax's zoom search uses the
        # conjugate.
        offered["grad"] = grads
    arguments = uphill, state.opt_state, state.params
    return call_update(optimizer.update, *arguments, offered)


def call_update(
    update: Callable[..., Any],
    grads: PyTree,
    state: PyTree,
    params: PyTree,
    offered: Mapping[str, Any],
) -> tuple[PyTree, PyTree]:
    """Calls an optimizer's `update` with the names of `offered` that it takes."""
    parameters = inspect.signature(update).parameters.values()
    named = {p.name: offered[p.name] for p in parameters if p.name in offered}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        return update(grads, state, params, **named)

    # These are for the inner stages. optax's line searches raise for grad_fn, and
    # optax.contrib.sam for all other names.
    others = dict(offered)
    if find_nodes(SAMState, state):
        others = {"grad_fn": others.get("grad_fn")}
    elif any(find_nodes(kind, state) for kind in _LINE_SEARCHES):
        others.pop("grad_fn", None)
    return update(grads, state, params, **others | named)
