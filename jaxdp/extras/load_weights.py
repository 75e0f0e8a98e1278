"""Weights from safetensors files whose tensors have other names than the model's."""

import glob
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..basics.arguments import check_is_local, checks_arguments
from ..basics.console import log_info
from ..basics.files import expand_path, read_json
from ..basics.tree import find_matches, group_rows
from ..checkpoint import CheckpointCorrupt, describe_shape
from ..fit import get_shapes
from ..trainer import Trainer
from .model_files import open_safetensors
from .weight_names import (
    LeafMapping,
    ModelLeaf,
    Tensor,
    find_norms,
    is_tensor,
    list_leaves,
    map_leaves,
)

_INDEX_SUFFIX: Final = ".safetensors.index.json"
"""The end of the name of an index of several files."""

# The titles of the table that shows what was loaded, or why nothing was.
_FITS: Final = "fits"
_UNCHANGED: Final = "stays as it is in the model"
_IGNORED: Final = "ignored in the file"
_UNNAMED: Final = "no name fills (None lets it stay as it is)"
_ABSENT: Final = "not in the file"
_MISFITS: Final = "does not fit"
_LEFT_OVER: Final = "no leaf takes (`ignore` leaves it in the file)"
_WRONG: Final = _UNNAMED, _ABSENT, _MISFITS, _LEFT_OVER

Views = dict[tuple[int, ...], np.ndarray]
"""The tensors of a leaf, by index of its first axes."""


@checks_arguments
def load_weights(
    path: str | os.PathLike[str],
    like: PyTree,
    names: Mapping[str, Any],
    *,
    state: eqx.nn.State | None = None,
    ignore: str | Sequence[str] = (),
) -> Any:
    """Fills a model from safetensors files, by a table of names.

        names = {
            "embed.weight": "wte.weight",
            "blocks.*.attn.query.weight": ("h.*.c_attn.weight", "T", ("split", 3, 0)),
            "rope.*": None,
        }
        model = load_weights("gpt2/model.safetensors", model, names)

    Every array of the model and every tensor of the file must have its place. If one
    has none, an error lists those that fit and those that do not, and nothing is
    loaded. The table is shown.

    Args:
        path: a file; an index of several, `*.safetensors.index.json`; or a folder.
        like: a model, or one of shapes (`eqx.filter_eval_shape`). Its dtypes are kept.
            Arrays that are split over devices, and shapes with a `sharding`, are read
            slice by slice for each device. Or a `Trainer`, before its first step: its
            weights are set, its own `state` too, in the layout of its strategy. It may
            be made of shapes.
        names: from leaves to tensors. Leaves are named by dots, those of a
            `jaxdp.Stack` by the number of the block; a BatchNorm has `running_mean` and
            `running_var`. `*` stands for one part of a name, `**` for any number of
            parts, in both names in order. A tuple says what is done to the tensor:
            `"T"`, or `("T", *axes)`; `("split", parts, index)`, along the first axis or
            a fourth argument; `("squeeze", *axes)` and `("expand", *axes)`. None:
            the leaf stays as it is in `like`.
        state: the `eqx.nn.State` to fill as well.
        ignore: patterns of tensors that no leaf needs, each of which must match one.

    Returns:
        A new model; with `state`, `(model, state)`; None for a `Trainer`.

    Raises:
        FileNotFoundError, CheckpointCorrupt: for files that are not there or damaged.
        TypeError, ValueError: for `names` that don't fit the model or the file.
        RuntimeError: for a `Trainer` that has taken a step.
    """
    if isinstance(like, Trainer):
        if state is not None:
            raise ValueError("`state`: a Trainer has its own; leave `state` out.")
        _load_into_trainer(path, like, names, ignore)
        return None
    both = like, state
    model, state = _load(path, both, names, ignore, current=both)
    return model if state is None else (model, state)


def _load_into_trainer(
    path: Any, trainer: Trainer, names: Mapping[str, Any], ignore: Iterable[str]
) -> None:
    """Sets the weights of a trainer, read in the layout of its strategy."""
    run, config = trainer.run, trainer.run.config
    if run.doing or run.progress.global_step:
        raise RuntimeError(
            "`load_weights` sets the initial weights of a trainer. This one has taken"
            f" {run.progress.global_step} steps, or is running: make a new Trainer, or"
            " call it before the first `fit`."
        )
    params, buffers, model_state = get_shapes(run)

    def add_layout(leaf: Any, placed: Any) -> Any:
        if not is_tensor(leaf) or not is_tensor(placed) or leaf.shape != placed.shape:
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed.sharding)

    current = config.model, config.model_state
    placed = eqx.combine(params, buffers), model_state
    is_none = lambda node: node is None  # noqa: E731
    like = jax.tree.map(add_layout, current, placed, is_leaf=is_none)
    run.set_initial_weights(*_load(path, like, names, ignore, current))


def _load(
    path: Any,
    like: tuple[PyTree, Any],
    names: Mapping[str, Any],
    ignore: Iterable[str],
    current: tuple[PyTree, Any],
) -> tuple[PyTree, Any]:
    """Returns a model and its state, read in the layout of `like`.

    Leaves that no tensor fills are those of `current`.
    """
    mappings, unnamed = map_leaves(names, list_leaves(*like))
    trees: dict[str, PyTree] = {"model": current[0], "state": current[1]}
    leaves = {tree: jax.tree.leaves(value) for tree, value in trees.items()}
    tensors = open_weights(path)
    patterns = [ignore] if isinstance(ignore, str) else ignore
    kind = f"tensor of {os.fspath(path)}"
    ignored = {*find_matches("`ignore`", patterns, tensors, kind)}
    filled, rows = _match(tensors, mappings, unnamed, ignored)
    table = _format_table(rows)
    if any(rows[title] for title in _WRONG):
        raise ValueError(
            f"`names`: the model and {os.fspath(path)} don't fit, so nothing was"
            f" loaded.\n{table}"
        )
    for leaf, parts in mappings:
        is_filled = (leaf.tree, leaf.index) in filled
        value = leaves[leaf.tree][leaf.index]
        if not is_filled and isinstance(value, jax.ShapeDtypeStruct):
            raise ValueError(
                f"`names`: {next(iter(parts.values()))[0]} is to stay as it is, but"
                " `like` has only its shape; fill it, or make the model itself."
            )
    for (tree, index), (leaf, views) in filled.items():
        leaves[tree][index] = _make_array(leaf.value, views)
    for norm in find_norms(*like).values():
        if ("state", norm.mean) in filled:
            leaves["state"][norm.counter] = norm.make_final_counter()
    if any(
        v.dtype != leaf.value.dtype for leaf, vs in filled.values() for v in vs.values()
    ):
        table += (
            "\n  The model keeps its own dtypes; `save_weights(..., like=path)` writes"
            " those of the file."
        )
    log_info(f"`load_weights`: {os.fspath(path)}\n{table}")
    model, state = map(jax.tree.structure, current)
    return model.unflatten(leaves["model"]), state.unflatten(leaves["state"])


def _make_array(value: Any, views: Views) -> jax.Array:
    """Makes an array like `value` from views of the files.

    If `value` is split over devices, reads only the slice of each device.
    """
    num_axes = len(next(iter(views)))

    def read(index: Any) -> np.ndarray:
        pairs = zip(index, value.shape, strict=True)
        ranges = [range(*part.indices(size)) for part, size in pairs]
        places = itertools.product(*ranges[:num_axes])
        array = np.stack([views[place][tuple(index[num_axes:])] for place in places])
        return array.reshape([*map(len, ranges)]).astype(value.dtype, copy=False)

    sharding = getattr(value, "sharding", None)
    is_shape = isinstance(value, jax.ShapeDtypeStruct)
    if sharding is None or not is_shape and len(sharding.device_set) == 1:
        return jnp.asarray(read([slice(None)] * value.ndim))
    return jax.make_array_from_callback(value.shape, sharding, read)


def open_weights(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Opens the tensors of a file, of files with an index, or of a folder of either.

    Returns:
        Views of the files, whose numbers are read when they are used.

    Raises:
        FileNotFoundError: if there is none.
        CheckpointCorrupt: if a file can't be read, or is not what the index says.
    """
    check_is_local("path", path)
    tensors: dict[str, np.ndarray] = {}
    for name in _list_files(expand_path(path)):
        try:
            tensors |= open_safetensors(name)
        except FileNotFoundError:
            raise FileNotFoundError(f"`path`: there is no file {name}.") from None
    return tensors


def _list_files(path: str) -> list[str]:
    """Returns the files that a path stands for."""
    if os.path.isdir(path):
        folder = glob.escape(path)
        indices = glob.glob(os.path.join(folder, "*" + _INDEX_SUFFIX))
        files = glob.glob(os.path.join(folder, "*.safetensors"))
        if len(indices) != 1 and len(files) != 1:
            raise FileNotFoundError(
                f"`path`: {path} has {len(files)} files *.safetensors and"
                f" {len(indices)} *{_INDEX_SUFFIX}; name the one to read."
            )
        path = (indices if len(indices) == 1 else files)[0]
    if not path.endswith(".json"):
        return [path]
    try:
        names = sorted({*read_json(path)["weight_map"].values()})
        files = [os.path.join(os.path.dirname(path), name) for name in names]
    except FileNotFoundError:
        raise FileNotFoundError(f"`path`: there is no file {path}.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorrupt(
            f"`path`: {path} is no index of safetensors files: it has no `weight_map`."
        ) from error
    if outside := [name for name in names if os.path.basename(name) != name]:
        raise CheckpointCorrupt(
            f"`path`: {path} names {outside[0]!r}; an index may only name files beside"
            " it, not paths, since it may come from a stranger."
        )
    return files


def _match(
    tensors: Mapping[str, np.ndarray],
    mappings: Sequence[LeafMapping],
    unnamed: Sequence[tuple[str, ModelLeaf]],
    ignored: Set[str],
) -> tuple[
    dict[tuple[str, int], tuple[ModelLeaf, Views]], dict[str, list[tuple[str, ...]]]
]:
    """Matches leaves with tensors.

    Returns:
        The leaves that tensors fill, each with its views, by tree and index; and the
        rows of the table by title.
    """
    titles = (_FITS, _UNCHANGED, _IGNORED, *_WRONG)
    rows: dict[str, list[tuple[str, ...]]] = {title: [] for title in titles}
    rows[_UNNAMED] += [(f"{name} {_format_shape(leaf)}",) for name, leaf in unnamed]
    filled: dict[tuple[str, int], tuple[ModelLeaf, Views]] = {}
    used: set[str] = set()
    for leaf, parts in mappings:
        unchanged = [name for name, tensor in parts.values() if tensor is None]
        title = _UNCHANGED if len(unchanged) == len(parts) else _MISFITS
        rows[title] += [(f"{name} {_format_shape(leaf)}",) for name in unchanged]
        views: Views = {}
        for index, (name, tensor) in parts.items():
            if tensor is None:
                continue
            used.add(tensor.name)
            title, row, view = _view(tensors.get(tensor.name), leaf, name, tensor)
            rows[title].append(row)
            if title == _FITS and view is not None:
                views[index] = view
        if len(views) == len(parts):
            filled[leaf.tree, leaf.index] = leaf, views
    for name, tensor in tensors.items():
        if name not in used:
            title = _IGNORED if name in ignored else _LEFT_OVER
            rows[title].append((f"{name} {describe_shape(tensor)}",))
    return filled, rows


def _view(
    stored: np.ndarray | None, leaf: ModelLeaf, name: str, tensor: Tensor
) -> tuple[str, tuple[str, ...], np.ndarray | None]:
    """Applies the operations to a tensor; returns a title, a row and the result."""
    if stored is None:
        return _ABSENT, (tensor.name, f"for {name}", _format_shape(leaf)), None
    view, problem = stored, ""
    try:
        for operation in tensor.operations:
            view = operation.apply(view)
    except (ValueError, IndexError) as error:
        problem = f": {error}"
    else:
        kinds = jnp.floating, jnp.integer, jnp.bool_
        dtypes = view.dtype, leaf.value.dtype
        if view.shape != leaf.shape:
            problem = f": is {view.shape}"
        elif not any(all(jnp.issubdtype(x, kind) for x in dtypes) for kind in kinds):
            problem = ": is of another kind"
    shapes = "".join(f", {operation}" for operation in tensor.operations) + problem
    row = f"{name} {_format_shape(leaf)}", f"<- {tensor.name}"
    row = *row, describe_shape(stored) + shapes
    return _MISFITS if problem else _FITS, row, view


def _format_shape(leaf: ModelLeaf) -> str:
    return describe_shape(jax.ShapeDtypeStruct(leaf.shape, leaf.value.dtype))


def _format_table(rows_by_title: Mapping[str, Iterable[tuple[str, ...]]]) -> str:
    lines = []
    for title, rows in rows_by_title.items():
        lines += [f"  {title}:"] if rows else []
        for texts, count in group_rows(rows):
            more = f" ({count} of them)" if count > 1 else ""
            lines.append("    " + " ".join(texts) + more)
    return "\n".join(lines)
