"""Losses written for one example, and the binding of a user's loss to its arguments.

`per_example(fn)` is a `loss_fn` over a batch: it vmaps `fn`. Each value depends on one
row alone, so rows may be padded, masked, and split over devices.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from ..basics.arguments import checks_arguments
from ..basics.tracebacks import NoteOnError
from .model_call import row_axes
from .whole import unwrap_whole

_OFFERED: Final = "key", "training", "step"
"""Names that a loss of one example may take."""

_OF_BATCHES: Final = {
    "keys": "name `key`, which is this example's",
    "mask": "leave it out, as padding is left out of the mean",
    "state": "use a plain `loss_fn`, since a model with state sees the whole batch",
}
"""Names that only a loss of a batch may take, and the remedy for each."""


class Arguments:
    """Binds the elements of a batch, and the extras that a function names, to its
    parameters.

    Args:
        function: the user's function, `(model, *batch)`.
    """

    def __init__(self, function: Callable[..., Any]):
        self.signature = inspect.signature(function)
        if not self.signature.parameters:
            raise TypeError(
                f"a loss is called as (model, *batch), and {function!r} takes nothing."
            )
        first, *others = self.signature.parameters.values()
        if first.kind is first.VAR_POSITIONAL:  # the first of `*args` is the model
            others = [first, *others]
        self._after_model = self.signature.replace(parameters=others)
        # Arguments that functools.partial fills are not offered.
        is_partial = isinstance(function, functools.partial | eqx.Partial)
        filled = function.keywords if is_partial else {}
        self.names = {*self._after_model.parameters} - {*filled}

    def bind(
        self, batch: tuple[Any, ...], offered: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments after `model`: the batch by place, `offered` by name.

        Raises:
            TypeError: if the elements do not fit the parameters.
        """
        named = {n: v for n, v in offered.items() if n in self.names}
        values, queue, is_short = {}, list(batch), False
        for p in self._after_model.parameters.values():
            is_rest = p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            is_needed = p.default is p.empty and not is_rest
            # functools.partial makes the parameters after one that it fills
            # keyword-only.
            takes = p.kind <= p.POSITIONAL_OR_KEYWORD or is_needed
            if p.name in named:
                values[p.name] = named[p.name]
            elif queue and p.kind is p.VAR_POSITIONAL:
                values[p.name], queue = tuple(queue), []
            elif queue and takes:
                values[p.name] = queue.pop(0)
            else:
                is_short |= is_needed

        if queue or is_short:
            raise TypeError(self._describe_mismatch(len(batch), offered))
        bound = inspect.BoundArguments(self._after_model, values)
        return bound.args, bound.kwargs

    def _describe_mismatch(self, elements: int, offered: Mapping[str, Any]) -> str:
        message = (
            f"`loss_fn` is {self.signature} but a batch of this loader has"
            f" {elements} element(s): after the model come the elements of a tuple"
            " batch, or the whole batch if it is not a tuple, then any of"
            f" {', '.join(offered)} by name. Rename a parameter for an element that has"
            " such a name."
        )
        if "state" in self.names and "state" not in offered:
            message += (
                " It takes `state`, and Trainer(state=...) was not given; pass the"
                " State that eqx.nn.make_with_state returned."
            )
        return message


class PerExample:
    """A `loss_fn` of a batch, which `per_example` makes from a function of one example.

    Attributes:
        function: the function of one example.
        names: the names of its parameters, without the model.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self._arguments = Arguments(function)
        self.names = self._arguments.names
        for name in _OF_BATCHES.keys() & self.names:
            raise TypeError(
                f"`per_example`: the function is {self._arguments.signature}, and is"
                f" called on one example, so it can't name `{name}`;"
                f" {_OF_BATCHES[name]}. It may name {', '.join(_OFFERED)}. If `{name}`"
                " is an element of the batch, rename the parameter."
            )

    def __call__(
        self,
        model: PyTree,
        *batch: PyTree,
        keys: PRNGKeyArray | None = None,
        training: bool = True,
        step: int | Int[Array, ""] = 0,
    ) -> Any:
        """Returns the values of all rows, shaped `(rows,)`, in the structure of one
        row's.

        Args:
            model: passed on unchanged.
            *batch: leaves `(rows, ...)`; those in a `Whole` go to every example.
            keys: `(rows,)`, one PRNG key for each row.
            training: passed on.
            step: passed on.
        """

        def call(key: PRNGKeyArray | None, *example: PyTree) -> Any:
            offered = {"key": key, "training": training, "step": step}
            example = unwrap_whole(example)
            arguments, keywords = self._arguments.bind(example, offered)
            shapes = jax.tree.map(jnp.shape, example)
            with NoteOnError(
                f"the function was called on one example, of shapes {shapes}"
            ):
                return self.function(model, *arguments, **keywords)

        axes = None if keys is None else 0, *map(row_axes, batch)
        return jax.vmap(call, in_axes=axes)(keys, *batch)

    def __repr__(self) -> str:
        return f"per_example({getattr(self.function, '__name__', self.function)})"


@checks_arguments
def per_example(function: Callable[..., Any]) -> PerExample:
    """Makes a `loss_fn` of a function that is written for one example.

        def loss(model, x, y, key):
            return (model(x, key=key) - y) ** 2

        Trainer(model, loss_fn=per_example(loss))

    The function is vmapped over the rows of a batch. Since a value depends on its own
    row alone, ragged batches are padded to one shape, and each device works on its own
    rows and sends nothing but the sum of its gradients. A plain `loss_fn` is given the
    whole batch instead.

    Args:
        function: `function(model, *example)`; a batch that is not a tuple is one
            argument, and a `Whole` comes as the array itself. It may name `key` (the
            PRNG key of this row), `training` (a bool) and `step` (int32, completed
            steps). It returns a scalar, `(scalar, {name: scalar})`, or a pair `(value,
            weight)` in the place of any scalar, which makes a weighted mean over the
            set.

    Returns:
        A `loss_fn`, which can also be called by hand: `(model, *batch, keys=...)`.

    Raises:
        TypeError: if the function is not callable, or names `keys`, `mask` or `state`,
            which belong to a batch.
    """
    if not callable(function):
        raise TypeError(
            "`per_example` takes a function (model, *example) -> scalar; got"
            f" {function!r}."
        )
    return PerExample(function)
