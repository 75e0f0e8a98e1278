"""The rows of a batch that each process loads, and arrays on the devices of all."""

import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from ..basics.tree import is_key


class RowBlocks(NamedTuple):
    """The rows of a batch in equal blocks. This process loads the `local` ones."""

    count: int = 1
    local: tuple[int, ...] = (0,)

    def count_rows(self, rows: int, each: int) -> tuple[int, ...]:
        """Returns the number of real rows in each block.

        Args:
            rows: the real rows of the batch, which fill the blocks in turn.
            each: the rows that a block has room for.
        """
        return tuple(
            min(max(rows - block * each, 0), each) for block in range(self.count)
        )

    def get_local_rows(self, rows: int, each: int) -> list[range]:
        """Returns the rows that this process loads, a range for each local block."""
        return [
            range(min(block * each, rows), min((block + 1) * each, rows))
            for block in self.local
        ]

    def make_global_shapes(self, group: Any) -> Any:
        """Returns a group of micro-batches with the shapes of its global arrays."""
        return group._replace(batch=jax.tree.map(self._make_global_shape, group.batch))

    def _make_global_shape(self, leaf: Any) -> jax.ShapeDtypeStruct:
        micros, rows, *others = leaf.shape
        rows = rows // len(self.local) * self.count
        return jax.ShapeDtypeStruct((micros, rows, *others), leaf.dtype)


def find_row_blocks(shards: Iterable[tuple[int, Any]], num_shards: int) -> RowBlocks:
    """Cuts the shards of rows into equal blocks; finds those that this process loads.

    `shards` has pairs (shard index, device).
    """
    owners: list[set[int]] = [set() for _ in range(num_shards)]
    for shard, device in shards:
        owners[shard].add(device.process_index)
    runs = [len(list(run)) for _, run in itertools.groupby(owners)]
    size = math.gcd(*runs)
    local = [
        block
        for block in range(num_shards // size)
        if jax.process_index() in owners[block * size]
    ]
    without = sorted(set(range(jax.process_count())) - set().union(*owners))
    if without:
        raise ValueError(
            f"process {', '.join(map(str, without))} has none of the devices that"
            f" the strategy uses, and there are {jax.process_count()} processes;"
            " each must have at least one. Leave `devices` out to use all, with"
            " Sharded() or another strategy that spans processes."
        )
    return RowBlocks(num_shards // size, tuple(local))


def make_global_array(leaf: Any, sharding: Any) -> Any:
    """Makes an array with this sharding; each process provides its devices' shards.

    Every process must have the same full `leaf`. An array that already spans processes
    is returned as it is.
    """
    if not getattr(leaf, "is_fully_addressable", True):
        return leaf
    if sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    if is_key(leaf):
        data = make_global_array(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, host.__getitem__)
