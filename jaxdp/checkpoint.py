"""Saving and restoring a `TrainState` through Orbax.

A checkpoint is a folder with two Orbax items: `state`, the arrays as
`{part: {path of leaf: array}}`, and `meta`, JSON. Plain Orbax reads it:

    orbax.checkpoint.StandardCheckpointer().restore(path + "/state")
"""

import os
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .step import TrainState
from .tree import leaf_path

FORMAT = 1
"""Version of the layout on disk, in `meta`."""


def save(path: str, state: TrainState, meta: dict[str, Any]) -> str:
    """Writes `state` and `meta` into the new folder `path`.

    Args:
        path: the folder; parents are made.
        state: placed arrays, written from where they live.
        meta: JSON values.

    Returns:
        The absolute path, once everything is on disk.

    Raises:
        FileExistsError: if `path` exists.
    """
    import orbax.checkpoint as ocp

    path = os.path.abspath(path)
    if os.path.exists(path):
        raise FileExistsError(f"`path`: {path} exists already; pass a new folder.")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    arguments = ocp.args.Composite(
        state=ocp.args.StandardSave(_named(state)),
        meta=ocp.args.JsonSave(
            {"format": FORMAT, "leaves": _shapes(_named(state)), **meta}
        ),
    )
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=arguments)
    return path


def restore(path: str, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """Reads what `save` wrote, laid out as `like` is now.

    Args:
        path: the folder.
        like: a state of the same model and optimizer, on any devices.

    Raises:
        FileNotFoundError: if there is no checkpoint at `path`.
        ValueError: if it is of another model or optimizer; it names every leaf that
            is missing, left over, or of another shape or dtype.
    """
    import orbax.checkpoint as ocp

    path = os.path.abspath(path)
    if not os.path.isdir(os.path.join(path, "state")):
        raise FileNotFoundError(
            f"`path`: there is no checkpoint at {path} (a folder with `state` and"
            " `meta` in it)."
        )
    wanted = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding
        ),
        _named(like),
    )
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        read = checkpointer.restore(
            path, args=ocp.args.Composite(meta=ocp.args.JsonRestore())
        )
        meta = read.meta
        if meta.get("format") != FORMAT:
            raise ValueError(
                f"`path`: {path} has format {meta.get('format')!r} and this version of"
                f" jaxdp reads format {FORMAT}; use the version that wrote it."
            )
        _check_same(path, _shapes(wanted), meta["leaves"])
        read = checkpointer.restore(
            path, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted))
        )
    return _unnamed(read.state, like), meta


def _named(state: TrainState) -> dict[str, dict[str, Any]]:
    """`{field: {path: leaf}}`: readable by anyone, whatever the classes in the tree."""
    return {
        field: {
            leaf_path(path) or "value": _plain(leaf)
            for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
        }
        for field, tree in state._asdict().items()
        if jax.tree.leaves(tree)
    }


def _unnamed(named: dict[str, dict[str, Any]], like: TrainState) -> TrainState:
    """The inverse of `_named`, in the structure of `like`."""

    def fill(field: str, tree: PyTree) -> PyTree:
        def find(path: Any, leaf: Any) -> Any:
            stored = named[field][leaf_path(path) or "value"]
            if not _is_key(leaf):
                return stored
            return jax.random.wrap_key_data(stored, impl=jax.random.key_impl(leaf))

        return jax.tree_util.tree_map_with_path(find, tree)

    return TrainState(**{field: fill(field, t) for field, t in like._asdict().items()})


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _plain(leaf: Any) -> Any:
    """A typed PRNG key as the integers it is made of; other leaves as they are."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _shapes(named: Any) -> dict[str, str]:
    return {
        f"{field}: {path}": f"{leaf.dtype}{tuple(leaf.shape)}"
        for field, leaves in named.items()
        for path, leaf in leaves.items()
    }


def _check_same(path: str, wanted: dict[str, str], stored: dict[str, str]) -> None:
    lines = [
        f"  {name}: the checkpoint has {stored.get(name, 'nothing')}, the trainer"
        f" {wanted.get(name, 'nothing')}"
        for name in sorted(wanted.keys() | stored.keys())
        if wanted.get(name) != stored.get(name)
    ]
    if lines:
        shown = "\n".join(lines[:20])
        more = f"\n  and {len(lines) - 20} more" if len(lines) > 20 else ""
        raise ValueError(
            f"`path`: {path} was saved from another model or optimizer:\n{shown}{more}"
        )
