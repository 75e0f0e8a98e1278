"""Weights from safetensors files whose tensors have other names than the model's."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..basics.console import say
from ..fit import begin_anew, shapes_of
from ..trainer import Trainer
from .weight_files import Stacked, View, opened, region_of
from .weight_names import is_tensor, leaves_of, norms_in, resolved
from .weight_table import Table


def load_weights(
    path: str | os.PathLike[str],
    like: PyTree,
    names: Mapping[str, Any],
    *,
    state: eqx.nn.State | None = None,
    ignore: Iterable[str] = (),
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
        ignore: patterns of tensors that no leaf needs.

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
    with opened(path) as tensors:
        table = Table(tensors, wanted, unnamed, patterns)
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
    say(f"`load_weights`: {os.fspath(path)}\n{table}")
    model, state = (jax.tree.structure(tree) for tree in kept)
    return model.unflatten(leaves["model"]), state.unflatten(leaves["state"])


def _is_shape(value: Any) -> bool:
    return isinstance(value, jax.ShapeDtypeStruct)


def _array(value: Any, views: Mapping[tuple[int, ...], View]) -> jax.Array:
    """An array like `value`; where that lies on several devices, each gets its own."""
    view = views.get(()) or Stacked(views, value.shape)

    def part(index: Any) -> np.ndarray:
        read = view.read(region_of(index, value.shape))
        return read.astype(value.dtype, copy=False)

    sharding = getattr(value, "sharding", None)
    if sharding is None or not _is_shape(value) and len(sharding.device_set) == 1:
        return jnp.asarray(part([slice(None)] * value.ndim))
    return jax.make_array_from_callback(value.shape, sharding, part)
