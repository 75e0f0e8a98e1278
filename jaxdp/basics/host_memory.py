"""The memory and the mesh that arrays are on."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

HOST: Final = "pinned_host"
"""JAX's name of the host memory that devices read by themselves."""


def is_on_host(leaf: Any) -> bool:
    """Returns True if an array, or its shape with a sharding, is in host memory."""
    return getattr(getattr(leaf, "sharding", None), "memory_kind", None) == HOST


def move_to_device(tree: PyTree) -> PyTree:
    """Moves arrays from host memory to their devices; also while traced."""

    def move(leaf: Any) -> Any:
        on_host = jax.typeof(leaf).memory_space == jax.memory.Space.Host
        return jax.device_put(leaf, jax.memory.Space.Device) if on_host else leaf

    return jax.tree.map(move, tree)


def clear_mesh() -> AbstractContextManager[Any]:
    """Leaves the mesh that the user has set with `jax.set_mesh`, within the context.

    Programs that are compiled under it would be for that mesh only.
    """
    if jax.sharding.get_abstract_mesh().empty:  # setting one takes 10 us
        return nullcontext()
    return jax.set_mesh(Mesh(np.empty((), dtype=object), ()))


def use_auto_axes(tree: PyTree) -> PyTree:
    """Turns the Explicit axes of the meshes of arrays into Auto axes."""

    def auto(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return leaf
        mesh = Mesh(np.asarray(sharding.mesh.devices), sharding.mesh.axis_names)
        return jax.device_put(leaf, NamedSharding(mesh, sharding.spec))

    return jax.tree.map(auto, tree)
