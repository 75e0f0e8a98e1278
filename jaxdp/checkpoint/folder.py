"""A folder of checkpoints, one per saved step, that one run at a time writes to.

    <path>/128, <path>/256, ...    checkpoints, each named by its step
    <path>/best, <path>/last       links to two of them, where links can be made
    <path>/before-1, ...           those of another run that were found in the way
    <path>/.lock                   held while a fit writes here; says who holds it

A checkpoint is removed by renaming it first and deleting it then, so that a process
that is killed meanwhile leaves rubbish, but nothing that looks like a checkpoint. The
rubbish of killed saves and removals is swept when the next fit begins.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable
from typing import Any, Final

from ..basics.console import log_info
from ..basics.files import expand_path, parse_json
from .orbax_quirks import check_name

try:
    import fcntl
except ImportError:  # Windows; there, nothing watches over the folder
    fcntl: Any = None

_RUBBISH: Final = re.compile(r"\d+\.orbax-checkpoint-tmp.*|\.removed-\d+-.*|\.probe-.*")
_STEP: Final = re.compile(r"0|[1-9]\d*", re.ASCII)

_taken: Final[set[str]] = set()
"""The folders that this process has locked, which keeps others out, but not itself."""


class CheckpointDir:
    """A folder of checkpoints.

    Args:
        path: the folder; `open` makes it.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = expand_path(path)
        self._lock: int | None = None

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, whole or not, in ascending order.

        Only real folders count: a symbolic link could lead anywhere.
        """
        return sorted(int(e.name) for e in self._named_by_step() if _is_folder(e))

    def impostors(self) -> list[int]:
        """Steps whose name is taken by something that is no folder, a link perhaps."""
        return sorted(int(e.name) for e in self._named_by_step() if not _is_folder(e))

    def path_of(self, step: int) -> str:
        """The folder of a step."""
        return os.path.join(self.path, str(int(step)))

    def link(self, name: str, step: int | None) -> None:
        """Has the link `name` lead to the checkpoint of a step, or to nothing."""
        path = os.path.join(self.path, name)
        if os.path.lexists(path) and not os.path.islink(path):
            return  # somebody else's
        if step is not None and self.linked(name) == step:
            return
        new = os.path.join(self.path, f".{name}")
        with contextlib.suppress(OSError):  # a killed process may have left it
            os.unlink(new)
        with contextlib.suppress(OSError):  # a file system without links
            if step is None:
                os.unlink(path)
            else:
                os.symlink(str(step), new)
                os.replace(new, path)

    def linked(self, name: str) -> int | None:
        """The step that the link `name` leads to, if its checkpoint is here."""
        with contextlib.suppress(OSError):
            there = os.readlink(os.path.join(self.path, name))
            return next((step for step in self.steps() if str(step) == there), None)
        return None

    def open(self) -> None:
        """Takes the folder for this run, until `close` or the process's end.

        Raises:
            OSError: if it can't be made or written to.
            RuntimeError: if another run writes there.
            ValueError: if Orbax can't write to a folder of that name.
        """
        check_name("dirpath", self.path)
        folder = os.path.realpath(self.path)
        if folder in _taken:
            raise RuntimeError(
                "`dirpath`: another ModelCheckpoint, or another fit of this process,"
                f" writes to {self.path}. Give each a folder of its own."
            )

        # Found out now, and not at the first save, hours later.
        try:
            os.makedirs(self.path, exist_ok=True)
            os.rmdir(tempfile.mkdtemp(prefix=".probe-", dir=self.path))
            lock = os.open(
                os.path.join(self.path, ".lock"),
                os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0),
                0o666,
            )
        except OSError as error:
            raise type(error)(
                f"`dirpath`: checkpoints can't be written to {self.path}: {error}."
                " Pass a folder that can be written to."
            ) from error

        # Held until the process ends, however it does; those that it forks have no part
        # in it.
        try:
            if fcntl is not None:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            holder = _holder(lock)
            os.close(lock)
            raise self._is_in_use(holder) from error
        except OSError as error:  # a file system without locks
            log_info(
                f"{self.path} can't be locked ({error}): make sure that no other run"
                " uses it"
            )
        self._lock = lock
        _taken.add(folder)
        os.ftruncate(lock, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        me = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
        os.pwrite(lock, json.dumps(me).encode(), 0)
        self.sweep()

    def close(self) -> None:
        """Lets other runs write here. May be called again."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self.sweep()
            os.close(self._lock)
            _taken.discard(os.path.realpath(self.path))
        self._lock = None

    def remove(self, step: int) -> None:
        """Removes a checkpoint; whenever it is interrupted, it is whole or gone."""
        away = tempfile.mkdtemp(prefix=f".removed-{step}-", dir=self.path)
        with contextlib.suppress(FileNotFoundError):  # someone else has removed it
            os.rename(self.path_of(step), away)  # onto an empty folder
        shutil.rmtree(away, ignore_errors=True)

    def set_aside(self, steps: Iterable[int]) -> str:
        """Moves checkpoints to a folder of their own, and returns its path."""
        for number in itertools.count(1):
            path = os.path.join(self.path, f"before-{number}")
            if not os.path.lexists(path):
                break
        os.mkdir(path)
        for step in steps:
            os.rename(self.path_of(step), os.path.join(path, str(step)))
        return path

    def sweep(self) -> None:
        """Removes what killed or failed saves and removals have left."""
        for entry in list(os.scandir(self.path)):
            if _is_folder(entry) and _RUBBISH.fullmatch(entry.name):
                shutil.rmtree(entry.path, ignore_errors=True)

    def _is_in_use(self, holder: str) -> RuntimeError:
        return RuntimeError(
            f"`dirpath`: another run writes its checkpoints to {self.path}: {holder}."
            " Wait until it has ended, or pass another folder."
        )

    def _named_by_step(self) -> list["os.DirEntry[str]"]:
        try:
            return [e for e in os.scandir(self.path) if _STEP.fullmatch(e.name)]
        except (FileNotFoundError, NotADirectoryError):
            return []


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    return entry.is_dir(follow_symlinks=False)


def _holder(lock: int) -> str:
    """Who holds a lock, as its file says."""
    try:
        holder = parse_json(os.pread(lock, 1000, 0))
        return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (ValueError, KeyError, TypeError, OSError):
        return "a process that has not said which"
