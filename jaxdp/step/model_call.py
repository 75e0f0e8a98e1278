"""Calls of a user's model inside a step: vmapped, with the arguments that it names.

A model with state is always called with the full batch.
"""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray, PyTree

from ..basics.tracebacks import NoteOnError
from ..basics.tree import find_nodes, map_nodes
from .mask_and_keys import MaskAndKeys
from .whole import is_whole, unwrap_whole


def call_model(
    model: PyTree,
    model_state: PyTree,
    x: PyTree,
    mask_and_keys: MaskAndKeys,
) -> tuple[PyTree, PyTree]:
    """Calls the model on every row of `x`; returns predictions and the new state.

    The model is vmapped over the rows of `x`, and gets each `Whole` in `x` as it is. It
    gets `key` and `training` if its `__call__` names them. The vmapped axis has the
    name that its BatchNorm layers use.
    """
    given_state = copy_state(model_state)
    axes = {norm.axis_name for norm in find_nodes(eqx.nn.BatchNorm, model)}
    if len(axes) > 1 or any(not isinstance(axis, str) for axis in axes):
        raise ValueError(
            f"the model's BatchNorm layers name the axes {sorted(map(str, axes))}; give"
            " all of them one, axis_name='batch', which has all rows of the batch."
        )

    def one_row(row: PyTree, key: PRNGKeyArray) -> Any:
        keywords = bind_keywords(model, key, training=mask_and_keys.training)
        row = unwrap_whole(row)
        with note_on_example("model", row):
            if model_state is None:
                return model(row, **keywords), None
            return model(row, given_state, **keywords)

    return jax.vmap(
        one_row,
        (row_axes(x), 0),
        out_axes=(0, None),
        axis_name=next(iter(axes), None),
    )(x, mask_and_keys.keys)


def note_on_example(what: str, example: PyTree) -> NoteOnError:
    """Returns a context that notes the shapes of an example on errors."""
    shapes = jax.tree.map(jnp.shape, example)
    return NoteOnError(
        f"the {what} was called on one example, of shape {shapes} (jax.vmap adds the"
        " batch)"
    )


def row_axes(batch: PyTree) -> PyTree:
    """Returns the `in_axes` of a batch for `jax.vmap`: None for each `Whole`."""
    return jax.tree.map(
        lambda node: None if is_whole(node) else 0, batch, is_leaf=is_whole
    )


def bind_keywords(model: Any, key: Any, *, training: bool) -> dict[str, Any]:
    """Returns those of `key` and `training` that the model's call names."""
    check_training_flags(model)
    named = find_keywords(model)
    offered = {"key": key, "training": training}
    return {name: value for name, value in offered.items() if name in named}


def check_training_flags(model: Any) -> None:
    """Raises if a model's call has a flag, such as `inference`, that steps do not pass.

    Its default would hold in training and validation alike. A default of None is
    Equinox's, and leaves the choice to the layers.
    """
    named = find_keywords(model)
    for name in "train", "is_training", "deterministic", "inference":
        if name in named and named[name].default is not None:
            raise TypeError(
                f"`model`: its `__call__` takes `{name}`, which is not passed, so that"
                " its default would hold in every pass. Call it `training`, which is"
                " passed (True in the steps of `fit`, else False), or leave it to"
                " eqx.nn.Dropout and eqx.nn.BatchNorm, whose `inference` is set. For"
                f" one value always, pass eqx.Partial(model, {name}=...)."
            )


def find_keywords(model: Any) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a model's or function's call that no
    `functools.partial` has filled; none for builtins without a signature.
    """

    def to_partial(call: Any) -> Any:
        call = inspect.unwrap(call, stop=lambda call: hasattr(call, "__signature__"))
        if not isinstance(call, functools.partial | eqx.Partial):
            return call
        return functools.partial(to_partial(call.func), *call.args, **call.keywords)

    call = to_partial(model)
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):
        return {}
    filled = call.keywords if isinstance(call, functools.partial) else {}
    return {name: p for name, p in parameters.items() if name not in filled}


def accepts_keyword(model: Any, name: str) -> bool:
    """Returns True if the model's call takes an argument of that name."""
    named = find_keywords(model)
    kinds = {parameter.kind for parameter in named.values()}
    return name in named or inspect.Parameter.VAR_KEYWORD in kinds


def copy_state(model_state: PyTree) -> PyTree:
    """Returns a copy of a model's `eqx.nn.State`: Equinox lets each be used once."""

    def copy_node(state: eqx.nn.State) -> eqx.nn.State:
        values, markers = state.tree_flatten()
        return eqx.nn.State.tree_unflatten(markers, values)

    return map_nodes(eqx.nn.State, copy_node, model_state)


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
        with NoteOnError("it takes one example; for several: jax.vmap(infer)(xs)"):
            if self.state is None:
                return self.model(x, **keywords)
            return self.model(x, copy_state(self.state), **keywords)[0]
