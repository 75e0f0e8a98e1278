"""The weights of a model alone: from a checkpoint or a file, and into a file."""

import itertools
import math
import os
from collections.abc import Callable, Iterable, Set
from typing import Any, Final, Literal, TypeVar, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..basics.arguments import check_is_local, checks_arguments
from ..basics.console import log_info, warn
from ..basics.environment import import_extra
from ..basics.files import (
    check_fields,
    expand_path,
    parse_json,
    sync_to_disk,
    write_atomically,
)
from ..basics.tree import is_key, leaf_path, plain_path
from ..checkpoint import CheckpointCorrupt, CheckpointDir, read_meta
from ..checkpoint.leaves import (
    differences,
    dtype_in,
    first_lines,
    plain,
    shape_in,
    shape_text,
    unplain,
)
from ..checkpoint.restoring import left_out, restore_leaves

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
}

_STATE: Final = "model_state: "
"""What the names of the arrays of a model's state begin with."""

_HINT_OF_STATE: Final = (
    "\n`like` has an `eqx.nn.State` in it: pass the model alone, and the state as"
    " `state`: `model, state = load_model(path, like=model, state=state)`."
)


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
            so `eqx.filter_eval_shape(Model, ...)` is enough. Its floats may be wider
            than those that were saved, under `precision="bf16-true"`, say.
        state: an `eqx.nn.State` to fill as well, with BatchNorm's running statistics,
            say. Only checkpoints contain one; one that is not asked for is warned of.
        partial: keep the leaves of `like` that the file lacks or has in another shape,
            and say which.
        which: the weights that were validated, `"scored"`, or `"raw"` ones, that
            training goes on with. They differ where a `WeightAveraging` or the like
            had others evaluated.

    Returns:
        A new model, on the default device; with `state`, `(model, state)`.

    Raises:
        FileNotFoundError, CheckpointCorrupt: as `Trainer.load`.
        ValueError: if leaves differ and `partial` is False, or if none fits; it names
            them.
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

    # What is wanted, by name, and what the file has of it.
    wanted = _shapes(like)
    if path.endswith(".safetensors"):
        if state is not None:
            raise ValueError("`state`: a .safetensors file has none; use a checkpoint.")
        stored, read = _open_safetensors(path)
    else:
        stored, read = _open_checkpoint(path := _best_in(path), which)
        if state is not None:
            wanted |= {f"{_STATE}{n}": x for n, x in _shapes(state).items()}

    stored = {n: _as_wanted(text, wanted.get(n)) for n, text in stored.items()}
    fitting = [name for name in wanted if stored.get(name) == wanted[name]]
    hint = _HINT_OF_STATE if state is None and _has_state(like) else ""
    _compare(path, wanted, stored, partial, hint)
    if state is None and any(map(_is_of_state, stored)):
        warn(
            f"`load_model`: {path} has a model state, BatchNorm's running statistics"
            " say, which is not loaded. `model, state = load_model(path, like=model,"
            " state=state)` loads it, into a state as `eqx.nn.make_with_state` makes"
            " one."
        )
    values = read(fitting)
    _check_beside(like, stored.keys() - values.keys())
    model = _filled(like, values, "")
    if state is None:
        return model
    return model, _filled(state, values, _STATE)


def _check_beside(like: PyTree, left_out: Set[str]) -> None:
    """Raises where `like` has shapes of what adapters were saved without."""
    for name, leaf in _arrays(like).items():
        if isinstance(leaf, jax.ShapeDtypeStruct) and name in left_out:
            raise ValueError(
                f"`like`: {name} is a shape, and the checkpoint has adapters alone;"
                " pass the model itself, with the weights beside them."
            )


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
        _safetensors()  # says that it is missing, before anything is made
        write = _write_safetensors
    elif path.endswith(".eqx"):
        write = _write_eqx
    else:
        raise ValueError(f"`path`={path!r} must end with '.safetensors' or '.eqx'.")

    os.makedirs(os.path.dirname(path), exist_ok=True)
    with write_atomically(path) as temporary:
        write(temporary, model)
        sync_to_disk(temporary)
    return path


def read_weights(path: Path, which: str = "scored") -> dict[str, np.ndarray]:
    """The arrays of the model in a checkpoint by their paths, without the model.

    `path` and `which` are as for `load_model`. Typed PRNG keys are the integers that
    they are made of.
    """
    shapes, read = _open_checkpoint(path := _best_in(expand_path(path)), which)
    wanted = [name for name in shapes if not _is_of_state(name)]
    if len(wanted) < len(shapes):
        log_info(f"{path} has a model state, too, which is not among the weights")
    arrays = {name: np.asarray(value) for name, value in read(wanted).items()}
    if len(arrays) < len(wanted):
        log_info(
            f"{path} has {len(arrays)} arrays of adapters, and not what is beside them"
        )
    return arrays


def _arrays(tree: PyTree) -> dict[str, Any]:
    """The arrays of a tree, or descriptions of them, by path."""
    return {
        leaf_path(path) or "value": leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if isinstance(leaf, jax.ShapeDtypeStruct)
        or eqx.is_array_like(leaf)
        and hasattr(leaf, "dtype")
    }


def _filled(tree: PyTree, values: dict[str, Any], prefix: str) -> PyTree:
    def fill(path: Any, leaf: Any) -> Any:
        value = values.get(prefix + (leaf_path(path) or "value"))
        if value is None:
            return leaf
        value = jnp.asarray(value)
        return unplain(value if is_key(leaf) else value.astype(leaf.dtype), leaf)

    return jax.tree_util.tree_map_with_path(fill, tree)


def _shapes(tree: PyTree) -> dict[str, str]:
    return {name: shape_text(plain(leaf)) for name, leaf in _arrays(tree).items()}


def _as_wanted(stored: str, wanted: str | None) -> str:
    """What is wanted instead of narrower floats, which it holds as they are."""
    if wanted is None or shape_in(stored) != shape_in(wanted):
        return stored
    narrow, wide = dtype_in(stored), dtype_in(wanted)
    fits = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (narrow, wide))
    return wanted if fits and jnp.promote_types(narrow, wide) == wide else stored


def _is_of_state(name: str) -> bool:
    return name.startswith(_STATE)


def _has_state(tree: PyTree) -> bool:
    """Whether there is an `eqx.nn.State` in a tree."""

    def is_state(value: Any) -> bool:
        return isinstance(value, eqx.nn.State)

    return any(map(is_state, jax.tree.leaves(tree, is_leaf=is_state)))


def _compare(
    path: str,
    wanted: dict[str, str],
    stored: dict[str, str],
    partial: bool,
    hint: str,
) -> None:
    """Says what differs from the file: an error, unless `partial` lets it be."""
    of_model = {name for name in wanted if not _is_of_state(name)}
    fits = any(stored.get(n) == wanted[n] for n in of_model or wanted)
    problem = f"the model in {path} is a different one"
    remedy = "Use `partial=True` to take what fits."
    if partial and not fits:
        problem = f"no array of the model in {path} fits"
        remedy = "So nothing would be loaded."

    def counts(name: str) -> bool:
        return name in wanted or not (partial and fits or _is_of_state(name))

    there = {name: shape for name, shape in stored.items() if counts(name)}
    lines = differences(wanted, there, "model")
    if lines and partial and fits:
        shown = "\n".join(lines)
        log_info(f"`load_model`: these leaves stay as they are in `like`:\n{shown}")
    elif lines:
        raise ValueError(f"`like`: {problem}:\n{first_lines(lines)}\n{remedy}{hint}")


def _best_in(path: str) -> str:
    """A checkpoint's path: `path`, or the best one if that is a folder of them."""
    folder = CheckpointDir(path)
    steps = folder.steps()
    if not steps or os.path.lexists(os.path.join(path, "meta")):
        return path
    last = steps[-1]
    recorded, monitor = _best_first(folder, read_meta(folder.path_of(last)))
    # The link knows of what was measured after it was saved.
    best_first = [folder.linked("best"), *recorded]
    chosen = next((step for step in best_first if step in steps), None)
    what = f"the best by {monitor}" if monitor else "the best"
    if chosen is None or not monitor and chosen == last:
        chosen, what = last, "the last"
    count = f"{len(steps)} checkpoint{'s' * (len(steps) > 1)}"
    log_info(f"`load_model`: {folder.path_of(chosen)}, {what} of {count}")
    return folder.path_of(chosen)


def _best_first(folder: CheckpointDir, meta: dict[str, Any]) -> tuple[list[Any], str]:
    """The steps of a folder, best first, as its `ModelCheckpoint` had them, and by what
    they are judged: "val_loss (min)"; "" if by nothing, or if that is not known.

    Of several the one that had this folder, or one of the same name, if it was moved.
    """
    whose = meta["identities"]

    def is_of(name: str) -> tuple[bool, bool]:
        saver_folder = whose.get(name, "").partition("\n")[0]
        base = os.path.basename
        return saver_folder == folder.path, base(saver_folder) == base(folder.path)

    records = {
        name: state["best_first"]
        for name, state in meta["callbacks"].items()
        if isinstance(state.get("best_first"), list)
    }
    if not records:
        return [], ""
    name = max(records, key=is_of)
    monitor, *mode = whose.get(name, "").partition("\n")[2].split(", ")
    return records[name], f"{monitor} ({mode[0]})" if mode else ""


Reader = Callable[[Iterable[str]], dict[str, Any]]
"""Given names of leaves, reads them."""


def _open_checkpoint(path: str, which: str) -> tuple[dict[str, str], Reader]:
    """Shapes by name in the model, and how to read some of them."""
    meta = read_meta(path)
    where = meta.get("evaluated", {}) if which == "scored" else {}
    full_names: dict[str, str] = {}
    for full in meta["leaves"]:
        field, _, name = full.partition(": ")
        if field in ("params", "buffers"):
            full_names[plain_path(name)] = where.get(full, full)
        elif field == "model_state":
            full_names[full] = where.get(full, full)
    shapes = {name: meta["leaves"][full] for name, full in full_names.items()}
    for full, text in left_out(meta).items():
        shapes[plain_path(full.partition(": ")[2])] = text

    def read(found: Iterable[str]) -> dict[str, Any]:
        named = {name: full_names[name] for name in found if name in full_names}
        stored = restore_leaves(path, meta, named.values())
        return {name: stored[full] for name, full in named.items()}

    return shapes, read


def _open_safetensors(path: str) -> tuple[dict[str, str], Reader]:
    arrays = {plain_path(name): array for name, array in open_safetensors(path).items()}
    shapes = {name: shape_text(array) for name, array in arrays.items()}
    return shapes, lambda found: {name: np.array(arrays[name]) for name in found}


def open_safetensors(path: str) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file: views of it, read where they are used.

    Raises:
        FileNotFoundError: if there is none.
        CheckpointCorrupt: if it is of another format, or damaged.
    """
    try:
        return _views_of(np.memmap(path, np.uint8, mode="r"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointCorrupt(f"`path`: {path} can't be read: {error}.") from error


def _views_of(content: np.ndarray) -> dict[str, np.ndarray]:
    """The length of the header, the header in JSON, and the numbers.

    https://huggingface.co/docs/safetensors/index#format
    """
    length = int.from_bytes(content[:8].tobytes(), "little")
    if length > content.size - 8:
        raise ValueError("it is no safetensors file, or only the beginning of one")
    try:
        header = parse_json(content[8 : 8 + length].tobytes(), unique_keys=True)
    except ValueError as error:
        raise ValueError(f"its header is no JSON ({error})") from error
    check_fields(header, {}, "header")
    header.pop("__metadata__", None)
    numbers, tensors = content[8 + length :], {}
    for name, described in header.items():
        start, end = _place_of(name, described, numbers.size)
        flat = numbers[start:end].view(_DTYPES[described["dtype"]])
        tensors[name] = flat.reshape(described["shape"])

    # As the format has it, tensors fill the file without a gap.
    placed = sorted((header[name]["data_offsets"], name) for name in tensors)
    placed = [([0, 0], "the header"), *placed, ([numbers.size] * 2, "the file's end")]
    for (first, name), (second, other) in itertools.pairwise(placed):
        if second[0] < first[1]:
            raise ValueError(f"{name} and {other} overlap, at {first} and {second}")
        if second[0] > first[1]:
            raise ValueError(
                f"{second[0] - first[1]} bytes between {name} and {other} are no tensor"
            )
    return tensors


def _place_of(name: str, described: Any, size: int) -> tuple[int, int]:
    """Where a tensor is among so many bytes, or a ValueError."""
    check_fields(described, {"dtype": str, "shape": list, "data_offsets": list}, name)
    kind, shape, offsets = (described[n] for n in ("dtype", "shape", "data_offsets"))
    if kind not in _DTYPES:
        raise ValueError(f"{name} is of dtype {kind}, none of {', '.join(_DTYPES)}")
    if not all(type(number) is int and number >= 0 for number in shape):
        raise ValueError(f"`{name}.shape` is {shape}, and must be whole numbers")
    if list(map(type, offsets)) != [int, int]:
        raise ValueError(f"`{name}.data_offsets` is {offsets}, and must be two ints")
    start, end = offsets
    needed = math.prod(shape) * np.dtype(_DTYPES[kind]).itemsize
    if not (0 <= start <= end <= size and end - start == needed):
        raise ValueError(
            f"{name}, {kind}{shape}, takes {needed} bytes, and is at {offsets} of"
            f" {size}"
        )
    return start, end


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


def _write_safetensors(path: Path, model: PyTree) -> None:
    arrays = {
        name: np.asarray(plain(leaf), order="C")
        for name, leaf in _arrays(model).items()
    }
    _safetensors().save_file(arrays, path)


def _write_eqx(path: Path, model: PyTree) -> None:
    with open(path, "wb") as file:  # by its name it would get another one
        eqx.tree_serialise_leaves(file, model)


def _safetensors() -> Any:
    return import_extra("safetensors.numpy", "a .safetensors file", "safetensors")
