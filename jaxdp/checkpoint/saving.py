"""One checkpoint: a `TrainState` and what belongs to it, saved through Orbax.

A checkpoint is a folder with two Orbax items:

    state/           the arrays: {field of TrainState: {path of leaf: array}}
    meta/metadata    JSON: what the trainer wants kept, shapes and dtypes, versions
    files.json       the SHA-256 of every file in these two

It is whole or absent: everything is written into a folder beside it, which then gets
the final name. What has come to harm afterwards is found when it is read, before
anything else looks into the files. Nothing that is read can run code, and no name in
it is used as a path. Plain Orbax reads the arrays, too:

    orbax.checkpoint.StandardCheckpointer().restore(path + "/state")
"""

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from ..basics.arguments import check_is_local
from ..basics.environment import get_versions
from ..basics.files import check_json_size, expand_path, sync_to_disk
from ..distributed import ProcessGroup, format_error_line, get_process_group
from ..step import TrainState
from .leaves import (
    Named,
    evaluated_leaves,
    name_leaves,
    nested,
    shape_text,
    shapes,
    with_elements,
)
from .metadata import FORMAT, check_schema, list_files_of_process, write_list
from .orbax_quirks import check_name, quiet_orbax, unfinished


class SaveFailed(RuntimeError):
    """A checkpoint could not be written. Older ones are as they were."""


class Saving:
    """A checkpoint on its way to the disk.

    Args:
        path: the folder.
        checkpointer: Orbax's, which has begun to write.
        then: called by the first `finish`, with the path.
        waiting: gives the context of every wait.
        processes: those that save it together.

    Attributes:
        path: the folder that appears once it is whole.
        thread: does the rest of the work.
    """

    def __init__(
        self,
        path: str,
        checkpointer: Any,
        then: Callable[[str], None],
        waiting: Callable[[], contextlib.AbstractContextManager[None]],
        processes: ProcessGroup,
    ):
        self.path = path
        self._processes = processes
        self._then: Callable[[str], None] | None = then
        self._waiting = waiting
        self._error: BaseException | None = None
        # A thread of our own, because Orbax can't be asked whether it is done, and
        # forgets what it waits for when Ctrl-C interrupts the wait.
        self.thread = threading.Thread(
            target=self._write, args=(checkpointer,), name="jaxdp checkpoint"
        )
        self.thread.start()

    @property
    def is_done(self) -> bool:
        """Whether `finish` will not wait."""
        return not self.thread.is_alive()

    def finish(self, *, alone: bool = False) -> str:
        """Waits until the checkpoint is durable, and returns its path.

        Args:
            alone: whether the other processes may be elsewhere. If not, all of them
                call this, and what fails in one of them fails in all.

        Raises:
            SaveFailed: if it could not be written; nothing is left of it then.
        """
        with self._waiting():
            self.thread.join()
        if self._error is not None and (alone or self._processes.count == 1):
            raise _save_failed(self.path, self._error) from self._error
        if not alone:
            wrong = self._processes.gather_errors(f"saved {self.path}", self._error)
            if wrong is not None:
                raise _save_failed(self.path, OSError(wrong)) from self._error
        then, self._then = self._then, None
        if then is not None:
            then(self.path)
        return self.path

    def _write(self, checkpointer: Any) -> None:
        with quiet_orbax():
            try:
                checkpointer.wait_until_finished()
                sync_to_disk(os.path.dirname(self.path))
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
    waiting: Callable[
        [], contextlib.AbstractContextManager[None]
    ] = contextlib.nullcontext,
    evaluated: TrainState | None = None,
    left_out: Mapping[str, str] = MappingProxyType({}),
) -> Saving:
    """Begins to write `state` and `meta` into the new folder `path`.

    Returns as soon as the arrays are on the host, so that the next step may overwrite
    them; the rest happens in the background.

    Args:
        path: the folder; parents are made.
        state: placed arrays, written from where they live.
        meta: JSON values.
        then: called by the first `Saving.finish`, with the path.
        waiting: gives the context in which `Saving.finish` waits, of a stopwatch say.
        evaluated: `state` with the weights that are evaluated, if these are others.
        left_out: fingerprints of leaves that are not saved, by name.

    Raises:
        FileExistsError: if something is at `path`.
        SaveFailed: if it is known already that this can't be written.
        TypeError: if `meta` is not JSON.
    """
    import orbax.checkpoint as ocp

    global _latest
    check_is_local("path", path)
    path, processes = expand_path(path), get_process_group()
    check_name("path", path)
    processes.run_on_rank_zero(f"saving {path}", lambda: _check_is_new(path))

    where, others = evaluated_leaves(state, evaluated or state)
    named = name_leaves(state)
    beside = {name: [shape_text(named.pop(name)), left_out[name]] for name in left_out}
    named |= others
    meta = {**meta, "evaluated": where} | (
        {"beside_adapters": beside} if beside else {}
    )
    arguments = ocp.args.Composite(
        state=ocp.args.StandardSave(nested(with_elements(named))),
        meta=ocp.args.JsonSave(_described(named, meta)),
    )

    with _starting:
        before = _latest
        if before is not None and processes.count > 1:
            # Orbax's processes wait for each other by the name of the folder alone: at
            # two folders of one name at once, for ever.
            before.join()

        def finish() -> None:
            """Runs when all is written, just before the folder gets its name."""
            _seal(path)
            if before is not None:
                before.join()  # a checkpoint may know of those that began before it

        wait_for_others = ocp.multihost.get_barrier_sync_fn()

        def arrive(*, key: str, timeout_ms: int) -> None:
            """Orbax's barriers; at this one all have written their own arrays."""
            if "async_write_complete" in key:
                with contextlib.suppress(OSError, ValueError):  # process 0 lists more
                    (unnamed,) = unfinished(path)
                    list_files_of_process(unnamed, processes.index)
            wait_for_others(key=key, timeout_ms=timeout_ms)

        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            options = ocp.options.AsyncOptions(
                barrier_sync_fn=arrive, post_finalization_callback=finish
            )
            with quiet_orbax():
                checkpointer = ocp.AsyncCheckpointer(
                    ocp.CompositeCheckpointHandler(), async_options=options
                )
                checkpointer.save(path, args=arguments)
        except (OSError, ValueError) as error:  # a full disk is a ValueError to Orbax
            raise _save_failed(path, error) from error
        saving = Saving(path, checkpointer, then, waiting, processes)
        _latest = saving.thread
    return saving


def _check_is_new(path: str) -> None:
    if os.path.lexists(path):
        raise FileExistsError(f"`path`: {path} exists already; pass a new folder.")


def _described(named: Named, meta: Mapping[str, Any]) -> dict[str, Any]:
    """`meta` with all that is needed to judge the checkpoint later."""
    described = {
        "format": FORMAT,
        "versions": get_versions(),
        "leaves": shapes(named),
        **meta,
    }
    check_schema(described)
    try:
        check_json_size(len(json.dumps(described)))
    except ValueError as error:
        raise SaveFailed(
            "no checkpoint was written, because it could not be read back:"
            f" {error}. That is the state of counters, callbacks and loaders."
        ) from error
    return described


def _seal(path: str) -> None:
    """Lists all files of the checkpoint that is about to be named `path`.

    And asks the disk for each of them, so that not even a power failure undoes it.
    """
    (unnamed,) = unfinished(path)
    write_list(unnamed)
    for inside, _, files in os.walk(unnamed):
        for file in files:
            sync_to_disk(os.path.join(inside, file))
        sync_to_disk(inside)


def _save_failed(path: str, error: BaseException) -> SaveFailed:
    """Gives the disk back what a failed save took, and says what happened."""
    for _ in range(20):
        left_over = unfinished(path)
        if not left_over:
            break
        for folder in left_over:
            shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)  # others of Orbax's threads may be writing yet
    free = ""
    with contextlib.suppress(OSError):
        left = shutil.disk_usage(os.path.dirname(path)).free
        free = f" ({left / 2**20:,.0f} MiB are free there now)"
    return SaveFailed(
        f"the checkpoint {path} could not be written: {format_error_line(error)}{free}."
        " Earlier checkpoints are unchanged."
    )
