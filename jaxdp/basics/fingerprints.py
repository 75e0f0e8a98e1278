"""Fingerprints of arrays, which are equal if the bits are, on any devices."""

import math
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
    return jnp.stack([_sum(_words(move_to_device(leaf))) for leaf in leaves])


def _sum(words: UInt32[Array, "..."]) -> UInt32[Array, ""]:
    return _hash(words ^ _hash(_indices(words.shape))).sum(dtype=jnp.uint32)


def _words(leaf: Array) -> UInt32[Array, "..."]:
    """Returns the bits of every element as uint32; wider elements get an axis."""
    bits = leaf.dtype.itemsize * 8
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return jnp.stack([_words(leaf.real), _words(leaf.imag)], axis=-1)
    if bits == 64:
        return jax.lax.bitcast_convert_type(leaf, jnp.uint32)
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf.astype(jnp.uint32)
    unsigned = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[bits]
    return jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)


def _indices(shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """Returns 0, 1, 2, ... in C order. A reshaped `arange` would not stay split."""
    indices = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = np.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        iota = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        indices = indices + iota * stride
    return indices


def _hash(words: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Applies a bijection of 32 bits in which every bit changes half of the others.

    (The finaliser of MurmurHash3, after a shift away from its fixed point 0.)
    """
    words = words + np.uint32(0x9E3779B9)
    words = (words ^ (words >> 16)) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * np.uint32(0xC2B2AE35)
    return words ^ (words >> 16)
