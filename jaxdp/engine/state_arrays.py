"""A state as the few arrays that cross into a compiled step.

Every array that crosses costs the host about a microsecond, whatever its size, and most
leaves of a state are small: biases, norms, counters, and an optimizer's copies of them.
They travel together in one array, and the large ones as they are.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ..distributed import put

_SMALL: Final = 4096
"""Bytes that a leaf has at most to travel with others. To take it out and put it back
is a copy each; up to about this size that costs less than to cross alone."""

_PACKED_DTYPES: Final = {np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.uint32)}


class Flat:
    """How one state's leaves cross, decided by their shapes, dtypes and layouts.

    Args:
        state: a placed pytree of arrays.
        join: whether small leaves are to cross together.
    """

    def __init__(self, state: PyTree, *, join: bool = True):
        leaves, self.treedef = jax.tree.flatten(state)
        self._shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
        # Where any leaf is split, XLA would move more to put new small leaves together.
        whole = all(leaf.sharding.is_fully_replicated for leaf in leaves)
        self._is_small = [join and whole and _is_small(leaf) for leaf in leaves]
        small, _ = self._divided(leaves)
        if len(small) < 2 or len({leaf.sharding for leaf in small}) > 1:
            self._is_small, small = [False] * len(leaves), []
        self._spans = self._find_spans()
        sharding = small[0].sharding if small else None
        self._join = jax.jit(_joined, out_shardings=sharding)
        self._part = jax.jit(self._parted, out_shardings=sharding)
        self._write = jax.jit(_written, out_shardings=sharding)

    def pack(self, leaves: Sequence[Array]) -> list[Array]:
        """The arrays that cross, of the state's leaves, while a step is traced."""
        small, large = self._divided(leaves)
        return [_joined(small), *large] if small else large

    def unpack(self, arrays: Sequence[Array]) -> list[Array]:
        """The state's leaves, of the arrays that cross, while a step is traced."""
        return self._whole(arrays, self._parted)

    def placed(self, leaves: Sequence[Array]) -> list[Array]:
        """`pack` on the devices."""
        small, large = self._divided(leaves)
        if not small:
            return large
        if isinstance(small[0], jax.ShapeDtypeStruct):
            size = sum(math.prod(leaf.shape) for leaf in small)
            joined: Any = jax.ShapeDtypeStruct(
                (size,), jnp.uint32, sharding=small[0].sharding
            )
            return [joined, *large]
        return [self._join(small), *large]

    def leaves(self, arrays: Sequence[Array]) -> list[Array]:
        """`unpack` on the devices."""
        return self._whole(arrays, self._part)

    def fetch(self, arrays: Sequence[Array], index: int) -> np.ndarray:
        """The state's leaf number `index` on the host. Waits for the device."""
        if not self._is_small[index]:
            return np.asarray(arrays[self._place(index)])
        shape, dtype = self._shapes[index]
        bits = np.asarray(arrays[0])[slice(*self._spans[index])]
        return bits.view(dtype).reshape(shape)

    def write(self, arrays: list[Array], index: int, value: np.ndarray) -> None:
        """Sets the state's leaf number `index`. Nothing is waited for."""
        if self._is_small[index]:
            bits = np.atleast_1d(value).view(np.uint32).reshape(-1)
            start = np.int32(self._spans[index][0])
            arrays[0] = self._write(arrays[0], bits, start)
        else:
            place = self._place(index)
            arrays[place] = put(value, arrays[place].sharding)

    def small(self, leaves: Sequence[Array]) -> list[Array]:
        """Those of the state's leaves that cross together."""
        return self._divided(leaves)[0]

    def names(self, paths: Sequence[str]) -> list[str]:
        """What crosses, of the paths of the state's leaves."""
        small, large = self._divided(paths)
        return [", ".join(small), *large] if small else large

    def places(self) -> list[int]:
        """Which of the arrays that cross has the state's leaf number 0, 1, ..."""
        return [
            0 if is_small else self._place(index)
            for index, is_small in enumerate(self._is_small)
        ]

    def shapes(self, arrays: Sequence[Array]) -> list[jax.ShapeDtypeStruct]:
        """The state's leaves without their values, of the arrays that cross."""
        return [
            jax.ShapeDtypeStruct(shape, dtype, sharding=arrays[place].sharding)
            for (shape, dtype), place in zip(self._shapes, self.places(), strict=True)
        ]

    def _divided(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        pairs = list(zip(leaves, self._is_small, strict=True))
        small = [leaf for leaf, is_small in pairs if is_small]
        return small, [leaf for leaf, is_small in pairs if not is_small]

    def _whole(self, arrays: Sequence[Array], part: Any) -> list[Array]:
        if not any(self._is_small):
            return list(arrays)
        small, large = iter(part(arrays[0])), iter(arrays[1:])
        return [next(small if is_small else large) for is_small in self._is_small]

    def _place(self, index: int) -> int:
        """Which of the arrays that cross the leaf number `index` is, if it is large."""
        large = self._is_small[:index].count(False)
        return large + any(self._is_small)

    def _find_spans(self) -> list[tuple[int, int]]:
        """Where in the joined array each small leaf starts and ends."""
        sizes = [
            math.prod(shape) if is_small else 0
            for (shape, _), is_small in zip(self._shapes, self._is_small, strict=True)
        ]
        stops = list(itertools.accumulate(sizes))
        return [(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]

    def _parted(self, joined: Array) -> list[Array]:
        found = []
        for index, (shape, dtype) in enumerate(self._shapes):
            if self._is_small[index]:
                bits = joined[slice(*self._spans[index])].reshape(shape)
                found.append(jax.lax.bitcast_convert_type(bits, dtype))
        return found


def _joined(leaves: Sequence[Array]) -> Array:
    """As bits: no float operation may touch what could be a NaN with a message."""
    bits = [jax.lax.bitcast_convert_type(leaf, jnp.uint32) for leaf in leaves]
    return jnp.concatenate([leaf.reshape(-1) for leaf in bits])


def _written(joined: Array, bits: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice(joined, bits, (start,))


def _is_small(leaf: Array) -> bool:
    return math.prod(leaf.shape) * 4 <= _SMALL and leaf.dtype in _PACKED_DTYPES
