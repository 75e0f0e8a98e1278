"""Modules whose fields alone are trained, beside weights that stay as they are."""

from typing import Any

import jax
from jaxtyping import PyTree

from ..basics.tree import at_path


def trained_alone(model: PyTree) -> PyTree | None:
    """The leaves that are trained where nobody says which, as bools; None for all.

    A class of modules names fields in `trained_alone`, as adapters do. If a model has
    one, these fields are trained and nothing else.
    """

    def is_named(path: Any, _: Any) -> bool:
        for length, key in enumerate(path):
            fields = getattr(type(at_path(model, path[:length])), "trained_alone", ())
            if getattr(key, "name", None) in fields:
                return True
        return False

    named = jax.tree_util.tree_map_with_path(is_named, model)
    return named if any(jax.tree.leaves(named)) else None
