"""The user's `after_update(model)`: new weights inside a step, behind the optimizer."""

import inspect
from collections.abc import Callable
from typing import Any, Final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from ..basics.tree import leaf_path

_OURS: Final = "key", "step"


class AfterUpdate:
    """Calls the function of the user, and checks what it returns.

    Args:
        function: `model -> model`, which may name `key` and `step`.
        static: the leaves of the model that are not arrays.
        members: how many models the arrays hold, if they are those of an ensemble.

    Raises:
        TypeError: if the function can't be called like that.
    """

    def __init__(
        self, function: Callable[..., PyTree], static: PyTree, members: int | None
    ):
        self.function, self.static, self.members = function, static, members
        if not callable(function):
            raise TypeError(
                "`after_update` must be a function model -> model, which may name `key`"
                f" and `step`; got {function!r}."
            )
        try:
            signature = inspect.signature(function)
        except ValueError:  # some built-in callables have none
            self._names: set[str] = set()
            return
        filled = getattr(function, "keywords", {})
        self._names = {*_OURS} & {*signature.parameters} - {*filled}
        try:
            signature.bind(None, **dict.fromkeys(self._names))
        except TypeError as error:
            raise TypeError(
                f"`after_update` is {signature}, and is called with the model and what"
                f" it names of `key` and `step`: {error}."
            ) from None

    def __call__(
        self, params: PyTree, buffers: PyTree, key: Any, step: Int[Array, ""]
    ) -> tuple[PyTree, PyTree]:
        """The trained leaves and the other arrays, as the function changes them."""
        if self.members is None:
            return self._of_one(params, buffers, key, step)

        def of_member(params: PyTree, buffers: PyTree, member: Any) -> Any:
            member_key = jax.random.fold_in(key, member)
            return self._of_one(params, buffers, member_key, step)

        return jax.vmap(of_member)(params, buffers, jnp.arange(self.members))

    def _of_one(self, params: PyTree, buffers: PyTree, key: Any, step: Any) -> Any:
        model = eqx.combine(params, buffers, self.static)
        offered = {"key": key, "step": step}
        new = self.function(model, **{name: offered[name] for name in self._names})
        if (treedef := jax.tree.structure(new)) != jax.tree.structure(model):
            raise TypeError(
                f"`after_update` returned a {type(new).__name__} of another structure"
                " than the model's; it must return the model, changed by eqx.tree_at or"
                f" jax.tree.map. It was {jax.tree.structure(model)}, is {treedef}."
            )

        def same_kind(path: Any, old: Any, new: Any) -> Any:
            if not eqx.is_array(old):
                if new is old or eqx.tree_equal(new, old):
                    return new
                was, now = repr(old), repr(new)
            elif not eqx.is_array(new):
                was, now = _kind(old), repr(new)
            elif (old.shape, old.dtype) == (new.shape, new.dtype):
                weak = getattr(new, "weak_type", False)
                return jax.lax.convert_element_type(new, new.dtype) if weak else new
            else:
                was, now = _kind(old), _kind(new)
            raise TypeError(
                f"`after_update` makes {now} of {leaf_path(path)}, which is {was}; it"
                " may change the values of arrays, but no shape, no dtype and nothing"
                " that is not an array."
            )

        new = jax.tree_util.tree_map_with_path(same_kind, model, new)
        is_none = lambda leaf: leaf is None  # noqa: E731
        trained = jax.tree.map(lambda p: p is not None, params, is_leaf=is_none)
        params, others = eqx.partition(new, trained)
        return params, eqx.filter(others, eqx.is_array)


def _kind(leaf: Any) -> str:
    return f"an array of shape {leaf.shape}, {leaf.dtype}"
