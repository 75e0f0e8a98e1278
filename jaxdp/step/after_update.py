"""The user's `after_update`: the change of a model after each optimizer step."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Int, PyTree

from ..basics.arguments import check_call
from ..basics.tree import describe_difference, leaf_path
from .loss_output import describe
from .model_call import find_keywords
from .train_state import match_dtypes


class AfterUpdate:
    """Calls the function of the user, and checks the returned model.

    Args:
        function: `model -> model`, which may name `key` and `step`.
        static: the leaves of the model that are not arrays.

    Raises:
        TypeError: if the function can't be called like that.
    """

    def __init__(self, function: Callable[..., PyTree], static: PyTree):
        self.function, self.static = function, static
        if not callable(function):
            raise TypeError(
                "`after_update` must be a function model -> model, which may name `key`"
                f" and `step`; got {function!r}."
            )
        self._names = {"key", "step"} & find_keywords(function).keys()
        hint = "with the model and what it names of `key` and `step`"
        check_call("`after_update`", function, hint, None, **dict.fromkeys(self._names))

    def __call__(
        self, params: PyTree, buffers: PyTree, key: Any, step: Int[Array, ""]
    ) -> tuple[PyTree, PyTree]:
        """Returns the changed trained leaves, and the other arrays."""
        model = eqx.combine(params, buffers, self.static)
        offered = {"key": key, "step": step}
        new = self.function(model, **{name: offered[name] for name in self._names})
        old = eqx.filter(model, eqx.is_array)
        if differing := _find_difference(model, new):
            raise TypeError(
                f"`after_update` returned {describe(new)}; it must be the model, in"
                " which nothing but values of arrays is changed, as by eqx.tree_at:"
                f" {differing}."
            )
        new = match_dtypes(
            old, eqx.filter(new, eqx.is_array), "model of `after_update`"
        )
        is_none = lambda leaf: leaf is None  # noqa: E731
        trained = jax.tree.map(lambda p: p is not None, params, is_leaf=is_none)
        return eqx.partition(new, trained)


def _find_difference(model: PyTree, new: PyTree) -> str:
    """Returns a clause on the first difference other than values of arrays; "" if there
    is none.
    """
    old, other = (eqx.filter(x, eqx.is_array, inverse=True) for x in (model, new))
    if jax.tree.structure(old) != jax.tree.structure(other):
        return describe_difference(old, other)
    leaves = zip(
        jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(other), strict=True
    )
    for (path, before), after in leaves:
        # Identical arrays may contain NaN, which does not equal itself.
        if not (before is after or eqx.tree_equal(before, after)):
            return f"{leaf_path(path)} is another one"
    return ""
