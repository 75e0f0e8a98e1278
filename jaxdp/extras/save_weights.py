"""Weights into safetensors files, under other names than the model's."""

import collections
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..basics.arguments import check_count, check_is_local, checks_arguments
from ..basics.environment import import_extra
from ..basics.files import expand_path, sync_to_disk, write_atomically
from .load_weights import open_weights
from .weight_names import (
    INDEX,
    Leaf,
    Operation,
    Tensor,
    grouped,
    leaves_of,
    norms_in,
    resolved,
)


@checks_arguments
def save_weights(
    model: PyTree,
    path: str | os.PathLike[str],
    names: Mapping[str, Any],
    *,
    state: eqx.nn.State | None = None,
    dtype: Any = None,
    shard_bytes: int = 5_000_000_000,
) -> str:
    """Writes a model as `load_weights` reads it with the same `names`.

    Leaves that `names` makes of parts of one tensor (`"split"`) become that tensor
    again. Leaves with None are not written.

    Args:
        model: what to write; `trainer.model`, say.
        path: ends with `.safetensors`, or with `.safetensors.index.json` for several
            files beside this index. Existing files are replaced.
        names: as for `load_weights`.
        state: its `eqx.nn.State`, if `names` has leaves of it.
        dtype: of the floating-point tensors, such as "bfloat16"; or the path of
            weights, those that the model came from, say, to take the dtypes that its
            tensors have by name. Default: those of the model.
        shard_bytes: with an index, how large a file may be; a tensor may be larger.

    Returns:
        The absolute path.

    Raises:
        TypeError, ValueError: for `names` that don't fit the model, and for a tensor
            that two leaves would fill, or that lacks a part.
    """
    check_is_local("path", path)
    check_count("shard_bytes", shard_bytes)
    dtypes = _Dtypes(dtype)
    path = expand_path(path)
    if not path.endswith((".safetensors", INDEX)):
        raise ValueError(
            f"`path`={path!r} must end with '.safetensors', or with {INDEX!r} for"
            " several files."
        )
    save = import_extra("safetensors.numpy", "`save_weights`", "safetensors").save_file
    tensors = _tensors(model, state, names, dtypes)

    os.makedirs(os.path.dirname(path), exist_ok=True)
    if not path.endswith(INDEX):
        _write(save, path, tensors)
        return path
    shards = _shards(tensors, shard_bytes)
    stem = path.removesuffix(INDEX)
    files = [
        f"{stem}-{number:05}-of-{len(shards):05}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    weight_map = {}
    for file, shard in zip(files, shards, strict=True):
        _write(save, file, shard)
        weight_map |= dict.fromkeys(shard, os.path.basename(file))
    size = sum(tensor.nbytes for tensor in tensors.values())
    with write_atomically(path) as temporary:
        with open(temporary, "w") as index:
            json.dump(
                {"metadata": {"total_size": size}, "weight_map": weight_map}, index
            )
        sync_to_disk(temporary)
    return path


class _Dtypes:
    """The dtypes that tensors of a file are to have."""

    def __init__(self, dtype: Any):
        self._one, self._each = None, dict[str, Any]()
        if isinstance(dtype, os.PathLike) or os.path.exists(str(dtype)):
            self._each = {name: t.dtype for name, t in open_weights(dtype).items()}
        elif dtype is not None:
            try:
                self._one = jnp.dtype(dtype)
            except TypeError:
                self._one = jnp.dtype(int)
            if not jnp.issubdtype(self._one, jnp.floating):
                raise ValueError(
                    "`dtype` must be a floating-point one, such as 'bfloat16', the path"
                    f" of weights that have the dtypes, or None; got {dtype!r}."
                )

    def of(self, name: str, own: Any) -> Any:
        """That of a tensor whose values are of the dtype `own`."""
        if not jnp.issubdtype(own, jnp.floating):
            return own
        return jnp.dtype(self._one or self._each.get(name, own))


class _Piece(NamedTuple):
    """A part of a tensor, or all of it."""

    leaf: Leaf
    index: tuple[int, ...]
    name: str
    after: tuple[Operation, ...]
    """What `load_weights` does to the part."""
    place: tuple[int, int, int]
    """Of how many parts it is which, along which axis."""
    before: tuple[Operation, ...]
    """What `load_weights` does to the tensor before it takes the part."""


class _Whole(NamedTuple):
    """How a tensor is made."""

    nbytes: int
    make: Callable[[], np.ndarray]


def _tensors(
    model: PyTree,
    state: eqx.nn.State | None,
    names: Mapping[str, Any],
    dtypes: _Dtypes,
) -> dict[str, _Whole]:
    """The tensors of a file by name, made when they are written."""
    wanted, unnamed = resolved(names, leaves_of(model, state))
    if unnamed:
        listed = ", ".join(row[0] for row in grouped((n, "", "") for n, _ in unnamed))
        raise ValueError(
            f"`names` names no tensor for {listed}; with None they are not written."
        )
    pieces: dict[str, list[_Piece]] = collections.defaultdict(list)
    for leaf, parts in wanted:
        for index, (name, tensor) in parts.items():
            if tensor is not None:
                pieces[tensor.name].append(_piece(leaf, index, name, tensor))
    if not pieces:
        raise ValueError("`names` has None for all leaves, so there is none to write.")
    corrections = {}
    values = jax.tree.leaves(state)
    for norm in norms_in(model, state):
        by = norm.correction(values[norm.counter])
        corrections |= {norm.mean: by, norm.variance: by}

    def value(piece: _Piece) -> np.ndarray:
        whole = piece.leaf.value
        if piece.leaf.where == "state" and piece.leaf.place in corrections:
            whole = whole / corrections[piece.leaf.place]
        # JAX keeps the copy of a stack for its other blocks.
        array = np.asarray(whole)[piece.index]  # waits for the device
        return _undone(array, piece.after)

    return {
        name: _whole(name, parts, value, dtypes.of(name, parts[0].leaf.value.dtype))
        for name, parts in pieces.items()
    }


def _piece(leaf: Leaf, index: tuple[int, ...], name: str, tensor: Tensor) -> _Piece:
    operations = tensor.operations
    splits = [i for i, operation in enumerate(operations) if operation.kind == "split"]
    if not splits:
        return _Piece(leaf, index, name, operations, (1, 0, 0), ())
    if len(splits) > 1:
        raise ValueError(f"`names`: {name} has two splits, which can't be undone.")
    (at,) = splits
    count, part, axis = (*operations[at].numbers, 0)[:3]
    before, after = operations[:at], operations[at + 1 :]
    return _Piece(leaf, index, name, after, (count, part, axis), before)


def _whole(
    name: str,
    pieces: list[_Piece],
    value: Callable[[_Piece], np.ndarray],
    dtype: np.dtype,
) -> _Whole:
    """A tensor of all of its parts.

    Raises:
        ValueError: if one of them is missing, or there twice.
    """
    pieces = sorted(pieces, key=lambda piece: piece.place)
    count, _, axis = pieces[0].place
    before = pieces[0].before
    complete = [(count, part, axis) for part in range(count)]
    is_split = all(piece.before == before for piece in pieces)
    if [piece.place for piece in pieces] != complete or not is_split:
        leaves = ", ".join(piece.name for piece in pieces)
        raise ValueError(
            f"`names`: {name} would be {leaves}, but that is not each of {count} parts"
            " once, split alike. Complete them; or give those None that are not to be"
            " written."
        )

    def make() -> np.ndarray:
        parts = [value(piece) for piece in pieces]
        whole = np.concatenate(parts, axis) if count > 1 else parts[0]
        return _undone(whole, before).astype(dtype, copy=False)

    sizes = [math.prod(piece.leaf.shape) for piece in pieces]
    return _Whole(sum(sizes) * dtype.itemsize, make)


def _undone(array: np.ndarray, operations: Sequence[Operation]) -> np.ndarray:
    for operation in reversed(operations):
        array = operation.undone(array)
    return array


def _shards(tensors: Mapping[str, _Whole], most: int) -> list[dict[str, _Whole]]:
    shards: list[dict[str, _Whole]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > most:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _write(save: Any, path: str, tensors: Mapping[str, _Whole]) -> None:
    arrays = {  # on the host
        name: np.asarray(t.make(), order="C") for name, t in tensors.items()
    }
    with write_atomically(path) as temporary:
        # What other programs look for, before they take the tensors as torch's.
        save(arrays, temporary, metadata={"format": "pt"})
        sync_to_disk(temporary)
