"""Loads a model's weights from a checkpoint or a file, and saves them to a file."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, TypeVar, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..basics.arguments import check_is_local, checks_arguments
from ..basics.console import log_info, warn
from ..basics.files import (
    check_fields,
    expand_path,
    parse_json,
    sync_to_disk,
    write_atomically,
)
from ..basics.tree import find_nodes, is_key, leaf_path, plain_path
from ..checkpoint import CheckpointCorrupt, CheckpointDir, read_meta
from ..checkpoint.leaves import (
    data_to_key,
    describe_shape,
    join_first_lines,
    key_to_data,
    list_differences,
    parse_dtype,
    parse_shape,
)
from ..checkpoint.restoring import get_omitted_leaves, restore_leaves
from .import_package import import_package

Path = str | os.PathLike[str]
Model = TypeVar("Model")

_DTYPES: Final = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
    "C64": np.complex64,
}

_STATE: Final = "model_state: "
"""The prefix of names of arrays of a model's state."""

_STATE_HINT: Final = (
    "\n`like` has an `eqx.nn.State` in it: pass the model alone, and the state as"
    " `state`: `model, state = load_model(path, like=model, state=state)`."
)

Reader = Callable[[Iterable[str]], dict[str, Any]]
"""Reads the leaves of these names."""


@overload
def load_model(
    path: Path,
    like: Model,
    *,
    state: None = None,
    partial: bool = False,
    which: Literal["scored", "raw"] = "scored",
) -> Model: ...
@overload
def load_model(
    path: Path,
    like: Model,
    *,
    state: eqx.nn.State,
    partial: bool = False,
    which: Literal["scored", "raw"] = "scored",
) -> tuple[Model, eqx.nn.State]: ...
@checks_arguments
def load_model(
    path: Path,
    like: PyTree,
    *,
    state: eqx.nn.State | None = None,
    partial: bool = False,
    which: Literal["scored", "raw"] = "scored",
) -> Any:
    """Loads a model from a checkpoint or a file of weights.

    For inference or fine-tuning: the optimizer's state is not read, and it does not
    matter which leaves were trained.

    Args:
        path: the folder of a checkpoint; a folder of several, from which the best is
            taken (the last, if their `ModelCheckpoint` had no `monitor`); or a file
            that `save_model` wrote.
        like: a model of the same structure. Only structure, shapes and dtypes matter,
            so `eqx.filter_eval_shape(Model, ...)` is enough. Its numbers may be wider
            than those that were saved, under `precision="bf16-true"`, say.
        state: an `eqx.nn.State` to fill as well, with BatchNorm's running statistics,
            say. Only checkpoints contain one; one that is not asked for is warned of.
        partial: keep the leaves of `like` that the file lacks or has in another shape,
            and log which.
        which: the weights that were validated, `"scored"`, or `"raw"` ones, with which
            training resumes. They differ if a `WeightAveraging`, say, had other weights
            evaluated.

    Returns:
        A new model, on the default device (NumPy arrays of `like` stay NumPy's); with
        `state`, `(model, state)`.

    Raises:
        FileNotFoundError, CheckpointCorrupt: as `Trainer.load`.
        ValueError: if leaves differ and `partial` is False, or if no leaf fits. It
            names the leaves that differ.
    """
    check_is_local("path", path)
    path = expand_path(path)
    if path.endswith(".eqx"):
        if state is not None or partial:
            raise ValueError(
                "`path`: an .eqx file contains neither names nor a `state`, so it"
                " can't be read in part; use a checkpoint or .safetensors."
            )
        return _load_eqx(path, like)

    # The shapes of `like` and of the file, by name.
    wanted = _list_shapes(like)
    if path.endswith(".safetensors"):
        if state is not None:
            raise ValueError("`state`: a .safetensors file has none; use a checkpoint.")
        tensors = {plain_path(n): x for n, x in open_safetensors(path).items()}
        stored = {name: describe_shape(tensor) for name, tensor in tensors.items()}
        read: Reader = lambda names: {n: np.array(tensors[n]) for n in names}  # noqa: E731
    else:
        stored, read = _open_checkpoint(path := _find_best(path), which)
        if state is not None:
            wanted |= {f"{_STATE}{n}": x for n, x in _list_shapes(state).items()}

    stored = {n: _widen(text, wanted.get(n)) for n, text in stored.items()}
    fitting = [name for name in wanted if stored.get(name) == wanted[name]]
    hint = _STATE_HINT if state is None and find_nodes(eqx.nn.State, like) else ""
    _check_fits(path, wanted, stored, partial, hint)
    if state is None and any(map(_is_of_state, stored)):
        warn(
            f"`load_model`: {path} has a model state, BatchNorm's running statistics"
            " say, which is not loaded. `model, state = load_model(path, like=model,"
            " state=state)` loads it, into a state as `eqx.nn.make_with_state` makes"
            " one."
        )
    values = read(fitting)
    for name, leaf in _list_arrays(like).items():
        is_unread = name in stored and name not in values
        if is_unread and isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"`like`: {name} is a shape, and the checkpoint has adapters alone;"
                " pass the model itself, with the weights beside them."
            )
    model = _fill(like, values, "")
    return model if state is None else (model, _fill(state, values, _STATE))


@checks_arguments
def save_model(path: Path, model: PyTree) -> str:
    """Writes the arrays of a model into one file, whole or not at all.

    Args:
        path: ends with `.safetensors`, which many programs read (needs the extra
            `safetensors`), or `.eqx`, the format of `eqx.tree_serialise_leaves`. An
            existing file is replaced.
        model: any pytree. Only its arrays are written.

    Returns:
        The absolute path.
    """
    check_is_local("path", path)
    path = expand_path(path)
    if path.endswith(".safetensors"):
        _import_safetensors()  # raises where it is missing, before anything is made
    elif not path.endswith(".eqx"):
        raise ValueError(f"`path`={path!r} must end with '.safetensors' or '.eqx'.")

    os.makedirs(os.path.dirname(path), exist_ok=True)
    with write_atomically(path) as temporary:
        if path.endswith(".safetensors"):
            arrays = _list_arrays(model).items()
            write_arrays(temporary, {name: key_to_data(leaf) for name, leaf in arrays})
        else:
            with temporary.open("wb") as file:  # by its name it would get a suffix
                eqx.tree_serialise_leaves(file, model)
        sync_to_disk(temporary)
    return path


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Writes a .safetensors file, under any name."""
    contiguous = {name: np.asarray(x, order="C") for name, x in arrays.items()}
    # Other programs look for this entry before they read tensors as torch's.
    _import_safetensors().save_file(contiguous, path, metadata={"format": "pt"})


def read_weights(path: Path, which: str = "scored") -> dict[str, np.ndarray]:
    """Reads the arrays of the model in a checkpoint, by their paths.

    `path` and `which` are as for `load_model`. Typed PRNG keys become the integers that
    they consist of.
    """
    shapes, read = _open_checkpoint(path := _find_best(expand_path(path)), which)
    names = [name for name in shapes if not _is_of_state(name)]
    if len(names) < len(shapes):
        log_info(f"{path} has a model state, too, which is not among the weights")
    arrays = {name: np.asarray(value) for name, value in read(names).items()}
    if len(arrays) < len(names):
        log_info(
            f"{path} has {len(arrays)} arrays of adapters, and not what is beside them"
        )
    return arrays


def _list_arrays(tree: PyTree) -> dict[str, Any]:
    """Lists the arrays of a tree, or their shapes, by path."""
    return {
        leaf_path(path) or "value": leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if isinstance(leaf, jax.ShapeDtypeStruct)
        or eqx.is_array_like(leaf)
        and hasattr(leaf, "dtype")
    }


def _fill(tree: PyTree, values: dict[str, Any], prefix: str) -> PyTree:
    def fill(path: Any, leaf: Any) -> Any:
        value = values.get(prefix + (leaf_path(path) or "value"))
        if value is None:
            return leaf
        if isinstance(leaf, np.ndarray | np.generic):  # of a dtype that JAX may lack
            array = np.asarray(value).astype(leaf.dtype)
            return array[()] if isinstance(leaf, np.generic) else array
        value = jnp.asarray(value)
        return data_to_key(value if is_key(leaf) else value.astype(leaf.dtype), leaf)

    return jax.tree_util.tree_map_with_path(fill, tree)


def _list_shapes(tree: PyTree) -> dict[str, str]:
    return {
        name: describe_shape(key_to_data(leaf))
        for name, leaf in _list_arrays(tree).items()
    }


_KINDS: Final = (
    jnp.floating,
    jnp.complexfloating,
    jnp.signedinteger,
    jnp.unsignedinteger,
)


def _widen(stored: str, wanted: str | None) -> str:
    """Returns `wanted` if it is wider than `stored` and of its kind: nothing is lost.

    Without `jax_enable_x64`, a checkpoint has 32 bits of a model's NumPy array of 64.
    """
    if wanted is None or parse_shape(stored) != parse_shape(wanted):
        return stored
    narrow, wide = parse_dtype(stored), parse_dtype(wanted)
    is_of_kind = any(
        jnp.issubdtype(narrow, kind) and jnp.issubdtype(wide, kind) for kind in _KINDS
    )
    # Not `jnp.promote_types`, which has no 64 bits without `jax_enable_x64`.
    return wanted if is_of_kind and wide.itemsize > narrow.itemsize else stored


def _is_of_state(name: str) -> bool:
    return name.startswith(_STATE)


def _check_fits(
    path: str,
    wanted: dict[str, str],
    stored: dict[str, str],
    partial: bool,
    hint: str,
) -> None:
    """Raises if the model differs from the file.

    With `partial` it logs how, and raises only if nothing of the model fits.
    """
    of_model = {name for name in wanted if not _is_of_state(name)}
    partial_fits = partial and any(
        stored.get(name) == wanted[name] for name in of_model or wanted
    )
    compared = {
        name: shape
        for name, shape in stored.items()
        if name in wanted or not (partial_fits or _is_of_state(name))
    }
    lines = list_differences(wanted, compared, "model")
    if lines and partial_fits:
        listed = "\n".join(lines)
        log_info(f"`load_model`: these leaves stay as they are in `like`:\n{listed}")
    elif lines:
        problem = f"the model in {path} is a different one"
        remedy = "Use `partial=True` to take what fits."
        if partial:
            problem = f"no array of the model in {path} fits"
            remedy = "So nothing would be loaded."
        raise ValueError(
            f"`like`: {problem}:\n{join_first_lines(lines)}\n{remedy}{hint}"
        )


def _find_best(path: str) -> str:
    """Returns `path`, or its best checkpoint if it is a folder of them."""
    folder = CheckpointDir(path)
    steps = folder.list_steps()
    if not steps or os.path.lexists(os.path.join(path, "meta")):
        return path
    last = steps[-1]
    recorded, monitor = _read_ranking(folder, read_meta(folder.get_path(last)))
    # The link knows of scores that were measured after the last save.
    best_first = [folder.read_link("best"), *recorded]
    chosen = next((step for step in best_first if step in steps), None)
    reason = f"the best by {monitor}" if monitor else "the best"
    if chosen is None or not monitor and chosen == last:
        chosen, reason = last, "the last"
    count = f"{len(steps)} checkpoint{'s' * (len(steps) > 1)}"
    log_info(f"`load_model`: {folder.get_path(chosen)}, {reason} of {count}")
    return folder.get_path(chosen)


def _read_ranking(folder: CheckpointDir, meta: dict[str, Any]) -> tuple[list[Any], str]:
    """Reads how the `ModelCheckpoint` of a folder ranked its steps.

    Of several savers, it is that of this folder; or of one of the same name, as the
    folder may have been moved.

    Returns:
        The steps, best first, and their score, such as "val_loss (min)". That is ""
        where they were not scored, or where it is not known.
    """
    identities, base = meta["identities"], os.path.basename

    def is_of_folder(name: str) -> tuple[bool, bool]:
        saved = identities.get(name, "").partition("\n")[0]
        return saved == folder.path, base(saved) == base(folder.path)

    rankings = {
        name: state["best_first"]
        for name, state in meta["callbacks"].items()
        if isinstance(state.get("best_first"), list)
    }
    if not rankings:
        return [], ""
    name = max(rankings, key=is_of_folder)
    monitor, *mode = identities.get(name, "").partition("\n")[2].split(", ")
    return rankings[name], f"{monitor} ({mode[0]})" if mode else ""


def _open_checkpoint(path: str, which: str) -> tuple[dict[str, str], Reader]:
    """Returns the shapes of the arrays by name in the model, and their reader."""
    meta = read_meta(path)
    evaluated = meta.get("evaluated", {}) if which == "scored" else {}
    full_names: dict[str, str] = {}
    for full in meta["leaves"]:
        field, _, name = full.partition(": ")
        if field in ("params", "buffers"):
            full_names[plain_path(name)] = evaluated.get(full, full)
        elif field == "model_state":
            full_names[full] = evaluated.get(full, full)
    shapes = {name: meta["leaves"][full] for name, full in full_names.items()}
    for full, text in get_omitted_leaves(meta).items():
        shapes[plain_path(full.partition(": ")[2])] = text

    def read(names: Iterable[str]) -> dict[str, Any]:
        named = {name: full_names[name] for name in names if name in full_names}
        stored = restore_leaves(path, meta, named.values())
        return {name: stored[full] for name, full in named.items()}

    return shapes, read


def open_safetensors(path: str) -> dict[str, np.ndarray]:
    """Opens the tensors of a safetensors file: views, read when they are used.

    Raises:
        FileNotFoundError: if there is none.
        CheckpointCorrupt: if it is of another format, or damaged.
    """
    try:
        return _make_views(np.memmap(path, np.uint8, mode="r"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointCorrupt(f"`path`: {path} can't be read: {error}.") from error


def _make_views(content: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the tensors of a file, and checks all that its header says.

    A file has the length of its header, the header in JSON, and the numbers:
    https://huggingface.co/docs/safetensors/index#format
    """
    length = int.from_bytes(content[:8].tobytes(), "little")
    if length > content.size - 8:
        raise ValueError("it is no safetensors file, or only the beginning of one")
    text = content[8 : 8 + length].tobytes()
    header = parse_json(text, _refuse_repeated_keys)
    check_fields(header, {}, "header")
    header.pop("__metadata__", None)
    numbers, tensors = content[8 + length :], {}
    for name, described in header.items():
        try:
            (start, end), shape = described["data_offsets"], described["shape"]
            flat = numbers[start:end].view(_DTYPES[described["dtype"]])
            tensors[name] = flat.reshape(shape)
            fits = 0 <= start <= end <= numbers.size
            fits &= tensors[name].shape == tuple(shape)  # a -1 would be any size
        except (LookupError, TypeError, ValueError):
            fits = False
        if not fits:
            raise ValueError(
                f"{name} is {described}, and must have a dtype of {', '.join(_DTYPES)},"
                f" a shape, and its bytes among the file's {numbers.size}"
            )

    # As the format has it, tensors fill the file: other readers would read others.
    placed = sorted(header[name]["data_offsets"] for name in tensors)
    if [*(start for start, _ in placed), numbers.size] != [0, *(e for _, e in placed)]:
        raise ValueError("its tensors overlap, or some of its bytes are no tensor")
    return tensors


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(result := dict(pairs)) < len(pairs):
        raise ValueError("a key of its header is there twice")
    return result


def _load_eqx(path: str, like: PyTree) -> PyTree:
    with open(path, "rb") as file:
        try:
            model = eqx.tree_deserialise_leaves(file, like)
        except Exception as error:
            raise CheckpointCorrupt(
                f"`path`: {path} is damaged or belongs to another model: {error}."
            ) from error
        if file.read(1):
            raise ValueError(
                f"`like`: {path} has more leaves than the model, so it belongs to"
                " another model."
            )
    return model


def _import_safetensors() -> Any:
    return import_package("safetensors.numpy", "safetensors", "a .safetensors file")
