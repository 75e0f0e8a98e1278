"""Losses written for one example, and the binding of a user's loss to its arguments.

`per_example(fn)` is a `loss_fn` over a batch: it vmaps `fn`. Each value depends on one
row alone, so rows may be padded, masked, and split over devices.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from ..basics.arguments import checks_arguments
from .model_call import find_keywords, note_on_example, row_axes
from .whole import unwrap_whole


class Arguments:
    """Binds the elements of a batch, and the extras that a function names, to its
    parameters.

    Args:
        function: the user's function, `(model, *batch)`.
    """

    def __init__(self, function: Callable[..., Any]):
        parameters = [*find_keywords(function).values()]
        if not parameters:
            raise TypeError(
                f"a loss is called as (model, *batch), and {function!r} takes nothing."
            )
        self.signature = inspect.Signature(parameters)
        first, *others = parameters
        if first.kind is first.VAR_POSITIONAL:  # the first of `*args` is the model
            others = parameters
        self._after_model = inspect.Signature(others)
        self.names = {*self._after_model.parameters}

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
            raise TypeError(
                f"`loss_fn` is {self.signature} but a batch of this loader has"
                f" {len(batch)} element(s): after the model come the elements of a"
                " tuple batch, or the whole batch if it is not a tuple, then any of"
                f" {', '.join(offered)} by name. Rename a parameter for an element that"
                " has such a name. (`state` is the State from eqx.nn.make_with_state,"
                " for Trainer(state=...).)"
            )
        bound = inspect.BoundArguments(self._after_model, values)
        return bound.args, bound.kwargs


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
        if self.names & {"keys", "mask", "state"}:
            raise TypeError(
                f"`per_example`: the function is {self._arguments.signature}, and is"
                " called on one example, so it can't name `keys`, `mask` or `state`. It"
                " may name `key`, `training` and `step`, and padding is left out of the"
                " mean. Write a plain `loss_fn` for a model with state; rename a"
                " parameter for an element of the batch that has such a name."
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
            with note_on_example("function", example):
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
