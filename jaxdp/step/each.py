"""An optimizer of many models at once, whose leaves have an axis of models in front."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from .value_fn import offered


def init_each(inner: Any, params: PyTree, *, own_losses: bool = False) -> PyTree:
    """The state of the optimizer `inner` for each model of `params`, `(models, ...)`.

    Scalars that are like no parameter are taken to be the same for all models, which
    learning rates must be to be set; unless an update makes them of gradients.
    """
    states = jax.vmap(inner.init)(params)
    shared = _shared(inner, states)
    models = max((len(leaf) for leaf in jax.tree.leaves(params)), default=0)
    loss = jnp.zeros(models if own_losses else ())
    extra = offered(inner.update, loss, params, _refuse)
    update = update_each(inner, shared, extra, own_losses=own_losses)
    try:
        jax.eval_shape(update, params, shared, params)
    except _NeedsLosses:
        raise
    except ValueError:  # of vmap, which finds that a scalar differs
        return states
    return shared


def _shared(inner: Any, each: PyTree) -> PyTree:
    """The states of all models, with one of each scalar that is like no parameter."""

    def one(leaf: Any) -> Any:
        return leaf[0] if leaf.ndim == 1 else leaf

    try:
        return optax.tree_utils.tree_map_params(
            inner, lambda leaf: leaf, each, transform_non_params=one
        )
    except Exception:  # of an optimizer that optax can't ask for its parameters
        return jax.tree.map(one, each)


def update_each(
    inner: Any, state: PyTree, extra: Mapping[str, Any], *, own_losses: bool = False
) -> Callable[..., tuple[PyTree, PyTree]]:
    """`inner.update` for gradients, states like `state`, and weights of each model.

    With `own_losses` the loss in `extra` has one value for each.
    """
    axes = jax.tree.map(lambda leaf: 0 if jnp.ndim(leaf) else None, state)
    functions = {"value_fn", "grad_fn"} & extra.keys()
    arguments = {**extra, **dict.fromkeys(functions, _refuse)}

    given = {"value": arguments.pop("value")} if "value" in arguments else {}
    of_each = 0 if own_losses else None

    def update(
        grads: PyTree, state: PyTree, params: PyTree, given: Mapping[str, Any]
    ) -> tuple[PyTree, PyTree]:
        own_grad = {"grad": grads} if "grad" in arguments else {}
        return inner.update(grads, state, params, **{**arguments, **given, **own_grad})

    mapped = jax.vmap(update, in_axes=(0, axes, 0, of_each), out_axes=(0, axes))
    return lambda grads, state, params: mapped(grads, state, params, given)


class _NeedsLosses(ValueError):
    pass


def _refuse(*_: Any) -> Any:
    """Stands in the place of the loss, which is one of all models."""
    raise _NeedsLosses(
        "`optimizer` evaluates the loss, as optax.lbfgs does, but with `ensemble`"
        " or the strategy LocalSGD there are several models with a loss each. Use"
        " an optimizer that only needs gradients, such as optax.adamw."
    )
