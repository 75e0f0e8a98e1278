"""Weights from safetensors files whose tensors have other names than the model's."""

import glob
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..basics.arguments import check_is_local, checks_arguments
from ..basics.console import log_info
from ..basics.files import expand_path, read_json
from ..checkpoint import CheckpointCorrupt, shape_text
from ..fit import begin_anew, shapes_of
from ..trainer import Trainer
from .model_files import tensors_in
from .weight_names import (
    INDEX,
    Leaf,
    Tensor,
    Wanted,
    grouped,
    is_tensor,
    leaves_of,
    norms_in,
    pattern,
    resolved,
)

_FILLED: Final = "fits"
_KEPT: Final = "stays as it is in the model"
_IGNORED: Final = "ignored in the file"
_UNNAMED: Final = "no name fills (None lets it stay as it is)"
_ABSENT: Final = "not in the file"
_MISFITS: Final = "does not fit"
_LEFT: Final = "no leaf takes (`ignore` leaves it in the file)"


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

    Every array of the model and every tensor of the file must have its place; else an
    error lists what fits and what does not, and nothing is loaded. The table is shown.

    Args:
        path: a file; an index of several, `*.safetensors.index.json`; or a folder.
        like: a model, or one of shapes (`eqx.filter_eval_shape`). Its dtypes are kept.
            Arrays that are split over devices, and shapes with a `sharding`, are read
            slice by slice for each device. Or a `Trainer`, before its first step: its
            weights are set, its own `state` too, in the layout of its strategy. It may
            be made of shapes.
        names: from leaves to tensors. Leaves are named by dots, those of a
            `jaxdp.Stack` by the number of the block; a BatchNorm has `running_mean` and
            `running_var`. `*` stands for a part of a name without dots, `**` for any
            part, in both names in order. A tuple says what is done to the tensor:
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
        _into_trainer(path, like, names, ignore)
        return None
    both = like, state
    model, state = _loaded(path, both, names, ignore, kept=both)
    return model if state is None else (model, state)


def _into_trainer(
    path: Any, trainer: Trainer, names: Mapping[str, Any], ignore: Iterable[str]
) -> None:
    """Sets the weights of a trainer, read as its strategy lays them out."""
    run, recipe = trainer.run, trainer.run.recipe
    begin = begin_anew(run, "`load_weights`")
    params, buffers, model_state = shapes_of(run)

    def laid_out(own: Any, held: Any) -> Any:
        if not is_tensor(own) or not is_tensor(held) or own.shape != held.shape:
            return own
        return jax.ShapeDtypeStruct(own.shape, own.dtype, sharding=held.sharding)

    own = recipe.model, recipe.model_state
    held = eqx.combine(params, buffers), model_state
    like = jax.tree.map(laid_out, own, held, is_leaf=lambda node: node is None)
    begin(*_loaded(path, like, names, ignore, kept=own))


def _loaded(
    path: Any,
    like: tuple[PyTree, Any],
    names: Mapping[str, Any],
    ignore: Iterable[str],
    kept: tuple[PyTree, Any],
) -> tuple[PyTree, Any]:
    """A model and its state, read in the layout of `like`; what stays is in `kept`."""
    patterns = [ignore] if isinstance(ignore, str) else list(ignore)
    wanted, unnamed = resolved(names, leaves_of(*like))
    leaves = {
        where: jax.tree.leaves(tree)
        for where, tree in zip(("model", "state"), kept, strict=True)
    }
    tensors = open_weights(path)
    for text in patterns:
        if not any(map(pattern(text).fullmatch, tensors)):
            raise ValueError(
                f"`ignore`: {text!r} matches no tensor of {os.fspath(path)}; `*` is a"
                " part of a name without dots, `**` any part. The names are"
                f" {', '.join(row[0] for row in grouped((n, '', '') for n in tensors))}"
            )
    table = _Table(tensors, wanted, unnamed, patterns)
    if table.is_wrong:
        raise ValueError(
            f"`names`: the model and {os.fspath(path)} don't fit, so nothing was"
            f" loaded.\n{table}"
        )
    for leaf, parts in wanted:
        value = leaves[leaf.where][leaf.place]
        if (leaf.where, leaf.place) not in table.views and _is_shape(value):
            raise ValueError(
                f"`names`: {next(iter(parts.values()))[0]} is to stay as it is, but"
                " `like` has only its shape; fill it, or make the model itself."
            )
    for (where, place), (leaf, views) in table.views.items():
        leaves[where][place] = _array(leaf.value, views)
    for norm in norms_in(*like):
        if ("state", norm.mean) in table.views:
            leaves["state"][norm.counter] = norm.finished()
    log_info(f"`load_weights`: {os.fspath(path)}\n{table}")
    model, state = (jax.tree.structure(tree) for tree in kept)
    return model.unflatten(leaves["model"]), state.unflatten(leaves["state"])


def _is_shape(value: Any) -> bool:
    return isinstance(value, jax.ShapeDtypeStruct)


def _array(value: Any, views: Mapping[tuple[int, ...], np.ndarray]) -> jax.Array:
    """An array like `value`; where that lies on several devices, each gets its own.

    Args:
        value: an array or its shape.
        views: what it is made of, by index in its first axes.
    """
    count = len(next(iter(views)))

    def part(index: Any) -> np.ndarray:
        pairs = zip(index, value.shape, strict=True)
        ranges = [range(*own.indices(size)) for own, size in pairs]
        places = itertools.product(*ranges[:count])
        read = np.stack([views[place][tuple(index[count:])] for place in places])
        return read.reshape([*map(len, ranges)]).astype(value.dtype, copy=False)

    sharding = getattr(value, "sharding", None)
    if sharding is None or not _is_shape(value) and len(sharding.device_set) == 1:
        return jnp.asarray(part([slice(None)] * value.ndim))
    return jax.make_array_from_callback(value.shape, sharding, part)


def open_weights(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The tensors of a file, of files with an index, or of a folder of either.

    They are views of the files; what is used of them is read then.

    Raises:
        FileNotFoundError: if there is none.
        CheckpointCorrupt: if a file can't be read, or is not what the index says.
    """
    check_is_local("path", path)
    files, index = _files(expand_path(path))
    tensors: dict[str, np.ndarray] = {}
    for name in files:
        try:
            tensors |= tensors_in(name)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"`path`: there is no file {name}, which the index names."
            ) from None
    if gone := sorted(set(index or ()) - tensors.keys()):
        raise CheckpointCorrupt(
            f"`path`: {expand_path(path)} names {len(gone)} tensors that no file has,"
            f" such as {gone[0]}."
        )
    return tensors


def _files(path: str) -> tuple[list[str], Mapping[str, str] | None]:
    """The files of weights that a path means, and the index, if there is one."""
    if os.path.isdir(path):
        indices = glob.glob(os.path.join(glob.escape(path), "*" + INDEX))
        files = glob.glob(os.path.join(glob.escape(path), "*.safetensors"))
        if len(indices) != 1 and len(files) != 1:
            raise FileNotFoundError(
                f"`path`: {path} has {len(files)} files *.safetensors and"
                f" {len(indices)} *{INDEX}; name the one to read."
            )
        path = (indices if len(indices) == 1 else files)[0]
    if not os.path.exists(path):
        raise FileNotFoundError(f"`path`: there is no file {path}.")
    if not path.endswith(".json"):
        return [path], None
    try:
        index = read_json(path)["weight_map"]
        names = sorted({*index.values()})
        files = [os.path.join(os.path.dirname(path), name) for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorrupt(
            f"`path`: {path} is no index of safetensors files: it has no `weight_map`."
        ) from error
    if outside := [name for name in names if os.path.basename(name) != name]:
        raise CheckpointCorrupt(
            f"`path`: {path} names {outside[0]!r}; an index may only name files beside"
            " it, not paths, since it may come from a stranger."
        )
    return files, index


class _Table:
    """The arrays of a model beside the tensors of a file; `str` lists them.

    Args:
        tensors: those of the file, by name.
        wanted: what the names say of the leaves.
        unnamed: leaves, or blocks of one, that no name fills.
        ignore: patterns of tensors that may be left over.

    Attributes:
        views: by where a leaf is: the leaf, and what fills each part of it.
        is_wrong: whether anything does not fit or is left over.
    """

    def __init__(
        self,
        tensors: Mapping[str, np.ndarray],
        wanted: Sequence[Wanted],
        unnamed: Sequence[tuple[str, Leaf]],
        ignore: Sequence[str],
    ):
        self.views: dict[tuple[str, int], tuple[Leaf, dict[Any, np.ndarray]]] = {}
        titles = (_FILLED, _KEPT, _IGNORED, _UNNAMED, _ABSENT, _MISFITS, _LEFT)
        self._rows: dict[str, list[tuple[str, str, str]]] = {t: [] for t in titles}
        self._tensors, self._taken = tensors, set[str]()
        for name, leaf in unnamed:
            self._add(_UNNAMED, f"{name} {_shape(leaf)}")
        for leaf, parts in wanted:
            kept = [name for name, tensor in parts.values() if tensor is None]
            title = _KEPT if len(kept) == len(parts) else _MISFITS
            for name in kept:
                self._add(title, f"{name} {_shape(leaf)}")
            views = {
                index: self._view(leaf, name, tensor)
                for index, (name, tensor) in parts.items()
                if tensor is not None
            }
            whole = {index: view for index, view in views.items() if view is not None}
            if len(whole) == len(parts):
                self.views[leaf.where, leaf.place] = leaf, whole
        may_be_left = [pattern(text) for text in ignore]
        for name, view in tensors.items():
            if name not in self._taken:
                ignored = any(regex.fullmatch(name) for regex in may_be_left)
                self._add(_IGNORED if ignored else _LEFT, f"{name} {shape_text(view)}")
        wrong = (_UNNAMED, _ABSENT, _MISFITS, _LEFT)
        self.is_wrong = any(self._rows[title] for title in wrong)

    def _add(self, title: str, name: str, other: str = "", text: str = "") -> None:
        self._rows[title].append((name, other, text))

    def _view(self, leaf: Leaf, name: str, tensor: Tensor) -> np.ndarray | None:
        """What fills a leaf or a block of it; None if nothing does."""
        view = self._tensors.get(tensor.name)
        if view is None:
            self._add(_ABSENT, tensor.name, f"for {name}", _shape(leaf))
            return None
        self._taken.add(tensor.name)
        done = "".join(f", {operation}" for operation in tensor.operations)
        stored, why = f"{shape_text(view)}{done}", ""
        try:
            for operation in tensor.operations:
                view = operation.applied(view)
        except (ValueError, IndexError) as error:
            why = f": {error}"
        else:
            if view.shape != leaf.shape:
                why = f": is {view.shape}"
            elif not _are_alike(view.dtype, leaf.value.dtype):
                why = ": is of another kind"
        row = f"{name} {_shape(leaf)}", f"<- {tensor.name}", stored + why
        self._add(_MISFITS if why else _FILLED, *row)
        return None if why else view

    def __str__(self) -> str:
        lines = []
        for title, rows in self._rows.items():
            lines += [f"  {title}:"] if rows else []
            for *texts, count in grouped(rows):
                more = f" ({count} of them)" if count > 1 else ""
                lines.append("    " + " ".join(filter(None, texts)) + more)
        return "\n".join(lines)


def _shape(leaf: Leaf) -> str:
    return shape_text(jax.ShapeDtypeStruct(leaf.shape, leaf.value.dtype))


def _are_alike(stored: Any, wanted: Any) -> bool:
    """Whether both dtypes are floats, or integers, or bools."""
    kinds = jnp.floating, jnp.integer, jnp.bool_
    return any(
        jnp.issubdtype(stored, kind) and jnp.issubdtype(wanted, kind) for kind in kinds
    )
