"""One checkpoint: a `TrainState` and what belongs to it, saved through Orbax.

A checkpoint is a folder with two Orbax items:

    state/           the arrays: {field of TrainState: {path of leaf: array}}
    meta/metadata    JSON: what the trainer wants kept, shapes and dtypes, versions
    files.json       the SHA-256 of every file in these two

It is complete or absent: everything is written into a temporary folder. Orbax then
renames it; `_seal` runs just before. Later damage is found when it is read, before
anything else reads the files. Reading never runs code from a checkpoint, and uses no
name in it as a path. Plain Orbax reads the arrays, too:

    orbax.checkpoint.StandardCheckpointer().restore(path + "/state")
"""

import contextlib
import functools
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from ..basics.arguments import check_is_local
from ..basics.environment import get_versions
from ..basics.files import expand_path, sync_to_disk
from ..basics.units import format_bytes
from ..distributed import ProcessGroup, format_error_line, get_process_group
from ..step import TrainState
from .leaves import (
    Named,
    describe_shape,
    describe_shapes,
    drop_empty_leaves,
    locate_evaluated,
    name_leaves,
    nest_by_field,
)
from .metadata import FORMAT, check_schema, list_files_of_process, write_file_list
from .orbax_quirks import check_name, find_unfinished, silence_orbax


class SaveFailed(RuntimeError):
    """A checkpoint could not be written. Older ones are unchanged."""


class PendingSave:
    """A checkpoint that is being written.

    Args:
        path: the folder.
        checkpointer: that of Orbax, which has started to write.
        on_saved: called by the first `finish`, with the path.
        wait_context: makes a context for every wait.
        processes: those that save it together.

    Attributes:
        path: the folder, which appears once it is complete.
        thread: waits for the writes to finish.
    """

    def __init__(
        self,
        path: str,
        checkpointer: Any,
        on_saved: Callable[[str], None],
        wait_context: Callable[[], contextlib.AbstractContextManager[None]],
        processes: ProcessGroup,
    ):
        self.path = path
        self._processes = processes
        self._on_saved: Callable[[str], None] | None = on_saved
        self._wait_context = wait_context
        self._error: BaseException | None = None
        # An extra thread, because Orbax does not tell whether it is done, and forgets
        # what it waits for when Ctrl-C interrupts the wait.
        self.thread = threading.Thread(
            target=self._write, args=(checkpointer,), name="jaxdp checkpoint"
        )
        self.thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the writes have ended, so that `finish` does not wait."""
        return not self.thread.is_alive()

    def finish(self, *, alone: bool = False) -> str:
        """Waits until the checkpoint is durable, and returns its path.

        Args:
            alone: whether only this process calls it. Otherwise all processes must, and
                an error in one of them is raised in all.

        Raises:
            SaveFailed: if it could not be written; nothing is left of it then.
        """
        with self._wait_context():
            self.thread.join()
        if self._error is not None and (alone or self._processes.count == 1):
            raise _save_failed(self.path, self._error) from self._error
        if not alone:
            wrong = self._processes.gather_errors(f"saved {self.path}", self._error)
            if wrong is not None:
                raise _save_failed(self.path, OSError(wrong)) from self._error
        on_saved, self._on_saved = self._on_saved, None
        if on_saved is not None:
            on_saved(self.path)
        return self.path

    def _write(self, checkpointer: Any) -> None:
        with silence_orbax():
            try:
                checkpointer.wait_until_finished()
                sync_to_disk(os.path.dirname(self.path))
                checkpointer.close()
            except BaseException as error:
                self._error = error


_starting: Final = threading.Lock()
"""Held while a save starts: Orbax counts saves in a global variable, which a second
save in another thread would change."""

_latest: threading.Thread | None = None
"""The thread of the last save."""


def start_saving(
    path: str | os.PathLike[str],
    state: TrainState,
    meta: Mapping[str, Any],
    on_saved: Callable[[str], None] = lambda path: None,
    wait_context: Callable[
        [], contextlib.AbstractContextManager[None]
    ] = contextlib.nullcontext,
    evaluated: TrainState | None = None,
    omitted: Mapping[str, str] = MappingProxyType({}),
) -> PendingSave:
    """Starts to write `state` and `meta` into the new folder `path`.

    Returns as soon as the arrays are on the host, so that the next step may overwrite
    them; the rest happens in the background.

    Args:
        path: the folder; parents are made.
        state: placed arrays, written from where they live.
        meta: JSON values.
        on_saved: called by the first `PendingSave.finish`, with the path.
        wait_context: makes the context in which `PendingSave.finish` waits, such as
            that of a stopwatch.
        evaluated: `state` with the evaluated weights, if they differ.
        omitted: fingerprints of leaves that are not saved, by name.

    Raises:
        FileExistsError: if something is at `path`.
        SaveFailed: if it is known already that this can't be written.
    """
    import orbax.checkpoint as ocp

    global _latest
    check_is_local("path", path)
    path, processes = expand_path(path), get_process_group()
    check_name("path", path)
    processes.run_on_rank_zero(f"saving {path}", lambda: _check_is_new(path))

    where, others = locate_evaluated(state, evaluated or state)
    named = name_leaves(state)
    beside = {
        name: [describe_shape(named.pop(name)), omitted[name]] for name in omitted
    }
    named |= others
    meta = {**meta, "evaluated": where} | (
        {"beside_adapters": beside} if beside else {}
    )
    arguments = ocp.args.Composite(
        state=ocp.args.StandardSave(nest_by_field(drop_empty_leaves(named))),
        meta=ocp.args.JsonSave(_add_description(named, meta)),
    )

    with _starting:
        before = _latest
        if before is not None and processes.count > 1:
            # Orbax's processes wait for each other by the name of the folder alone: at
            # two folders of one name at once, for ever.
            before.join()

        wait = functools.partial(
            _wait_at_barrier, path, processes.index, ocp.multihost.get_barrier_sync_fn()
        )
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            options = ocp.options.AsyncOptions(
                barrier_sync_fn=wait,
                post_finalization_callback=functools.partial(_seal, path, before),
            )
            with silence_orbax():
                checkpointer = ocp.AsyncCheckpointer(
                    ocp.CompositeCheckpointHandler(), async_options=options
                )
                checkpointer.save(path, args=arguments)
        except (OSError, ValueError) as error:  # a full disk is a ValueError to Orbax
            raise _save_failed(path, error) from error
        saving = PendingSave(path, checkpointer, on_saved, wait_context, processes)
        _latest = saving.thread
    return saving


def _check_is_new(path: str) -> None:
    if os.path.lexists(path):
        raise FileExistsError(f"`path`: {path} exists already; pass a new folder.")


def _add_description(named: Named, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `meta` with format, versions and descriptions of the leaves."""
    described = {
        "format": FORMAT,
        "versions": get_versions(),
        "leaves": describe_shapes(named),
        **meta,
    }
    check_schema(described)
    return described


def _wait_at_barrier(
    path: str, process: int, wait: Callable[..., None], *, key: str, timeout_ms: int
) -> None:
    """Waits at a barrier of Orbax; lists this process's files at that after writes."""
    if "async_write_complete" in key:
        with contextlib.suppress(OSError, ValueError):  # process 0 lists more
            (unnamed,) = find_unfinished(path)
            list_files_of_process(unnamed, process)
    wait(key=key, timeout_ms=timeout_ms)


def _seal(path: str, before: threading.Thread | None) -> None:
    """Lists all files of the checkpoint that is about to be named `path`.

    It also flushes each of them to disk, so that a power failure can't undo it; and
    waits for the save `before`.
    """
    (unnamed,) = find_unfinished(path)
    write_file_list(unnamed)
    for inside, _, files in os.walk(unnamed):
        for file in files:
            sync_to_disk(os.path.join(inside, file))
        sync_to_disk(inside)
    if before is not None:
        before.join()  # a checkpoint may know of those that began before it


def _save_failed(path: str, error: BaseException) -> SaveFailed:
    """Removes the files of a failed save, and returns the error to raise."""
    free = ""
    with contextlib.suppress(OSError):  # the folder may be gone
        free = f" ({format_bytes(shutil.disk_usage(os.path.dirname(path)).free)} free)"
    for _ in range(20):
        left_over = find_unfinished(path)
        if not left_over:
            break
        for folder in left_over:
            shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)  # Orbax's other threads may still be writing
    return SaveFailed(
        f"the checkpoint {path} could not be written: {format_error_line(error)}{free}."
        " Earlier checkpoints are unchanged."
    )
