"""Weight decay for matrices, and not for biases and the scales of norms."""

from collections.abc import Callable
from typing import Any, Final

import equinox as eqx
import jax
from jaxtyping import PyTree

from ..basics.arguments import checks_arguments
from ..basics.tree import get_node, leaf_path, mark_leaves
from ..strategies.stack import Stack

_NORMS: Final = (
    eqx.nn.BatchNorm,
    eqx.nn.GroupNorm,
    eqx.nn.LayerNorm,
    eqx.nn.RMSNorm,
)


@checks_arguments
def decay_mask(*exclude: str) -> Callable[[PyTree], PyTree]:
    """Returns a mask for the optimizers of optax that decay weights.

        optax.adamw(1e-3, weight_decay=0.1, mask=decay_mask())
        optax.adamw(1e-3, weight_decay=0.1, mask=decay_mask("embedding", "head"))

    Arrays of two or more dimensions decay, as in GPT-2: weights of linear layers,
    convolutions and embeddings. Arrays called `bias` do not, nor those of Equinox's
    norms, nor those of fewer dimensions, such as the scale of another norm. The
    dimension that a `jaxdp.Stack` adds to the arrays of its blocks does not count.

    Args:
        exclude: path patterns of more arrays that do not decay, such as `"**.scale"`;
            the path of a submodule is for all arrays in it.

    Raises:
        ValueError: by the optimizer's `init`, for a path that the model does not have.
    """
    for pattern in exclude:
        if not isinstance(pattern, str):
            raise TypeError(
                f"`exclude` is {pattern!r}, of type {type(pattern).__name__}; it must"
                ' be paths such as "embedding", one argument each.'
            )

    def mask(params: PyTree) -> PyTree:
        def decays(path: tuple[Any, ...], leaf: Any, is_excluded: bool) -> bool:
            nodes = [get_node(params, path[:depth]) for depth in range(len(path))]
            dims = leaf.ndim - sum(isinstance(node, Stack) for node in nodes)
            is_norm = any(isinstance(node, _NORMS) for node in nodes)
            is_bias = leaf_path(path[-1:]) == "bias"
            return dims >= 2 and not (is_norm or is_bias or is_excluded)

        excluded = mark_leaves("`exclude`", exclude, params)
        return jax.tree.map_with_path(decays, params, excluded)

    return mask
