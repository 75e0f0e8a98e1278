"""Calls of a user's model inside a step: vmapped, with the arguments that it names.

A model with state is always called with the full batch.
"""

import functools
import inspect
from collections.abc import Mapping
from typing import Any, Final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray, PyTree

from ..basics.tracebacks import NoteOnError
from ..basics.tree import find_nodes, map_nodes
from .state import MaskAndKeys
from .whole import is_whole, unwrap_whole


def call_model(
    model: PyTree,
    model_state: PyTree,
    x: PyTree,
    rows: MaskAndKeys,
) -> tuple[PyTree, PyTree]:
    """Calls the model on every row of `x`; returns predictions and the new state.

    The model is vmapped over `x`, but for each `Whole` in it. It gets `key` and
    `training` if its `__call__` names them. The axis has the name that its BatchNorm
    layers use.
    """
    given_state = copy_state(model_state)

    def one_row(row: PyTree, key: PRNGKeyArray) -> Any:
        keywords = bind_keywords(model, key, training=rows.training)
        row = unwrap_whole(row)
        shapes = jax.tree.map(jnp.shape, row)
        with NoteOnError(f"the model was called on one example, of shape {shapes}"):
            if model_state is None:
                return model(row, **keywords), None
            return model(row, given_state, **keywords)

    return jax.vmap(
        one_row,
        (row_axes(x), 0),
        out_axes=(0, None),
        axis_name=find_axis_name(model),
    )(x, rows.keys)


def row_axes(batch: PyTree) -> PyTree:
    """Returns the `in_axes` of a batch for `jax.vmap`: None for each `Whole`."""
    return jax.tree.map(
        lambda node: None if is_whole(node) else 0, batch, is_leaf=is_whole
    )


def find_axis_name(model: PyTree) -> Any:
    """Returns the axis that the model's BatchNorms reduce over, or None."""
    names = [norm.axis_name for norm in find_nodes(eqx.nn.BatchNorm, model)]
    if any(name != names[0] or not isinstance(name, str) for name in names):
        raise ValueError(
            f"the model's BatchNorm layers name the axes {names}; give all of them one,"
            " axis_name='batch', which has all rows of the batch, of all devices."
        )
    return next(iter(names), None)


def bind_keywords(model: Any, key: Any, *, training: bool) -> dict[str, Any]:
    """Returns `key` and `training`, where the model's call names them.

    Raises:
        TypeError: see `check_training_flags`.
    """
    check_training_flags(model)
    named = find_keywords(model)
    offered = {"key": key, "training": training}
    return {name: value for name, value in offered.items() if name in named}


_OTHER_NAMES: Final = "train", "is_training", "deterministic", "inference"
"""Other names of `training` in models."""


def check_training_flags(model: Any) -> None:
    """Raises if the model has a training flag that no call would set.

    The flag's default would apply in training and in validation. None, Equinox's
    default, leaves the choice to the layers.
    """
    named = find_keywords(model)
    for name in _OTHER_NAMES:
        if name in named and named[name].default is not None:
            raise TypeError(
                f"`model`: its `__call__` takes `{name}`, which is not passed, so that"
                " its default would hold in every pass. Call it `training`, which is"
                " passed (True in the steps of `fit`, else False), or leave it to"
                " eqx.nn.Dropout and eqx.nn.BatchNorm, whose `inference` is set. For"
                f" one value always, pass eqx.Partial(model, {name}=...)."
            )


def find_keywords(model: Any) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of the model's call that no `functools.partial` has
    filled.
    """

    def to_partial(call: Any) -> Any:
        call = inspect.unwrap(call, stop=lambda call: hasattr(call, "__signature__"))
        if not isinstance(call, functools.partial | eqx.Partial):
            return call
        return functools.partial(to_partial(call.func), *call.args, **call.keywords)

    call = to_partial(model)
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):  # not every builtin has a signature
        return {}
    filled = call.keywords if isinstance(call, functools.partial) else {}
    return {name: p for name, p in parameters.items() if name not in filled}


def accepts_keyword(model: Any, name: str) -> bool:
    """Returns True if the model's call takes an argument of that name."""
    named = find_keywords(model)
    kinds = {parameter.kind for parameter in named.values()}
    return name in named or inspect.Parameter.VAR_KEYWORD in kinds


def copy_state(model_state: PyTree) -> PyTree:
    """Returns a copy of the `eqx.nn.State` of a model, which may be used only once."""

    def copy_one(state: eqx.nn.State) -> eqx.nn.State:
        values, markers = state.tree_flatten()
        return eqx.nn.State.tree_unflatten(markers, values)

    return map_nodes(eqx.nn.State, copy_one, model_state)


class InferenceModel(eqx.Module):
    """A model in inference mode, with its `eqx.nn.State` inside: takes one example.

        infer = trainer.inference_model()
        infer(x), jax.vmap(infer)(xs), eqx.filter_jit(infer)(x)

    Args:
        model: takes one example, and the state if there is one.
        state: the `eqx.nn.State` of `model`, or None.
    """

    model: PyTree
    state: eqx.nn.State | None

    def __init__(self, model: PyTree, state: eqx.nn.State | None):
        self.model, self.state = eqx.nn.inference_mode(model), state

    def __call__(self, x: PyTree, *, key: PRNGKeyArray | None = None) -> PyTree:
        """Returns the prediction for one example; models may draw from `key`."""
        keywords = bind_keywords(self.model, key, training=False)
        if self.state is None:
            return self.model(x, **keywords)
        return self.model(x, copy_state(self.state), **keywords)[0]
