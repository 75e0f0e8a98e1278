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
from ..basics.files import expand_path, sync_to_disk, write_atomically
from ..basics.tree import format_paths
from .import_package import import_package
from .load_weights import open_weights
from .weight_names import (
    INDEX_SUFFIX,
    ModelLeaf,
    Operation,
    Tensor,
    find_norms,
    list_leaves,
    map_leaves,
)


@checks_arguments
def save_weights(
    model: PyTree,
    path: str | os.PathLike[str],
    names: Mapping[str, Any],
    *,
    state: eqx.nn.State | None = None,
    dtype: Any = None,
    like: str | os.PathLike[str] | None = None,
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
        dtype: of the floating-point tensors, such as "bfloat16". Default: those of the
            model, which keeps its own when `load_weights` fills it.
        like: the files that the weights came from, as for `load_weights`: each
            floating-point tensor gets the dtype that it has there.
        shard_bytes: with an index, how large a file may be; a tensor may be larger.

    Returns:
        The absolute path.

    Raises:
        TypeError, ValueError: for `names` that don't fit the model, and for a tensor
            that two leaves would fill, or that lacks a part.
    """
    check_is_local("path", path)
    check_count("shard_bytes", shard_bytes)
    dtype = None if dtype is None else _parse_dtype(dtype)
    if dtype is not None and like is not None:
        raise ValueError(f"`like` and `dtype`={dtype} both say the dtypes; pass one.")
    source = {} if like is None else open_weights(like)
    path = expand_path(path)
    if not path.endswith((".safetensors", INDEX_SUFFIX)):
        raise ValueError(
            f"`path`={path!r} must end with '.safetensors', or with"
            f" {INDEX_SUFFIX!r} for several files."
        )
    save = import_package("safetensors.numpy", "`save_weights`").save_file
    dtypes = {name: tensor.dtype for name, tensor in source.items()}
    tensors = _make_tensors(model, state, names, dtype, dtypes)

    os.makedirs(os.path.dirname(path), exist_ok=True)
    if not path.endswith(INDEX_SUFFIX):
        _write(save, path, tensors)
        return path
    shards = _split_into_shards(tensors, shard_bytes)
    stem = path.removesuffix(INDEX_SUFFIX)
    files = [
        f"{stem}-{number:05}-of-{len(shards):05}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    weight_map = {}
    for file, shard in zip(files, shards, strict=True):
        _write(save, file, shard)
        weight_map |= dict.fromkeys(shard, os.path.basename(file))
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    with write_atomically(path) as temporary:
        temporary.write_text(json.dumps(index))
        sync_to_disk(temporary)
    return path


def _parse_dtype(dtype: Any) -> np.dtype:
    try:
        parsed = jnp.dtype(dtype)
    except TypeError:
        parsed = jnp.dtype(int)
    if not jnp.issubdtype(parsed, jnp.floating):
        raise ValueError(
            "`dtype` must be a floating-point one, such as 'bfloat16', or None; got"
            f" {dtype!r}."
        )
    return parsed


class _Part(NamedTuple):
    """A block of a leaf, which becomes a tensor or one part of a tensor."""

    leaf: ModelLeaf
    index: tuple[int, ...]
    name: str
    tensor: Tensor

    @property
    def split(self) -> int:
        """The place of the split among the operations; -1 if there is none."""
        kinds = [operation.kind for operation in self.tensor.operations]
        return kinds.index("split") if "split" in kinds else -1

    @property
    def place(self) -> tuple[int, int, int]:
        """The number of parts of the tensor, the number of this one, and the axis."""
        if self.split < 0:
            return 1, 0, 0
        count, part, axis = (*self.tensor.operations[self.split].numbers, 0)[:3]
        return count, part, axis

    @property
    def before(self) -> tuple[Operation, ...]:
        """The operations of `load_weights` before the split."""
        return self.tensor.operations[: max(self.split, 0)]


class _FileTensor(NamedTuple):
    """A tensor of a file, which is made when it is written."""

    nbytes: int
    make: Callable[[], np.ndarray]


def _make_tensors(
    model: PyTree,
    state: eqx.nn.State | None,
    names: Mapping[str, Any],
    dtype: np.dtype | None,
    dtypes: Mapping[str, np.dtype],
) -> dict[str, _FileTensor]:
    """Returns the tensors of the file by name, in `dtypes`, else in `dtype`."""
    mappings, unnamed = map_leaves(names, list_leaves(model, state))
    if unnamed:
        listed = format_paths(name for name, _ in unnamed)
        raise ValueError(
            f"`names` names no tensor for {listed}; with None they are not written."
        )
    parts_by_name: dict[str, list[_Part]] = collections.defaultdict(list)
    for leaf, parts in mappings:
        for index, (name, tensor) in parts.items():
            if tensor is not None:
                part = _Part(leaf, index, name, tensor)
                parts_by_name[tensor.name].append(part)
    if not parts_by_name:
        raise ValueError("`names` has None for all leaves, so there is none to write.")
    corrections = {}
    values = jax.tree.leaves(state)
    for norm in find_norms(model, state).values():
        correction = norm.get_correction(values[norm.counter])
        corrections |= {norm.mean: correction, norm.variance: correction}

    def read(part: _Part) -> np.ndarray:
        value = part.leaf.value
        if part.leaf.tree == "state" and part.leaf.index in corrections:
            value = value / corrections[part.leaf.index]
        # JAX caches the host copy of a stack for its other blocks.
        array = np.asarray(value)[part.index]  # waits for the device
        return _invert(part.tensor.operations[part.split + 1 :], array)

    tensors = {}
    for name, parts in parts_by_name.items():
        own = parts[0].leaf.value.dtype
        wanted = dtypes.get(name, dtype) or own
        are_float = all(jnp.issubdtype(each, jnp.floating) for each in (own, wanted))
        tensors[name] = _join(name, parts, read, wanted if are_float else own)
    return tensors


def _join(
    name: str,
    parts: list[_Part],
    read: Callable[[_Part], np.ndarray],
    dtype: np.dtype,
) -> _FileTensor:
    """Joins the parts of a tensor.

    Raises:
        ValueError: if a part is missing, doubled, or split in another way.
    """
    parts = sorted(parts, key=lambda part: part.place)
    (count, _, axis), before = parts[0].place, parts[0].before
    for part in parts:
        if [x.kind for x in part.tensor.operations].count("split") > 1:
            raise ValueError(
                f"`names`: {part.name} has two splits, which can't be undone."
            )
    complete = [(count, number, axis) for number in range(count)]
    is_alike = all(part.before == before for part in parts)
    if [part.place for part in parts] != complete or not is_alike:
        raise ValueError(
            f"`names`: {name} would be {', '.join(part.name for part in parts)}, but"
            f" that is not each of {count} parts once, split alike. Complete them; or"
            " give those None that are not to be written."
        )

    def make() -> np.ndarray:
        arrays = [read(part) for part in parts]
        array = np.concatenate(arrays, axis) if count > 1 else arrays[0]
        return _invert(before, array).astype(dtype, copy=False)

    sizes = [math.prod(part.leaf.shape) for part in parts]
    return _FileTensor(sum(sizes) * dtype.itemsize, make)


def _invert(operations: Sequence[Operation], array: np.ndarray) -> np.ndarray:
    for operation in reversed(operations):
        array = operation.invert(array)
    return array


def _split_into_shards(
    tensors: Mapping[str, _FileTensor], max_bytes: int
) -> list[dict[str, _FileTensor]]:
    """Splits tensors over files of at most `max_bytes`; a larger tensor is alone."""
    shards: list[dict[str, _FileTensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _write(save: Any, path: str, tensors: Mapping[str, _FileTensor]) -> None:
    arrays = {  # on the host
        name: np.asarray(tensor.make(), order="C") for name, tensor in tensors.items()
    }
    with write_atomically(path) as temporary:
        # Other programs look for this entry before they read tensors as torch's.
        save(arrays, temporary, metadata={"format": "pt"})
        sync_to_disk(temporary)
