"""Restores checkpoints: complete, unchanged and of the same model, or not at all."""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..basics.arguments import check_is_local
from ..basics.files import expand_path
from ..distributed import ProcessGroup, get_process_group
from ..step import TrainState
from .leaves import (
    EVALUATED,
    Named,
    describe_shapes,
    drop_empty_leaves,
    flatten_fields,
    join_first_lines,
    list_differences,
    name_leaves,
    nest_by_field,
    parse_dtype,
    parse_shape,
    select_weights,
    unname_leaves,
    use_public_names,
)
from .metadata import CheckpointCorrupt, check_files, read_sealed


def restore(
    path: str | os.PathLike[str],
    like: TrainState,
    *,
    evaluated: bool = False,
    arguments: Mapping[str, str] | None = None,
) -> tuple[TrainState, dict[str, Any]]:
    """Reads what `start_saving` wrote; returns the state and the metadata.

    Args:
        path: the folder.
        like: the template: a state of the same model and optimizer, on any devices.
        evaluated: whether to read only the evaluated weights. The rest is then that of
            the template, and may be of another optimizer.
        arguments: the current arguments, named in errors where they differ.

    Raises:
        FileNotFoundError: if there is no checkpoint at `path`.
        CheckpointCorrupt: if it is incomplete or damaged.
        ValueError: if it is of another model or optimizer; it names the arguments that
            have changed, and the leaves that are missing, extra, or of another shape or
            dtype. Also if this version does not read its format.
    """
    check_is_local("path", path)
    processes, path = get_process_group(), expand_path(path)

    def check_metadata() -> str:
        meta, digest = read_sealed(path)
        leaves = name_leaves(like)
        stored = {n: meta["leaves"][s] for n, s in _map_names(meta, evaluated).items()}
        stored |= get_omitted_leaves(meta)
        now = describe_shapes(select_weights(leaves) if evaluated else leaves)
        changed = list_changed_arguments(meta, arguments)
        _check_same_leaves(path, now, stored, changed)
        return digest

    # Each process checks a part of the files, and the metadata.
    saved = processes.run_on_rank_zero(
        f"restoring {path}", check_metadata, CheckpointCorrupt
    )
    with load_together(processes, path):
        meta, digest = read_sealed(path)
        if digest != saved:
            raise FileNotFoundError(
                f"`path`: process {processes.index} finds another checkpoint at {path}"
                " than process 0; it must be in a file system that all processes share."
            )
        check_files(path, processes.index, processes.count)

    names = _map_names(meta, evaluated)
    arrays = drop_empty_leaves(name_leaves(like))
    wanted = {names[n]: leaf for n, leaf in arrays.items() if n in names}
    stored = _read_arrays(path, wanted)
    named = {name: stored[names[name]] for name in arrays if name in names}
    return unname_leaves(named, like), meta


def get_omitted_leaves(meta: Mapping[str, Any]) -> dict[str, str]:
    """Returns descriptions of the leaves that a checkpoint of adapters omits."""
    return {
        name: text for name, (text, _) in (meta.get("beside_adapters") or {}).items()
    }


def check_omitted_leaves(
    path: str, meta: Mapping[str, Any], now: Mapping[str, str]
) -> None:
    """Raises unless the omitted leaves have the same bits as when it was saved.

    Args:
        path: the checkpoint, for messages.
        meta: its metadata.
        now: the current fingerprints, by name.
    """
    for name, (_, then) in (meta.get("beside_adapters") or {}).items():
        if now.get(name) != then:
            raise ValueError(
                f"`path`: {path} has adapters alone, and {name.partition(': ')[2]} of"
                " the model that they were trained beside had other values than this"
                " one's. Make the model with the same weights, and load then."
            )


def restore_leaves(
    path: str | os.PathLike[str], meta: Mapping[str, Any], names: Iterable[str]
) -> dict[str, Any]:
    """Reads some arrays, by their names in `meta["leaves"]`, onto one device."""
    path = expand_path(path)
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    texts = {name: meta["leaves"][name] for name in names}
    leaves = {
        name: jax.ShapeDtypeStruct(
            parse_shape(text), parse_dtype(text), sharding=sharding
        )
        for name, text in texts.items()
    }
    if leaves:
        check_files(path)
    read = _read_arrays(path, drop_empty_leaves(leaves))
    return {
        name: read[name] if name in read else jnp.zeros(leaf.shape, leaf.dtype)
        for name, leaf in leaves.items()
    }


@contextlib.contextmanager
def load_together(processes: ProcessGroup, path: str) -> Iterator[None]:
    """Raises on all processes if the block raises on one: they must resume together."""
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    wrong = processes.gather_errors(f"restoring {path}", error)
    if error is not None:
        raise error
    if wrong is not None:
        raise CheckpointCorrupt(f"`path`: {path} could not be restored: {wrong}")


def _map_names(meta: Mapping[str, Any], evaluated: bool) -> dict[str, str]:
    """Maps leaves of a state, or the evaluated weights, to names in a checkpoint."""
    names = {name: name for name in meta["leaves"] if not name.startswith(EVALUATED)}
    if not evaluated:
        return names
    where = meta.get("evaluated", {})
    return {name: where.get(name, name) for name in select_weights(names)}


def list_changed_arguments(
    meta: Mapping[str, Any], now: Mapping[str, str] | None
) -> list[str]:
    """Returns a line for each argument that has changed since the save."""
    then = meta.get("arguments")
    if now is None or then is None:  # 0.2 saved none
        return []
    return [
        f"  `{name}` was {_select_parts(then.get(name), now.get(name))}, and is"
        f" {_select_parts(now.get(name), then.get(name))}"
        for name in dict.fromkeys([*now, *then])
        if _normalize(then.get(name)) != _normalize(now.get(name))
    ]


def _select_parts(text: str | None, other: str | None) -> str:
    """Returns the lines of a model, or the calls of an optimizer, that the other one
    lacks; all of them if only their order differs."""
    parts, others = (
        re.split(r"\n|(?<=\)), (?=\w+\()", str(each)) for each in (text, other)
    )
    missing = [part.strip(" ,") for part in parts if part not in others]
    same = str(text) if {*parts} == {*others} else "without it"
    return "; ".join(missing) or same


def _normalize(text: str | None) -> str:
    """Removes differences between equal arguments.

    Optax's cosine schedule turns 50 into 50.0 when it runs, and each process orders a
    set in its own way."""
    text = re.sub(r"(?<=\d)\.0\b", "", text or "")
    return re.sub(r"\{([^{}]*)\}", lambda s: str(sorted(s[1].split(", "))), text)


def _check_same_leaves(
    path: str, wanted: dict[str, str], stored: dict[str, str], changed: list[str]
) -> None:
    """Raises unless the leaves of a checkpoint have the expected shapes and dtypes.

    The error lists the arguments that have `changed` but the model, then the leaves
    that differ. If these are the optimizer's alone, the arguments explain them.
    """
    lines = list_differences(use_public_names(wanted), use_public_names(stored))
    if lines:
        arguments = [line for line in changed if not line.startswith("  `model`")]
        is_explained = arguments and all(
            line.startswith("  opt_state") for line in lines
        )
        shown = arguments if is_explained else [*arguments, *lines]
        raise ValueError(
            f"`path`: {path} does not fit this trainer:\n"
            f"{join_first_lines(shown)}\n"
            "Pass the same ones to resume; `jaxdp.load_model(path, like=model)` loads"
            " the weights alone."
        )


def _read_arrays(path: str, wanted: Named) -> Named:
    """Reads arrays with the shardings of `wanted`, from files that were checked."""
    import orbax.checkpoint as ocp

    if not wanted:
        return {}
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None)
        ),
        nest_by_field(wanted),
    )
    arguments = ocp.args.PyTreeRestore(
        item=like,
        restore_args=ocp.checkpoint_utils.construct_restore_args(like),
        partial_restore=True,
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        stored = checkpointer.restore(os.path.join(path, "state"), args=arguments)
    return flatten_fields(stored)
