"""Arrays on the devices of all processes."""

from typing import Any

import jax
import numpy as np

from ..basics.tree import is_key


def put(leaf: Any, sharding: Any) -> Any:
    """`leaf` with a sharding, of which each process provides its own devices' parts.

    Every process must have the same `leaf`, whole; or the array is one of all
    processes already.
    """
    if not getattr(leaf, "is_fully_addressable", True):
        return leaf
    if sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    if is_key(leaf):
        data = put(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, host.__getitem__)
