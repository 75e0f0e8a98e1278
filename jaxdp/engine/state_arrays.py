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

    With `join` small leaves cross together.
    """

    def __init__(self, state: PyTree, *, join: bool = True):
        leaves, self.treedef = jax.tree.flatten(state)
        self._shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]

        # Where any leaf is split, XLA would move more to put new small leaves together.
        join = join and all(leaf.sharding.is_fully_replicated for leaf in leaves)
        small = [place for place, leaf in enumerate(leaves) if join and _is_small(leaf)]
        if len(small) < 2 or len({leaves[place].sharding for place in small}) > 1:
            small = []
        stops = list(itertools.accumulate(leaves[place].size for place in small))
        starts = [0, *stops][: len(stops)]
        self._spans = dict(zip(small, map(slice, starts, stops), strict=True))
        """Where in the joined array each small leaf is."""

        numbers = itertools.count(1 if small else 0)
        self.places = [
            0 if place in self._spans else next(numbers) for place in range(len(leaves))
        ]
        """Which of the arrays that cross has the state's leaf number 0, 1, ..."""

        sharding = leaves[small[0]].sharding if small else None
        self._join = jax.jit(_joined, out_shardings=sharding)
        self._part = jax.jit(self._parted, out_shardings=sharding)
        self._write = jax.jit(jax.lax.dynamic_update_slice, out_shardings=sharding)
        self._zero = jax.jit(self._zeroed, static_argnums=1, out_shardings=sharding)

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
            size, sharding = sum(leaf.size for leaf in small), small[0].sharding
            joined: Any = jax.ShapeDtypeStruct((size,), jnp.uint32, sharding=sharding)
            return [joined, *large]
        return [self._join(small), *large]

    def leaves(self, arrays: Sequence[Array]) -> list[Array]:
        """`unpack` on the devices."""
        return self._whole(arrays, self._part)

    def fetch(self, arrays: Sequence[Array], place: int) -> np.ndarray:
        """The state's leaf number `place` on the host. Waits for the device."""
        array = np.asarray(arrays[self.places[place]])
        if place not in self._spans:
            return array
        shape, dtype = self._shapes[place]
        return array[self._spans[place]].view(dtype).reshape(shape)

    def write(self, arrays: list[Array], place: int, value: np.ndarray) -> None:
        """Sets the state's leaf number `place`. Nothing is waited for."""
        number = self.places[place]
        if place in self._spans:
            bits = np.atleast_1d(value).view(np.uint32).reshape(-1)
            start = np.int32(self._spans[place].start)
            arrays[number] = self._write(arrays[number], bits, (start,))
        else:
            arrays[number] = put(value, arrays[number].sharding)

    def zero(self, arrays: list[Array], place: int) -> None:
        """Sets the state's leaf number `place` to zeros. Nothing is waited for.

        Every epoch does, and that nothing crosses for it saves a short one 30 us.
        """
        shape, dtype = self._shapes[place]
        if place in self._spans:
            arrays[0] = self._zero(arrays[0], place)
        else:
            self.write(arrays, place, np.zeros(shape, dtype))

    def small(self, leaves: Sequence[Array]) -> list[Array]:
        """Those of the state's leaves that cross together."""
        return self._divided(leaves)[0]

    def names(self, paths: Sequence[str]) -> list[str]:
        """What crosses, of the paths of the state's leaves."""
        small, large = self._divided(paths)
        return [", ".join(small), *large] if small else large

    def shapes(self, arrays: Sequence[Array]) -> list[jax.ShapeDtypeStruct]:
        """The state's leaves without their values, of the arrays that cross."""
        return [
            jax.ShapeDtypeStruct(shape, dtype, sharding=arrays[number].sharding)
            for (shape, dtype), number in zip(self._shapes, self.places, strict=True)
        ]

    def _divided(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        small = [leaves[place] for place in self._spans]
        return small, [x for i, x in enumerate(leaves) if i not in self._spans]

    def _whole(self, arrays: Sequence[Array], part: Any) -> list[Array]:
        if not self._spans:
            return list(arrays)
        small, large = iter(part(arrays[0])), iter(arrays[1:])
        return [next(large if number else small) for number in self.places]

    def _zeroed(self, joined: Array, place: int) -> Array:
        return joined.at[self._spans[place]].set(0)

    def _parted(self, joined: Array) -> list[Array]:
        found = []
        for place, span in self._spans.items():
            shape, dtype = self._shapes[place]
            bits = joined[span].reshape(shape)
            found.append(jax.lax.bitcast_convert_type(bits, dtype))
        return found


def _joined(leaves: Sequence[Array]) -> Array:
    """As bits: no float operation may touch what could be a NaN with a message."""
    bits = [jax.lax.bitcast_convert_type(leaf, jnp.uint32) for leaf in leaves]
    return jnp.concatenate([leaf.reshape(-1) for leaf in bits])


def _is_small(leaf: Array) -> bool:
    return math.prod(leaf.shape) * 4 <= _SMALL and leaf.dtype in _PACKED_DTYPES
