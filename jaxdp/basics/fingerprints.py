"""Fingerprints of arrays, which are equal if the bits are, on any devices."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from .host_memory import move_to_device


def compute_fingerprints(arrays: Mapping[str, Array]) -> dict[str, str]:
    """Returns eight hexadecimal digits per array; waits for the device.

    A fingerprint is the sum of a hash of each word and its index, and so the same in
    any layout. It is computed on the array's devices, in one pass; four bytes per array
    are sent to the host. The arrays must be on the same devices, and must not be keys.
    """
    if not arrays:
        return {}
    sums = np.asarray(_sums(list(arrays.values())).addressable_data(0))
    return {name: f"{number:08x}" for name, number in zip(arrays, sums, strict=True)}


@jax.jit
def _sums(leaves: Sequence[Array]) -> UInt32[Array, " leaves"]:
    return jnp.stack([_sum(move_to_device(leaf)) for leaf in leaves])


def _sum(leaf: Array) -> UInt32[Array, ""]:
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag], axis=-1)
    if leaf.dtype.itemsize == 1 and not jnp.issubdtype(leaf.dtype, jnp.floating):
        leaf = leaf.astype(jnp.uint8)  # a bool and an int4 have no bits to cast
    kind = {1: jnp.uint8, 2: jnp.uint16}.get(leaf.dtype.itemsize, jnp.uint32)
    data = jax.lax.bitcast_convert_type(leaf, kind).astype(jnp.uint32)
    # Numbers 0, 1, 2, ... in C order. A reshaped `arange` would not stay split.
    places, stride = jnp.zeros(data.shape, jnp.uint32), 1
    for axis in reversed(range(data.ndim)):
        iota = jax.lax.broadcasted_iota(jnp.uint32, data.shape, axis)
        places = places + iota * np.uint32(stride % 2**32)
        stride *= data.shape[axis]
    return _hash(data ^ _hash(places)).sum(dtype=jnp.uint32)


def _hash(words: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Mixes the bits of 32-bit words, by a bijection.

    If one bit of a word changes, about half of the bits of its result change. (The
    finaliser of MurmurHash3, after a shift away from its fixed point 0.)
    """
    words = words + np.uint32(0x9E3779B9)
    words = (words ^ (words >> 16)) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * np.uint32(0xC2B2AE35)
    return words ^ (words >> 16)
