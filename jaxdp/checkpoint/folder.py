"""A folder of checkpoints, one per saved step, that one run at a time writes to.

    <path>/128, <path>/256, ...    checkpoints, each named by its step
    <path>/best, <path>/last       links to two of them, where links can be made
    <path>/before-1, ...           checkpoints of another run with the same steps
    <path>/.lock                   locked while a fit writes; names the process

A checkpoint is renamed before it is deleted, so a process that is killed meanwhile
leaves temporary files, but nothing that looks like a checkpoint. The next fit removes
them. `saving.py` writes one checkpoint, which Orbax renames when it is complete.
"""

import contextlib
import itertools
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable
from typing import Any, Final

from ..basics.console import log_info
from ..basics.files import expand_path
from .orbax_quirks import check_name

try:
    import fcntl
except ImportError:  # Windows, where the folder is not locked
    fcntl: Any = None

_TEMPORARY_PATTERN: Final = re.compile(
    r"\d+\.orbax-checkpoint-tmp.*|\.removed-\d+-.*|\.probe-.*"
)
_STEP: Final = re.compile(r"0|[1-9]\d*", re.ASCII)

_locked_folders: Final[set[str]] = set()
"""The folders that this process has locked. A lock keeps only other processes out."""


class CheckpointDir:
    """A folder of checkpoints.

    Args:
        path: the folder; `open` makes it.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = expand_path(path)
        self._lock: int | None = None

    def list_steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, damaged or not, in ascending order.

        Only real folders count: a symbolic link could lead anywhere.
        """
        return sorted(int(e.name) for e in self._list_step_entries() if _is_folder(e))

    def find_non_folders(self) -> list[int]:
        """Returns the steps whose name belongs to a file or link, not to a folder."""
        return sorted(
            int(e.name) for e in self._list_step_entries() if not _is_folder(e)
        )

    def get_path(self, step: int) -> str:
        """Returns the folder of a step."""
        return os.path.join(self.path, str(int(step)))

    def link(self, name: str, step: int | None) -> None:
        """Points the link `name` to the checkpoint of a step; None removes it."""
        path = os.path.join(self.path, name)
        if os.path.lexists(path) and not os.path.islink(path):
            return  # a file or folder of the user
        if step is not None and self.read_link(name) == step:
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

    def read_link(self, name: str) -> int | None:
        """Returns the step that the link `name` points to, if it has a checkpoint."""
        with contextlib.suppress(OSError):
            target = os.readlink(os.path.join(self.path, name))
            return next(
                (step for step in self.list_steps() if str(step) == target), None
            )
        return None

    def open(self) -> None:
        """Locks the folder for this run, until `close` or the end of the process.

        Raises:
            OSError: if it can't be made or written to.
            RuntimeError: if another run writes there.
            ValueError: if Orbax can't write to a folder of that name.
        """
        check_name("dirpath", self.path)
        folder = os.path.realpath(self.path)
        if folder in _locked_folders:
            raise RuntimeError(
                "`dirpath`: another ModelCheckpoint, or another fit of this process,"
                f" writes to {self.path}. Give each a folder of its own."
            )

        # Fail now, and not at the first save, hours later.
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

        # The lock ends with the process, however it ends; its forks do not share it.
        try:
            if fcntl is not None:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            owner = os.pread(lock, 200, 0).decode(errors="replace")
            os.close(lock)
            raise RuntimeError(
                f"`dirpath`: another run writes its checkpoints to {self.path}:"
                f" {owner}. Wait until it has ended, or pass another folder."
            ) from error
        except OSError as error:  # a file system without locks
            log_info(
                f"{self.path} can't be locked ({error}): make sure that no other run"
                " uses it"
            )
        self._lock = lock
        _locked_folders.add(folder)
        os.ftruncate(lock, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        owner = f"process {os.getpid()} on {socket.gethostname()}, since {since}"
        os.pwrite(lock, owner.encode(), 0)
        self.remove_temporary()

    def close(self) -> None:
        """Unlocks the folder for other runs. May be called again."""
        if self._lock is not None:
            # Temporary folders stay until the next run: if Ctrl-C interrupted the start
            # of a save, Orbax's threads still write to one, and would wait for ever.
            os.close(self._lock)
            _locked_folders.discard(os.path.realpath(self.path))
        self._lock = None

    def remove(self, step: int) -> None:
        """Removes a checkpoint; if interrupted, leaves it complete or absent."""
        away = tempfile.mkdtemp(prefix=f".removed-{step}-", dir=self.path)
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            os.rename(self.get_path(step), away)  # onto an empty folder
        shutil.rmtree(away, ignore_errors=True)

    def set_aside(self, steps: Iterable[int]) -> str:
        """Moves checkpoints to a folder of their own, and returns its path."""
        for number in itertools.count(1):
            path = os.path.join(self.path, f"before-{number}")
            if not os.path.lexists(path):
                break
        os.mkdir(path)
        for step in steps:
            os.rename(self.get_path(step), os.path.join(path, str(step)))
        return path

    def remove_temporary(self) -> None:
        """Removes the temporary files of killed or failed saves and removals."""
        for entry in list(os.scandir(self.path)):
            if _is_folder(entry) and _TEMPORARY_PATTERN.fullmatch(entry.name):
                shutil.rmtree(entry.path, ignore_errors=True)

    def _list_step_entries(self) -> list["os.DirEntry[str]"]:
        try:
            return [e for e in os.scandir(self.path) if _STEP.fullmatch(e.name)]
        except (FileNotFoundError, NotADirectoryError):
            return []


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    return entry.is_dir(follow_symlinks=False)
