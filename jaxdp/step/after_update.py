"""The user's `after_update`: the change of a model after each optimizer step."""

import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Int, PyTree

from ..basics.tree import describe_difference, leaf_path
from .model_call import find_keywords


class AfterUpdate:
    """Calls the function of the user, and checks what it returns.

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
        signature = None
        try:
            signature = inspect.signature(function)
            signature.bind(None, **dict.fromkeys(self._names))
        except ValueError:  # some built-in callables have none
            pass
        except TypeError as error:
            raise TypeError(
                f"`after_update` is {signature}, and is called with the model and what"
                f" it names of `key` and `step`: {error}."
            ) from None

    def __call__(
        self, params: PyTree, buffers: PyTree, key: Any, step: Int[Array, ""]
    ) -> tuple[PyTree, PyTree]:
        """Returns the changed trained leaves, and the other arrays."""
        model = eqx.combine(params, buffers, self.static)
        offered = {"key": key, "step": step}
        new = self.function(model, **{name: offered[name] for name in self._names})
        if jax.tree.structure(new) != jax.tree.structure(model):
            raise TypeError(
                f"`after_update` returned a {type(new).__name__} of another structure"
                " than the model's; it must return the model, changed by eqx.tree_at or"
                f" jax.tree.map: {describe_difference(model, new)}."
            )

        def same_kind(path: Any, old: Any, new: Any) -> Any:
            is_array, was, now = eqx.is_array(old), _kind(old), _kind(new)
            is_same = was == now if is_array else new is old or eqx.tree_equal(new, old)
            if not is_same:
                raise TypeError(
                    f"`after_update` makes {now} of {leaf_path(path)}, which is {was};"
                    " it may change the values of arrays, but no shape, no dtype and"
                    " nothing that is not an array."
                )
            weak = is_array and getattr(new, "weak_type", False)
            return jax.lax.convert_element_type(new, new.dtype) if weak else new

        new = jax.tree_util.tree_map_with_path(same_kind, model, new)
        is_none = lambda leaf: leaf is None  # noqa: E731
        trained = jax.tree.map(lambda p: p is not None, params, is_leaf=is_none)
        params, others = eqx.partition(new, trained)
        return params, eqx.filter(others, eqx.is_array)


def _kind(leaf: Any) -> str:
    if not eqx.is_array(leaf):
        return repr(leaf)
    return f"an array of shape {leaf.shape}, {leaf.dtype}"
