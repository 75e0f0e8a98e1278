"""Weights into safetensors files, under other names than the model's."""

import collections
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..basics.arguments import check_is_local, checks_arguments
from ..basics.files import expand_path, sync_to_disk, write_atomically
from ..basics.tree import format_paths
from .load_weights import open_weights
from .model_files import write_arrays
from .weight_names import ModelLeaf, Operation, find_norms, list_leaves, map_leaves


@checks_arguments
def save_weights(
    model: PyTree,
    path: str | os.PathLike[str],
    names: Mapping[str, Any],
    *,
    state: eqx.nn.State | None = None,
    dtype: Any = None,
    like: str | os.PathLike[str] | None = None,
) -> str:
    """Writes a model as `load_weights` reads it with the same `names`.

    Leaves that `names` makes of parts of one tensor (`"split"`) become that tensor
    again. Leaves with None are not written.

    Args:
        model: what to write; `trainer.model`, say.
        path: ends with `.safetensors`. An existing file is replaced.
        names: as for `load_weights`.
        state: its `eqx.nn.State`, if `names` has leaves of it.
        dtype: of the floating-point tensors, such as "bfloat16". Default: those of the
            model, which keeps its own when `load_weights` fills it.
        like: the files that the weights came from, as for `load_weights`: each
            floating-point tensor gets the dtype that it has there.

    Returns:
        The absolute path.

    Raises:
        TypeError, ValueError: for `names` that don't fit the model, and for a tensor
            that two leaves would fill, or that lacks a part.
    """
    check_is_local("path", path)
    dtype = None if dtype is None else _parse_dtype(dtype)
    if dtype is not None and like is not None:
        raise ValueError(f"`like` and `dtype`={dtype} both say the dtypes; pass one.")
    source = {} if like is None else open_weights(like)
    path = expand_path(path)
    if not path.endswith(".safetensors"):
        raise ValueError(f"`path`={path!r} must end with '.safetensors'.")
    dtypes = {name: tensor.dtype for name, tensor in source.items()}
    tensors = _make_tensors(model, state, names, dtype, dtypes)

    os.makedirs(os.path.dirname(path), exist_ok=True)
    with write_atomically(path) as temporary:
        write_arrays(temporary, tensors)
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
    before: tuple[Operation, ...]
    """The operations of `load_weights` before the split; none without a split."""
    place: tuple[int, int, int]
    """The number of parts of the tensor, the number of this one, and the axis."""
    after: tuple[Operation, ...]
    """The operations after the split."""


def _make_part(
    leaf: ModelLeaf,
    index: tuple[int, ...],
    name: str,
    operations: tuple[Operation, ...],
) -> _Part:
    kinds = [operation.kind for operation in operations]
    if kinds.count("split") > 1:
        raise ValueError(f"`names`: {name} has two splits, which can't be undone.")
    if "split" not in kinds:
        return _Part(leaf, index, name, (), (1, 0, 0), operations)
    at = kinds.index("split")
    count, part, axis = (*operations[at].numbers, 0)[:3]
    place = count, part, axis
    return _Part(leaf, index, name, operations[:at], place, operations[at + 1 :])


def _make_tensors(
    model: PyTree,
    state: eqx.nn.State | None,
    names: Mapping[str, Any],
    dtype: np.dtype | None,
    dtypes: Mapping[str, np.dtype],
) -> dict[str, np.ndarray]:
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
                part = _make_part(leaf, index, name, tensor.operations)
                parts_by_name[tensor.name].append(part)
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
        return _invert(part.after, array)

    tensors = {}
    for name, parts in parts_by_name.items():
        own = parts[0].leaf.value.dtype
        wanted = dtypes.get(name, dtype) or own
        are_float = all(jnp.issubdtype(each, jnp.floating) for each in (own, wanted))
        tensors[name] = _join(name, parts, read).astype(wanted if are_float else own)
    return tensors


def _join(
    name: str, parts: list[_Part], read: Callable[[_Part], np.ndarray]
) -> np.ndarray:
    """Joins the parts of a tensor.

    Raises:
        ValueError: if a part is missing, doubled, or split in another way.
    """
    parts = sorted(parts, key=lambda part: part.place)
    (count, _, axis), before = parts[0].place, parts[0].before
    complete = [(count, number, axis) for number in range(count)]
    is_alike = all(part.before == before for part in parts)
    if [part.place for part in parts] != complete or not is_alike:
        raise ValueError(
            f"`names`: {name} would be {', '.join(part.name for part in parts)}, but"
            f" that is not each of {count} parts once, split alike. Complete them; or"
            " give those None that are not to be written."
        )
    arrays = [read(part) for part in parts]
    return _invert(before, np.concatenate(arrays, axis) if count > 1 else arrays[0])


def _invert(operations: Sequence[Operation], array: np.ndarray) -> np.ndarray:
    for operation in reversed(operations):
        array = operation.invert(array)
    return array
