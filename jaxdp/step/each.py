"""An optimizer of many models at once, whose leaves have an axis of models in front."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .value_fn import offered


def init_each(inner: Any, params: PyTree) -> PyTree:
    """The state of the optimizer `inner` for each model of `params`, `(models, ...)`.

    Its scalars are taken to be the same for all models, which learning rates must be to
    be set; unless an update makes them of gradients.
    """
    each = jax.vmap(inner.init)(params)
    shared = jax.tree.map(lambda leaf: leaf[0] if leaf.ndim == 1 else leaf, each)
    extra = offered(inner.update, jnp.float32(0), params, _refuse)
    try:
        jax.eval_shape(update_each(inner, shared, extra), params, shared, params)
    except ValueError:  # of vmap, which finds that a scalar differs
        return each
    return shared


def update_each(
    inner: Any, state: PyTree, extra: Mapping[str, Any]
) -> Callable[..., tuple[PyTree, PyTree]]:
    """`inner.update` for gradients, states like `state`, and weights of each model."""
    axes = jax.tree.map(lambda leaf: 0 if jnp.ndim(leaf) else None, state)
    functions = {"value_fn", "grad_fn"} & extra.keys()
    own = {**extra, **dict.fromkeys(functions, _refuse)}

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        if "grad" in own:
            own["grad"] = grads
        return inner.update(grads, state, params, **own)

    return jax.vmap(update, in_axes=(0, axes, 0), out_axes=(0, axes))


def _refuse(*_: Any) -> Any:
    """In the place of the loss, which is one of all models."""
    raise ValueError(
        "`optimizer` evaluates the loss, as optax.lbfgs does, and with `ensemble` or"
        " the strategy LocalSGD there are several models, which have a loss each. Take"
        " an optimizer that needs gradients alone, such as optax.adamw."
    )
