"""Arrays in host memory that devices read by themselves: `pinned_host`."""

from typing import Any, Final

import jax
from jaxtyping import PyTree

HOST: Final = "pinned_host"
"""What JAX calls it."""


def is_on_host(leaf: Any) -> bool:
    """Whether an array, or its shape with a sharding, is in host memory."""
    return getattr(getattr(leaf, "sharding", None), "memory_kind", None) == HOST


def on_device(tree: PyTree) -> PyTree:
    """`tree`, its arrays from host memory on their devices; while traced, too."""

    def moved(leaf: Any) -> Any:
        is_there = jax.typeof(leaf).memory_space == jax.memory.Space.Host
        return jax.device_put(leaf, jax.memory.Space.Device) if is_there else leaf

    return jax.tree.map(moved, tree)
