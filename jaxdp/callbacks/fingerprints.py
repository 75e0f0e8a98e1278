"""Fingerprints of arrays, to tell one changed bit, whatever devices hold them.

A fingerprint is computed where the array lives, from the bits of every element and its
place; it is a sum of integers, and so the same in any order and on any layout. One
pass over the memory, no copy to the host but for eight bytes per array.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from ..basics.host_memory import on_device


def start_fingerprints(arrays: Mapping[str, Array]) -> Callable[[], dict[str, str]]:
    """Sixteen hexadecimal digits per array; the function returned waits for them.

    They are of the present values. The arrays are on the same devices, and no keys.
    Where devices of this process hold copies that differ, there is one for each.
    """
    if not arrays:
        return dict
    sums = _sums(list(arrays.values()))

    def read() -> dict[str, str]:
        # waits for the device
        copies = [_named(arrays, np.asarray(x.data)) for x in sums.addressable_shards]
        return {
            name: " and ".join(dict.fromkeys(copy[name] for copy in copies))
            for name in arrays
        }

    return read


def _named(names: Iterable[str], sums: Iterable[Any]) -> dict[str, str]:
    return {
        name: f"{first:08x}{second:08x}"
        for name, (first, second) in zip(names, sums, strict=True)
    }


@jax.jit
def _sums(leaves: Sequence[Array]) -> UInt32[Array, "leaves 2"]:
    return jnp.stack([_sum(leaf) for leaf in leaves])


def _sum(leaf: Array) -> UInt32[Array, " 2"]:
    """Two sums, modulo 2**32, over every word and a hash of its place.

    A word times an odd number: any single changed word changes the first sum. A hash of
    both: the second is independent of it, for changes in many words at once.
    """
    words = _words(on_device(leaf))
    place = _mixed(_places(words.shape))
    first = words * (place | jnp.uint32(1))
    second = _mixed(words ^ place)
    return jnp.stack([first.sum(dtype=jnp.uint32), second.sum(dtype=jnp.uint32)])


def _words(leaf: Array) -> UInt32[Array, "..."]:
    """The bits of every element, in uint32; wider elements get an axis of words."""
    bits = leaf.dtype.itemsize * 8
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return jnp.stack([_words(leaf.real), _words(leaf.imag)], axis=-1)
    if bits == 64:
        return jax.lax.bitcast_convert_type(leaf, jnp.uint32)
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf.astype(jnp.uint32)
    unsigned = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[bits]
    return jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)


def _places(shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """0, 1, 2, ... in C order. Not a reshaped `arange`: that would not stay split."""
    places = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = np.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        iota = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        places = places + iota * stride
    return places


def _mixed(words: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A bijection of 32 bits in which every bit moves half of the others.

    (The finaliser of MurmurHash3, after a shift away from its fixed point 0.)
    """
    words = words + np.uint32(0x9E3779B9)
    words = (words ^ (words >> 16)) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * np.uint32(0xC2B2AE35)
    return words ^ (words >> 16)
