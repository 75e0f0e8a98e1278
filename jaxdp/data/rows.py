"""Rows of arrays, worked on where they are: NumPy's on the host, JAX's on the devices.

What is done to JAX's arrays is compiled. Nothing here waits for the device.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..step import Batch


def is_there(batch: Batch) -> bool:
    """Whether any array of a batch is on the devices already."""
    return any([isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(batch)])


def rows_at(leaf: Any, index: np.ndarray) -> Any:
    """The rows of these numbers."""
    return _taken(leaf, index) if isinstance(leaf, jax.Array) else leaf[index]


def stacked(leaves: Sequence[Any]) -> Any:
    """Arrays of one shape as one, along a new first axis."""
    if all([type(leaf) is np.ndarray for leaf in leaves]):
        return np.stack(leaves) if len(leaves) > 1 else leaves[0][None]  # no copy
    first = next(leaf for leaf in leaves if isinstance(leaf, jax.Array))
    return _stacked([_beside(leaf, first) for leaf in leaves])


def _beside(leaf: Any, other: jax.Array) -> Any:
    """An array, moved from device to device if it is elsewhere than another one."""
    is_array = isinstance(leaf, jax.Array)
    if is_array and leaf.sharding.device_set != other.sharding.device_set:
        return jax.device_put(leaf, other.sharding)
    return leaf


@jax.jit
def _taken(leaf: Any, index: Any) -> Any:
    return _strong(leaf).at[index].get(mode="promise_in_bounds")


@jax.jit
def _stacked(leaves: list[Any]) -> Any:
    return jnp.stack([_strong(leaf) for leaf in leaves])


def _strong(leaf: Any) -> Any:
    """As NumPy's arrays are: what is weakly typed has results of other dtypes."""
    return jax.lax.convert_element_type(leaf, leaf.dtype)
