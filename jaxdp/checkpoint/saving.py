"""One checkpoint: a `TrainState` and what belongs to it, saved through Orbax.

A checkpoint is a folder with two Orbax items:

    state/           the arrays: {field of TrainState: {path of leaf: array}}
    meta/metadata    JSON: what the trainer wants kept, a description of the arrays
                     (shapes, dtypes, fingerprints), versions, and a digest of it all
    files.json       the SHA-256 of every file in these two

It is whole or absent: everything is written into a folder beside it, which then gets
the final name. What has come to harm afterwards is found when it is read, before
anything else looks into the files; the fingerprints tell, at last, that what arrived on
the devices are the bits that left them. Nothing that is read can run code, and no name
in it is used as a path. Plain Orbax reads the arrays, too:

    orbax.checkpoint.StandardCheckpointer().restore(path + "/state")
"""

import contextlib
import glob
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..basics.arguments import check_is_local
from ..basics.console import say
from ..basics.json_checks import fields, parse_json, read_json, whole
from ..basics.tree import leaf_path
from ..distributed import Processes, find_processes
from ..step import TrainState
from . import seal
from .fingerprints import fingerprints
from .form import FORMS
from .orbax_paths import as_orbax_reads, as_orbax_writes, unreadable

FORMAT: Final = 2
"""Version of the layout on disk. Format 1 had no fingerprints and no digest."""

Named = dict[str, dict[str, Any]]
"""`{field: {path: leaf}}`: readable by anyone, whatever the classes in the tree."""


_MOST_FORMATS: Final = 1000
"""Nothing that was saved by any version has a higher number."""


class CheckpointCorrupt(ValueError):
    """A checkpoint is torn or damaged: it is there, but not what was saved."""


class SaveFailed(RuntimeError):
    """A checkpoint could not be written. Older ones are as they were."""


class Saving:
    """A checkpoint on its way to the disk.

    Attributes:
        path: the folder that appears once it is whole.
    """

    def __init__(
        self,
        path: str,
        checkpointer: Any,
        then: Callable[[str], None],
        processes: Processes,
        resources: contextlib.ExitStack,
    ):
        self.path = path
        self._processes = processes
        self._then: Callable[[str], None] | None = then
        self._error: BaseException | None = None
        # A thread of our own, because Orbax can't be asked whether it is done, and
        # forgets what it waits for when Ctrl-C interrupts the wait.
        self._thread = threading.Thread(
            target=self._wait, args=(checkpointer, resources), name="jaxdp checkpoint"
        )
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether `finish` will not wait."""
        return not self._thread.is_alive()

    def finish(self, *, alone: bool = False) -> str:
        """Waits until the checkpoint is durable, and returns its path.

        Args:
            alone: whether the other processes may be elsewhere. If not, all of them
                call this, and what fails in one of them fails in all.

        Raises:
            SaveFailed: if it could not be written; nothing is left of it then.
        """
        self.wait()
        if self._error is not None and (alone or self._processes.count == 1):
            raise _save_failed(self.path, self._error) from self._error
        if not alone:
            wrong = self._processes.any(f"saved {self.path}", self._error)
            if wrong is not None:
                raise _save_failed(self.path, OSError(wrong)) from self._error
        then, self._then = self._then, None
        if then is not None:
            then(self.path)
        return self.path

    def wait(self) -> None:
        """Waits until the rest of the work is done, well or not."""
        self._thread.join()

    def _wait(self, checkpointer: Any, resources: contextlib.ExitStack) -> None:
        with resources, _quiet_orbax():
            try:
                checkpointer.wait_until_finished()
                written = _written(self.path)
                if written != self.path and self._processes.index == 0:
                    os.rename(written, self.path)
                _sync(os.path.dirname(self.path))
                checkpointer.close()
            except BaseException as error:
                self._error = error


_starting: Final = threading.Lock()
"""Held while a save begins: Orbax counts them in a variable of the whole process, which
a second one that began in another thread would change under the first."""

_latest: threading.Thread | None = None
"""The rest of the save that began last."""


def start_saving(
    path: str | os.PathLike[str],
    state: TrainState,
    meta: Mapping[str, Any],
    then: Callable[[str], None] = lambda path: None,
) -> Saving:
    """Begins to write `state` and `meta` into the new folder `path`.

    Returns as soon as the arrays are on the host, so that the next step may overwrite
    them; the rest happens in the background.

    Args:
        path: the folder; parents are made.
        state: placed arrays, written from where they live.
        meta: JSON values.
        then: called by the first `Saving.finish`, with the path.

    Raises:
        FileExistsError: if something is at `path`.
        SaveFailed: if it is known already that this can't be written.
        TypeError: if `meta` is not JSON.
    """
    import orbax.checkpoint as ocp

    global _latest
    check_is_local("path", path)
    path, processes = os.path.abspath(path), find_processes()
    processes.first(f"saving {path}", lambda: _check_is_new(path))
    named = _named(state)
    described = _described(named, meta)
    arguments = ocp.args.Composite(
        state=ocp.args.StandardSave(_with_elements(named)),
        meta=ocp.args.JsonSave(described),
    )
    shapes = {
        name.replace(": ", ".", 1): leaf.shape
        for name, leaf in _flat(_with_elements(named)).items()
    }
    folder, name = os.path.split(_written(path))
    with _starting, contextlib.ExitStack() as resources:
        before = _latest
        if before is not None and processes.count > 1:
            # Orbax's processes wait for each other by the name of the folder alone: at
            # two folders of one name at once, for ever.
            before.join()

        def finish() -> None:
            """Runs when all is written, just before the folder gets its name."""
            _seal(known_as, name, shapes)
            if before is not None:
                before.join()  # a checkpoint may know of those that began before it

        try:
            os.makedirs(folder, exist_ok=True)
            known_as = resources.enter_context(as_orbax_reads(folder))
            options = ocp.options.AsyncOptions(post_finalization_callback=finish)
            with _quiet_orbax():
                checkpointer = ocp.AsyncCheckpointer(
                    ocp.CompositeCheckpointHandler(), async_options=options
                )
                checkpointer.save(os.path.join(known_as, name), args=arguments)
        except (OSError, ValueError) as error:  # a full disk is a ValueError to Orbax
            raise _save_failed(path, error) from error
        saving = Saving(path, checkpointer, then, processes, resources.pop_all())
        _latest = saving._thread
    return saving


def restore(
    path: str | os.PathLike[str],
    like: TrainState,
    take_up: Callable[[dict[str, Any]], None] = lambda meta: None,
) -> tuple[TrainState, dict[str, Any]]:
    """Reads what `start_saving` wrote, laid out as `like` is now.

    Args:
        path: the folder.
        like: a state of the same model and optimizer, on any devices.
        take_up: called with the metadata before the arrays are read. What it raises
            is raised.

    Raises:
        FileNotFoundError: if there is no checkpoint at `path`.
        CheckpointCorrupt: if it is torn or damaged.
        ValueError: if it is of another model or optimizer; it names every leaf that
            is missing, left over, or of another shape or dtype. Or if it is of a
            format that this version does not read.
    """
    processes, path = find_processes(), os.path.abspath(path)
    wanted = _named(like)
    digest = processes.first(
        f"restoring {path}",
        lambda: _digest(_checked(path, _shapes(wanted))),
        CheckpointCorrupt,
    )
    with _alike(processes, path):
        meta = read_meta(path)
        if _digest(meta) != digest:
            raise FileNotFoundError(
                f"`path`: process {processes.index} finds another checkpoint at {path}"
                " than process 0; it must be in a file system that all processes share."
            )
        take_up(meta)
    stored = _read_arrays(path, _with_elements(wanted), meta)
    return _unnamed(stored, like), meta


def restore_leaves(
    path: str | os.PathLike[str], meta: Mapping[str, Any], leaves: Named
) -> Named:
    """Reads some of the arrays of a checkpoint, and only those.

    Args:
        path: the folder.
        meta: what `read_meta` gives for it.
        leaves: for each the shape, dtype and sharding that it has or is to get; they
            must be those of `meta["leaves"]`.
    """
    if meta["format"] > 1 and leaves:
        _check_seal(os.path.abspath(path), meta["leaves"])
    read = _read_arrays(path, _with_elements(leaves), meta)
    return {
        field: {name: read.get(field, {}).get(name, leaf) for name, leaf in of.items()}
        for field, of in leaves.items()
    }


def read_meta(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON of a checkpoint, whole and of a format that this version reads.

    Raises:
        FileNotFoundError, NotADirectoryError, CheckpointCorrupt, ValueError: as
            `restore` does.
    """
    path = os.path.abspath(path)
    _check_is_checkpoint(path)
    try:
        meta = read_json(os.path.join(path, "meta", "metadata"))
        fields({"format": whole(1, _MOST_FORMATS)})(meta, "metadata")
    except (OSError, ValueError) as error:
        raise _corrupt(path, f"its meta/metadata can't be read: {error}") from error
    version = meta["format"]
    if version == 1 and "digest" not in meta:
        say(f"{path} was saved without fingerprints: damage to it can't be seen")
    elif meta.pop("digest", None) != _digest(meta) or version == 1:
        raise _corrupt(path, "meta/metadata is not what was saved (its digest differs)")
    if version not in FORMS:
        versions = meta.get("versions")
        wrote = versions.get("jaxdp") if isinstance(versions, dict) else "something"
        raise ValueError(
            f"`path`: {path} has format {version!r}, written by jaxdp {wrote}, and this"
            f" is jaxdp {_version()}, which reads formats 1 to {FORMAT}; use the"
            " version that wrote it, or a newer one."
        )
    try:
        FORMS[version](meta, "metadata")
    except ValueError as error:
        raise _corrupt(
            path, f"what its meta/metadata says was not saved by a trainer: {error}"
        ) from error
    return meta


def differences(wanted: Mapping[str, str], stored: Mapping[str, str]) -> list[str]:
    """A line for every leaf that is not in both, or not of one shape and dtype."""
    return [
        f"  {name}: the checkpoint has {stored.get(name, 'nothing')}, the trainer"
        f" {wanted.get(name, 'nothing')}"
        for name in sorted(wanted.keys() | stored.keys())
        if wanted.get(name) != stored.get(name)
    ]


def shape_text(leaf: Any) -> str:
    """How `meta["leaves"]` describes an array: `float32(16, 4)`."""
    return f"{leaf.dtype}{tuple(leaf.shape)}"


def is_key(leaf: Any) -> bool:
    """Whether an array holds typed PRNG keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def plain(leaf: Any) -> Any:
    """A typed PRNG key as the integers it is made of; other leaves as they are."""
    if not is_key(leaf):
        return leaf
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    return jax.eval_shape(jax.random.key_data, leaf)


def unplain(stored: Any, like: Any) -> Any:
    """The inverse of `plain`."""
    if not is_key(like):
        return stored
    return jax.random.wrap_key_data(stored, impl=jax.random.key_impl(like))


@contextlib.contextmanager
def _alike(processes: Processes, path: str) -> Iterator[None]:
    """What one process can't take up, none does: else they would go on from several."""
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    wrong = processes.any(f"taking up {path}", error)
    if wrong is None:
        return
    is_passed_over = isinstance(error, CheckpointCorrupt | FileNotFoundError)
    other = processes.any(f"passing over {path}", None if is_passed_over else error)
    if error is not None and not (is_passed_over and other):
        raise error
    if other:
        raise RuntimeError(f"`path`: {path} could not be taken up: {other}")
    raise CheckpointCorrupt(f"`path`: {path} could not be taken up: {wrong}")


def _check_is_checkpoint(path: str) -> None:
    if not os.path.lexists(path):
        raise FileNotFoundError(f"`path`: there is nothing at {path}.")
    if not os.path.isdir(path):
        raise NotADirectoryError(
            f"`path`: {path} is not a folder, and a checkpoint is one."
        )
    inside = sorted(os.listdir(path))
    if not {"state", "meta"} <= set(inside):
        steps = [name for name in inside if name.isdecimal()]
        hint = f" It has checkpoints in it: {', '.join(steps[:20])}." if steps else ""
        raise FileNotFoundError(
            f"`path`: there is no checkpoint at {path} (a folder with `state` and"
            f" `meta` in it).{hint}"
        )
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            mode = os.lstat(os.path.join(folder, name)).st_mode
            if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
                kind = "symbolic link" if stat.S_ISLNK(mode) else "special file"
                raise _corrupt(
                    path, f"{name} in it is a {kind}, which is never written there"
                )


def _check_is_new(path: str) -> None:
    if os.path.lexists(path):
        raise FileExistsError(f"`path`: {path} exists already; pass a new folder.")


def _checked(path: str, wanted: dict[str, str]) -> dict[str, Any]:
    """`read_meta`, of arrays of these shapes, the files being those that were saved."""
    meta = read_meta(path)
    _check_same(path, wanted, meta["leaves"])
    if meta["format"] > 1:
        _check_seal(path, meta["leaves"])
    return meta


def _corrupt(path: str, how: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"`path`: the checkpoint {path} is damaged: {how}.")


def _described(named: Named, meta: Mapping[str, Any]) -> dict[str, Any]:
    """`meta` with all that is needed to judge the checkpoint later."""
    described = {
        "format": FORMAT,
        "versions": _versions(),
        "leaves": _shapes(named),
        "fingerprints": fingerprints(_flat(_with_elements(named))),
        **meta,
    }
    try:
        # Tuples and int keys as they are read back, and nothing that is refused then.
        described = parse_json(json.dumps(described).encode())
        FORMS[FORMAT](described, "metadata")
    except ValueError as error:
        longest = max(meta, key=lambda name: len(json.dumps(meta[name])), default="")
        raise SaveFailed(
            f"no checkpoint was written, because it could not be read again: {error}."
            " Counters, callbacks and loaders have said what to save; the most of it is"
            f" {longest!r}."
        ) from error
    return described | {"digest": _digest(described)}


def _digest(meta: Mapping[str, Any]) -> str:
    text = json.dumps(meta, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _read_arrays(
    path: str | os.PathLike[str], wanted: Named, meta: Mapping[str, Any]
) -> Named:
    """The arrays of `wanted`, laid out like it, their fingerprints checked.

    Their files have been looked at before.
    """
    import orbax.checkpoint as ocp

    if not wanted:
        return {}
    path = os.path.abspath(path)
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None)
        ),
        wanted,
    )
    arguments = ocp.args.PyTreeRestore(
        item=shapes,
        restore_args=ocp.checkpoint_utils.construct_restore_args(shapes),
        partial_restore=True,
    )
    reader = ocp.PyTreeCheckpointHandler()
    try:
        with (
            _quiet_orbax(),
            as_orbax_reads(path) as known_as,
            ocp.Checkpointer(reader) as checkpointer,
        ):
            state = os.path.join(known_as, "state")
            stored = checkpointer.restore(state, args=arguments)
        # Waits for the device.
        read, saved = fingerprints(_flat(stored)), meta.get("fingerprints")
    except Exception as error:  # of any type: what is read may be anything
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise
        how = f"its arrays can't be read: {_first_line(error).rstrip('.')}"
        raise _corrupt(path, how) from error
    wrong = [n for n in read if saved is not None and read[n] != saved.get(n)]
    if wrong:
        raise _corrupt(path, f"the fingerprint differs of {_listed(wrong)}")
    return stored


def _named(state: TrainState) -> Named:
    named = {
        field: {
            leaf_path(path) or "value": plain(leaf)
            for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
        }
        for field, tree in state._asdict().items()
    }
    return {field: leaves for field, leaves in named.items() if leaves}


def arrays_of(state: TrainState) -> dict[str, Any]:
    """The arrays that a checkpoint of `state` would have, by name."""
    return _flat(_with_elements(_named(state)))


def _unnamed(named: Named, like: TrainState) -> TrainState:
    """The inverse of `_named`, in the structure of `like`."""

    def fill(field: str, tree: PyTree) -> PyTree:
        def find(path: Any, leaf: Any) -> Any:
            stored = named.get(field, {}).get(leaf_path(path) or "value")
            return leaf if stored is None else unplain(stored, leaf)  # no elements

        return jax.tree_util.tree_map_with_path(find, tree)

    return TrainState(**{field: fill(field, t) for field, t in like._asdict().items()})


def _with_elements(named: Named) -> Named:
    """Without arrays of size 0, which Orbax can't save and nobody needs."""
    found = {
        field: {name: leaf for name, leaf in of.items() if 0 not in leaf.shape}
        for field, of in named.items()
    }
    return {field: leaves for field, leaves in found.items() if leaves}


def _flat(named: Named) -> dict[str, Any]:
    return {
        f"{field}: {path}": leaf
        for field, leaves in named.items()
        for path, leaf in leaves.items()
    }


def _shapes(named: Named) -> dict[str, str]:
    return {name: shape_text(leaf) for name, leaf in _flat(named).items()}


def _check_same(path: str, wanted: dict[str, str], stored: dict[str, str]) -> None:
    lines = differences(wanted, stored)
    if not lines:
        return
    fields = {line.strip().partition(":")[0] for line in lines}
    hint = ""
    if fields == {"opt_state"}:
        hint = (
            "\nThe optimizer is another one; `jaxdp.load_model(path, like=model)` takes"
            " up the weights alone."
        )
    raise ValueError(
        f"`path`: {path} was saved from another model or optimizer:\n"
        + "\n".join(lines[:20])
        + (f"\n  and {len(lines) - 20} more" if len(lines) > 20 else "")
        + hint
    )


def _save_failed(path: str, error: BaseException) -> SaveFailed:
    """Gives the disk back what a failed save took, and says what happened."""
    for _ in range(20):
        found = _unfinished(_written(path))
        if not found:
            break
        for unfinished in found:
            shutil.rmtree(unfinished, ignore_errors=True)
        time.sleep(0.05)  # others of Orbax's threads may be writing yet
    free = ""
    try:
        left = shutil.disk_usage(os.path.dirname(path)).free
        free = f" ({left / 2**20:,.0f} MiB are free there now)"
    except OSError:
        pass
    return SaveFailed(
        f"the checkpoint {path} could not be written: {type(error).__name__}:"
        f" {_first_line(error)}{free}. Checkpoints saved before are as they were."
    )


def _written(path: str) -> str:
    """What Orbax calls the folder that is to be `path`: most often that."""
    folder, name = os.path.split(path)
    return os.path.join(folder, as_orbax_writes(name))


def _unfinished(path: str) -> list[str]:
    """The folders that Orbax writes to before one of them is `path`."""
    return glob.glob(f"{glob.escape(path)}.orbax-checkpoint-tmp*")


def _seal(folder: str, name: str, shapes: Mapping[str, Sequence[int]]) -> None:
    """Notes the SHA-256 of all files of a checkpoint that is about to be named `name`.

    And asks the disk for each of them, so that not even a power failure undoes it.

    Raises:
        OSError: if the arrays of `shapes` can't be read from it.
    """
    (unnamed,) = _unfinished(os.path.join(folder, name))
    if missing := unreadable(os.path.join(unnamed, "state"), shapes):
        raise OSError(f"what was written lacks {_listed(missing)}")
    seal.write_list(unnamed)
    for folder, _, files in os.walk(unnamed):
        for name in files:
            _sync(os.path.join(folder, name))
        _sync(folder)


def _check_seal(path: str, arrays: Mapping[str, str]) -> None:
    """Raises unless every file is what it was when the checkpoint was saved."""
    try:
        listed = seal.read_list(path)
        changed = seal.changed_files(path, listed, arrays)
    except (OSError, ValueError) as error:
        raise _corrupt(path, f"its files.json can't be read: {error}") from error
    if changed:
        raise _corrupt(path, f"not what was saved, or missing, is {_listed(changed)}")


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _versions() -> dict[str, str]:
    packages = ("jax", "equinox", "optax", "orbax-checkpoint", "numpy")
    found = {name: importlib.metadata.version(name) for name in packages}
    return {"jaxdp": _version(), "python": platform.python_version(), **found}


def _version() -> str:
    return sys.modules[__name__.partition(".")[0]].__version__


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[None]:
    """What Orbax logs meanwhile of an error, the error that is raised says, too."""

    def is_of_others(record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname

    logger = logging.getLogger("absl")
    logger.addFilter(is_of_others)
    try:
        yield
    finally:
        logger.removeFilter(is_of_others)
