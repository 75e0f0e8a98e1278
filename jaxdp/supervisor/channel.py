"""What a script and its supervisor tell each other, through files in a private folder.

settings.json   what the script is to know
beat            signs of life, and how far it is
end.json        the exception that ended it
"""

import contextlib
import functools
import json
import mmap
import os
import struct
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from .child import END, VARIABLE

_BEAT: Final = struct.Struct("<3q")
_SETTINGS: Final = "settings.json"
_NO_END: Final = b" " * 4096


class Beat(NamedTuple):
    """The last sign of life."""

    count: int
    step: int
    """The last one that this process has taken, or -1."""
    is_slow: int
    """Whether no step can be expected: a program is compiled, say."""


class Channel:
    """The child's end, in a folder.

    Attributes:
        every: steps from one snapshot to the next, or None.
        deadman: seconds of silence after which the child is killed, or None.
        snapshots: the folder of all snapshots.
        session: tells this supervisor from others.
    """

    def __init__(self, path: str):
        with open(os.path.join(path, _SETTINGS), encoding="utf-8") as file:
            settings = json.load(file)
        self.parent: int = settings["parent"]
        self.every: int | None = settings["every"]
        self.deadman: float | None = settings["deadman"]
        self.snapshots, self.session = os.path.split(path)
        with open(os.path.join(path, "beat"), "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _BEAT.size)

    def beat(self, step: int | None = None, *, is_slow: bool | None = None) -> None:
        """Gives a sign of life, in about a microsecond; what is None is as before."""
        last = Beat(*_BEAT.unpack(self._memory))
        step = last.step if step is None else step
        slow = last.is_slow if is_slow is None else is_slow
        _BEAT.pack_into(self._memory, 0, last.count + 1, step, slow)

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """Around what may take longer than a step."""
        was_slow = bool(_BEAT.unpack(self._memory)[2])
        self.beat(is_slow=True)
        try:
            yield
        finally:
            self.beat(is_slow=was_slow)


@functools.cache
def channel() -> Channel | None:
    """The line to the supervisor that has started this very process, if one has."""
    path = os.environ.get(VARIABLE)
    if path is None:
        return None
    try:
        found = Channel(path)
    except OSError:  # of a supervisor that is gone
        return None
    return found if found.parent == os.getppid() else None


def alive() -> None:
    """A sign of life, if somebody watches."""
    if (line := channel()) is not None:
        line.beat()


def patience() -> contextlib.AbstractContextManager[None]:
    """Around what may take longer than a step, whether or not somebody watches."""
    line = channel()
    return contextlib.nullcontext() if line is None else line.patience()


# The parent's end.


def open_channel(path: str, **settings: Any) -> None:
    """Writes what the child is to know, and makes room for the rest."""
    for name in ("beat", END):
        with open(os.path.join(path, name), "wb"):
            pass
    reset(path)
    with open(os.path.join(path, _SETTINGS), "w", encoding="utf-8") as file:
        json.dump({"parent": os.getpid(), **settings}, file)


def reset(path: str) -> None:
    """Forgets the child before. No room is asked for."""
    for name, content in ("beat", _BEAT.pack(0, -1, True)), (END, _NO_END):
        with open(os.path.join(path, name), "r+b") as file:
            file.write(content)


def read_beat(path: str) -> Beat:
    """The child's last sign of life."""
    with open(os.path.join(path, "beat"), "rb") as file:
        return Beat(*_BEAT.unpack(file.read(_BEAT.size)))


def read_end(path: str) -> dict[str, Any]:
    """The exception that has ended the child; empty if none has."""
    try:
        with open(os.path.join(path, END), "rb") as file:
            return json.loads(file.read())
    except (OSError, ValueError):
        return {}
