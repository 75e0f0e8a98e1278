"""Calls of a user's model inside a step: vmapped, with the axes that it names.

A BatchNorm reduces over axes by name, and all of them are bound. A model with state is
always called with the full batch.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
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
    row_axis, *others = find_axis_names(model) or (None,)
    given_state = copy_state(model_state)
    offers = make_keyword_getter(model, training=rows.training)

    def one_row(row: PyTree, key: PRNGKeyArray) -> Any:
        keywords = offers(key)
        row = unwrap_whole(row)
        shapes = jax.tree.map(jnp.shape, row)
        with NoteOnError(f"the model was called on one example, of shape {shapes}"):
            if model_state is None:
                return model(row, **keywords), None
            return model(row, given_state, **keywords)

    def call_rows() -> Any:
        in_axes = row_axes(x), 0
        batched = jax.vmap(one_row, in_axes, out_axes=(0, None), axis_name=row_axis)
        return batched(x, rows.keys)

    prediction, new_state = bind_axes(others, call_rows)()
    return prediction, new_state


def row_axes(batch: PyTree) -> PyTree:
    """Returns the `in_axes` of a batch for `jax.vmap`: None for each `Whole`."""
    return jax.tree.map(
        lambda node: None if is_whole(node) else 0, batch, is_leaf=is_whole
    )


@contextlib.contextmanager
def note_dict_input(x: PyTree) -> Iterator[None]:
    """Names the keys of `x` if it is a dict and the model fails on it."""
    try:
        yield
    except (TypeError, AttributeError) as error:
        if not isinstance(x, Mapping):
            raise
        raise TypeError(
            f"`predict` called the model on a dict with the keys {list(x)}, with"
            f" one row of each, and that failed: {error}. If the model takes one"
            f" of them, pass [b[{next(iter(x), 'KEY')!r}] for b in loader]."
        ) from error


def bind_axes(names: list[str], call: Callable[[], Any]) -> Callable[[], Any]:
    """Returns `call`, in which each of the names is that of an axis of size one.

    So a model that reduces over ("batch", "data") runs without a mesh axis "data".
    """
    for name in names:
        mapped = jax.vmap(
            lambda _, call=call: call(),
            in_axes=None,
            out_axes=None,
            axis_size=1,
            axis_name=name,
        )
        call = functools.partial(mapped, None)
    return call


def find_axis_names(model: PyTree) -> tuple[str, ...]:
    """Returns the axes that the model's BatchNorms reduce over, in order."""
    names: dict[str, None] = {}
    for norm in find_nodes(eqx.nn.BatchNorm, model):
        axis = norm.axis_name
        names |= dict.fromkeys(axis if isinstance(axis, tuple | list) else (axis,))
    return tuple(names)


def make_keyword_getter(
    model: Any, *, training: bool
) -> Callable[[PRNGKeyArray | None], dict[str, Any]]:
    """Returns a function from a key to the keyword arguments that the model names.

    Raises:
        TypeError: see `check_training_flags`.
    """
    check_training_flags(model, training)
    named = find_keywords(model)

    def offers(key: PRNGKeyArray | None) -> dict[str, Any]:
        offered = {"key": key, "training": training}
        return {name: value for name, value in offered.items() if name in named}

    return offers


_OTHER_NAMES: Final = {
    "train": True,
    "is_training": True,
    "deterministic": False,
    "inference": False,
}
"""Other names of `training` in models, and the value of each while they train."""


def check_training_flags(model: Any, *passes: bool) -> None:
    """Raises if the model has a training flag that no call would set.

    No caller sets such a flag, so its default would hold in all passes. None, Equinox's
    default, leaves the choice to the layers.

    Args:
        model: the callable.
        passes: for each kind of call, whether it is in training.
    """
    named = find_keywords(model)
    for name in _OTHER_NAMES.keys() & named.keys():
        default, while_training = named[name].default, _OTHER_NAMES[name]
        if default is inspect.Parameter.empty:
            instead = "and it has no default"
        elif not isinstance(default, bool):
            continue
        elif all(default == (while_training == training) for training in passes):
            continue
        else:
            trains = "in training" if default == while_training else "outside training"
            instead = f"so that it is {default}, as {trains}, in every pass"
        raise TypeError(
            f"`model`: its `__call__` takes `{name}`, which is not passed, {instead}."
            " Call it `training`, which is passed (True in the steps of `fit`, else"
            " False), or leave it to eqx.nn.Dropout and eqx.nn.BatchNorm, whose"
            f" `inference` is set. For one value always, pass eqx.Partial(model,"
            f" {name}=...)."
        )


def find_keywords(model: Any) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of the model's call that no partial has filled."""

    def to_partial(call: Any) -> Any:
        call = inspect.unwrap(call, stop=lambda call: hasattr(call, "__signature__"))
        if not isinstance(call, functools.partial | eqx.Partial):
            return call
        return functools.partial(to_partial(call.func), *call.args, **call.keywords)

    call = to_partial(model)
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):  # not every builtin shows its own
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
        state: the state that belongs to `model`, or None.
    """

    model: PyTree
    state: eqx.nn.State | None

    def __init__(self, model: PyTree, state: eqx.nn.State | None):
        self.model, self.state = eqx.nn.inference_mode(model), state

    def __call__(self, x: PyTree, *, key: PRNGKeyArray | None = None) -> PyTree:
        """Returns the prediction for one example; models may draw from `key`."""
        keywords = make_keyword_getter(self.model, training=False)(key)
        if self.state is None:
            return self.model(x, **keywords)
        return self.model(x, copy_state(self.state), **keywords)[0]
