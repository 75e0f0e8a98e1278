"""Where arrays are: in host memory that devices read by themselves, on which mesh."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

HOST: Final = "pinned_host"
"""What JAX calls it."""


def is_on_host(leaf: Any) -> bool:
    """Whether an array, or its shape with a sharding, is in host memory."""
    return getattr(getattr(leaf, "sharding", None), "memory_kind", None) == HOST


def move_to_device(tree: PyTree) -> PyTree:
    """`tree`, its arrays from host memory on their devices; while traced, too."""

    def moved(leaf: Any) -> Any:
        is_there = jax.typeof(leaf).memory_space == jax.memory.Space.Host
        return jax.device_put(leaf, jax.memory.Space.Device) if is_there else leaf

    return jax.tree.map(moved, tree)


def clear_mesh() -> AbstractContextManager[Any]:
    """Leaves a mesh that the user has set with `jax.set_mesh` for the time being.

    Programs compiled under it would have to be for that very mesh.
    """
    if jax.sharding.get_abstract_mesh().empty:  # setting one takes 10 us
        return nullcontext()
    return jax.set_mesh(Mesh(np.empty((), dtype=object), ()))


def use_auto_axes(tree: PyTree) -> PyTree:
    """Arrays on meshes with Explicit axes, as on the same meshes with Auto axes."""

    def auto(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return leaf
        mesh = Mesh(np.asarray(sharding.mesh.devices), sharding.mesh.axis_names)
        return jax.device_put(leaf, NamedSharding(mesh, sharding.spec))

    return jax.tree.map(auto, tree)
