"""A stack of equal layers, whose arrays are stacked, applied one after the other."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray, PyTree

from ..basics.tree import leaf_path
from ..step import accepts_keyword
from .fsdp_units import open_shards


class Stack(eqx.Module):
    """Equal blocks, each applied to the output of the one before it.

        self.blocks = Stack([Block(width, key=key) for key in keys])
        x = self.blocks(x)

    It is a loop over one block, which is compiled once for any number of blocks. The
    arrays of the blocks are stacked: `blocks.stacked.norm.weight` has the norms of all
    blocks. So a layout can split them by blocks, as `Pipeline` does.

    Args:
        blocks: modules of one structure, called as `block(x)`, with `key` and
            `training` if the stack gets them and the block names them. A block returns
            the shape and dtype of `x`.
    """

    stacked: PyTree
    """One block, with a leading axis in every array."""

    def __init__(self, blocks: Sequence[PyTree]):
        blocks = list(blocks)
        if not blocks:
            raise ValueError("`blocks` must have at least one block; got none.")
        parts = [eqx.partition(block, eqx.is_array) for block in blocks]
        shapes = [eqx.filter_eval_shape(lambda arrays=a: arrays) for a, _ in parts]
        for index, (shape, (_, rest)) in enumerate(zip(shapes, parts, strict=True)):
            if not eqx.tree_equal((shape, rest), (shapes[0], parts[0][1])):
                raise ValueError(
                    f"`blocks`: number {index} differs from number 0 in more than"
                    " the values of its arrays. All blocks of a stack must be"
                    " equal; put others before or after it."
                )
        stacks = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[a for a, _ in parts])
        self.stacked = eqx.combine(stacks, parts[0][1])

    def __len__(self) -> int:
        kinds = jax.Array | jax.ShapeDtypeStruct
        leaves = jax.tree.leaves(open_shards(self.stacked))
        return next(leaf.shape[0] for leaf in leaves if isinstance(leaf, kinds))

    def __call__(
        self,
        x: PyTree,
        *,
        key: PRNGKeyArray | None = None,
        training: bool | None = None,
    ) -> PyTree:
        arrays, rest = eqx.partition(open_shards(self.stacked), eqx.is_array)
        return apply_blocks(rest, training, arrays, x, self.keys(key))

    def keys(self, key: PRNGKeyArray | None) -> PRNGKeyArray | None:
        """Returns one key for each block."""
        return None if key is None else jax.random.split(key, len(self))


def apply_blocks(
    rest: PyTree, training: bool | None, arrays: PyTree, x: PyTree, keys: Any
) -> PyTree:
    """Applies blocks to `x`, each to the output of the block before it.

    `rest` is a block without its arrays. `arrays` are stacked, and so are `keys`, if
    any.
    """
    names = [name for name in ("key", "training") if accepts_keyword(rest, name)]

    def apply(x: PyTree, own: tuple[PyTree, Any]) -> tuple[PyTree, None]:
        block, values = eqx.combine(own[0], rest), {"key": own[1], "training": training}
        keywords = {name: values[name] for name in names if values[name] is not None}
        return block(x, **keywords), None

    return jax.lax.scan(apply, x, (arrays, keys))[0]


def find_stacks(tree: PyTree) -> dict[str, tuple[Any, ...]]:
    """Returns the paths of the outermost stacks that have arrays, by name."""
    is_stack = lambda node: isinstance(node, Stack)  # noqa: E731
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_stack)
    return {
        leaf_path(path): path
        for path, node in nodes
        if is_stack(node) and jax.tree.leaves(node)
    }
