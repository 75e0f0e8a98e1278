"""A checkpoint is read: whole, unchanged and of this very model, or not at all."""

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    arrays_of,
    differences,
    dtype_in,
    first_lines,
    flat,
    name_leaves,
    nested,
    of_weights,
    shape_in,
    shapes,
    shown,
    unname_leaves,
    with_elements,
)
from .metadata import CheckpointCorrupt, check_files, read_sealed
from .orbax_quirks import quiet_orbax


def restore(
    path: str | os.PathLike[str],
    like: Callable[[Mapping[str, tuple[int, ...]]], TrainState],
    *,
    evaluated: bool = False,
    arguments: Mapping[str, str] | None = None,
) -> tuple[TrainState, dict[str, Any]]:
    """Reads what `start_saving` wrote, laid out as `like` says, and its metadata.

    Args:
        path: the folder.
        like: of the shapes by name that are there, gives a state of the same model and
            optimizer, or shapes with shardings, on any devices.
        evaluated: whether only the weights are read, and of these the ones that were
            evaluated; all else is as in `like`, and may be another optimizer's.
        arguments: those of now, to be named if the checkpoint has other leaves.

    Raises:
        FileNotFoundError: if there is no checkpoint at `path`.
        CheckpointCorrupt: if it is torn or damaged.
        ValueError: if it is of another model or optimizer; it names the arguments that
            have changed, or every leaf that is missing, left over, or of another shape
            or dtype. Or if it is of a format that this version does not read.
    """
    check_is_local("path", path)
    processes, path = get_process_group(), expand_path(path)

    def wanted(meta: dict[str, Any]) -> TrainState:
        return like({name: shape_in(text) for name, text in meta["leaves"].items()})

    def check() -> str:
        meta, digest = read_sealed(path)
        leaves = name_leaves(wanted(meta))
        stored = {n: meta["leaves"][s] for n, s in _names_in(meta, evaluated).items()}
        stored |= left_out(meta)
        now = shapes(of_weights(leaves) if evaluated else leaves)
        changed = changed_arguments(meta, arguments)
        check_same(path, now, stored, changed)
        return digest

    # Each process looks through a share of the files, and through the metadata.
    saved = processes.run_on_rank_zero(f"restoring {path}", check, CheckpointCorrupt)
    with all_or_none(processes, path):
        meta, digest = read_sealed(path)
        if digest != saved:
            raise FileNotFoundError(
                f"`path`: process {processes.index} finds another checkpoint at {path}"
                " than process 0; it must be in a file system that all processes share."
            )
        check_files(path, processes.index, processes.count)

    state, names = wanted(meta), _names_in(meta, evaluated)
    arrays = {n: leaf for n, leaf in arrays_of(state).items() if n in names}
    stored = _read_arrays(path, {names[n]: leaf for n, leaf in arrays.items()})
    return unname_leaves({name: stored[names[name]] for name in arrays}, state), meta


def left_out(meta: Mapping[str, Any]) -> dict[str, str]:
    """What the leaves are, by name, that a checkpoint of adapters was saved without."""
    return {
        name: text for name, (text, _) in (meta.get("beside_adapters") or {}).items()
    }


def check_left_out(path: str, meta: Mapping[str, Any], now: Mapping[str, str]) -> None:
    """Raises unless the leaves that were not saved have the bits that they had.

    Args:
        path: of the checkpoint, for messages.
        meta: its metadata.
        now: fingerprints by name.
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
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    texts = {name: meta["leaves"][name] for name in names}
    leaves = {
        name: jax.ShapeDtypeStruct(shape_in(text), dtype_in(text), sharding=here)
        for name, text in texts.items()
    }
    if leaves:
        check_files(path)
    read = _read_arrays(path, with_elements(leaves))
    return {
        name: read[name] if name in read else jnp.zeros(leaf.shape, leaf.dtype)
        for name, leaf in leaves.items()
    }


@contextlib.contextmanager
def all_or_none(processes: ProcessGroup, path: str) -> Iterator[None]:
    """What one process can't take up, none does: else they would go on from several."""
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    wrong = processes.gather_errors(f"taking up {path}", error)
    if wrong is None:
        return
    is_passed_over = isinstance(error, CheckpointCorrupt | FileNotFoundError)
    other = processes.gather_errors(
        f"passing over {path}", None if is_passed_over else error
    )
    if error is not None and not (is_passed_over and other):
        raise error
    if other:
        raise RuntimeError(f"`path`: {path} could not be taken up: {other}")
    raise CheckpointCorrupt(f"`path`: {path} could not be taken up: {wrong}")


def _names_in(meta: Mapping[str, Any], evaluated: bool) -> dict[str, str]:
    """What a checkpoint calls the leaves of a state, or the weights evaluated."""
    names = {name: name for name in meta["leaves"] if not name.startswith(EVALUATED)}
    if not evaluated:
        return names
    where = meta.get("evaluated", {})
    return {name: where.get(name, name) for name in of_weights(names)}


def changed_arguments(
    meta: Mapping[str, Any], now: Mapping[str, str] | None
) -> list[str]:
    """A line for each argument that was another one when a checkpoint was saved."""
    then = meta.get("arguments")
    if now is None or then is None:  # 0.2 saved none
        return []
    return [
        f"  `{name}` was {_only_in(then.get(name), now.get(name))}, and is"
        f" {_only_in(now.get(name), then.get(name))}"
        for name in dict.fromkeys([*now, *then])
        if _alike(then.get(name)) != _alike(now.get(name))
    ]


def _only_in(text: str | None, other: str | None) -> str:
    """Returns the lines of a text, of a model say, that the other one lacks."""
    lines, others = str(text).splitlines(), str(other).splitlines()
    return "; ".join(line.strip(" ,") for line in lines if line not in others)


def _alike(text: str | None) -> str:
    """The text without what differs between equal arguments: optax's cosine schedule
    makes 50.0 of 50 when it runs, and each process has another order of a set."""
    text = re.sub(r"(?<=\d)\.0\b", "", text or "")
    return re.sub(r"\{([^{}]*)\}", lambda s: str(sorted(s[1].split(", "))), text)


def _of_model(leaves: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's arrays, trained or not, of whatever precision."""
    named = ((name.partition(": "), text) for name, text in leaves.items())
    fields = "params", "buffers"
    return {path: shape_in(text) for (field, _, path), text in named if field in fields}


def check_same(
    path: str, wanted: dict[str, str], stored: dict[str, str], changed: list[str]
) -> None:
    """Raises unless a checkpoint's arrays are those that are wanted.

    If the arrays of the model are the same ones, it names the arguments that have
    `changed`; else the leaves.
    """
    lines = differences(shown(wanted), shown(stored))
    if not lines:
        return
    if changed and _of_model(wanted) == _of_model(stored):
        raise ValueError(
            f"`path`: {path} was saved with other arguments, and what they add to the"
            f" state differs:\n{first_lines(changed)}\nPass the same ones to resume;"
            " `jaxdp.load_model(path, like=model)` loads the weights alone."
        )
    hint = ""
    if {line.strip().partition(":")[0] for line in lines} == {"opt_state"}:
        hint = (
            "\nThe optimizer is a different one; `jaxdp.load_model(path,"
            " like=model)` loads the weights alone."
        )
    raise ValueError(
        f"`path`: {path} was saved from another model or optimizer:\n"
        f"{first_lines(lines)}{hint}"
    )


def _read_arrays(path: str, wanted: Named) -> Named:
    """The arrays of `wanted`, laid out like it, from files that were checked."""
    import orbax.checkpoint as ocp

    if not wanted:
        return {}
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None)
        ),
        nested(wanted),
    )
    arguments = ocp.args.PyTreeRestore(
        item=like,
        restore_args=ocp.checkpoint_utils.construct_restore_args(like),
        partial_restore=True,
    )
    with quiet_orbax(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return flat(checkpointer.restore(os.path.join(path, "state"), args=arguments))
