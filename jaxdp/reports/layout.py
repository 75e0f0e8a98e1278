"""Where the leaves of a placed state are, and how many bytes each device holds."""

import math
from typing import Any

import jax

from ..basics.tree import leaf_path


def layout(state: Any) -> list[dict[str, Any]]:
    """A row for every array of a placed `TrainState`, JSON values.

    `part` is the field of the state and `path` the leaf in it; `splits` says into how
    many parts each axis is cut and `copies` on how many devices each part is.
    """
    rows = []
    for part, tree in state._asdict().items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            rows.append({"part": part, "path": leaf_path(path), **_leaf(leaf)})
    return rows


def _leaf(leaf: Any) -> dict[str, Any]:
    sharding = getattr(leaf, "sharding", None)
    shape, itemsize = tuple(leaf.shape), leaf.dtype.itemsize
    if sharding is None:
        shard, devices, spec = shape, 1, "host"
    else:
        shard = sharding.shard_shape(shape)
        devices = len(sharding.device_set)
        spec = str(getattr(sharding, "spec", "")).replace("PartitionSpec", "P")
    splits = [n // max(m, 1) for n, m in zip(shape, shard, strict=True)]
    return {
        "shape": list(shape),
        "dtype": str(leaf.dtype),
        "spec": spec,
        "splits": splits,
        "copies": devices // max(math.prod(splits), 1),
        "bytes": math.prod(shape) * itemsize,
        "bytes_per_device": math.prod(shard) * itemsize,
    }
