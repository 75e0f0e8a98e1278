"""Files that are written whole or left as they were; errors that say which."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


def absolute(path: str | os.PathLike[str]) -> str:
    """The absolute path that a user means; a `~` at its start is the home."""
    return os.path.abspath(os.path.expanduser(path))


@contextlib.contextmanager
def naming(path: str | os.PathLike[str], whose: str) -> Iterator[None]:
    """Has what the system says of a file name the file, its writer and what to do."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise OSError(
            error.errno,
            f"`{whose}`: {os.fspath(path)!r} can't be written: {why}. Make room there,"
            " or pass another folder",
        ) from error


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A name to write to, which becomes `path` when all has been written.

    Where `path` is no ordinary file, `/dev/stdout` say, it is written to as it is.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        yield path
        return
    path = Path(os.path.realpath(path))  # not what links to it
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text in one piece: who looks sees the old one or the new one."""
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode())


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Saves a figure of matplotlib in one piece, in the format of its suffix."""
    path = Path(absolute(path))
    kind = path.suffix.removeprefix(".") or "png"
    with naming(path, "plot"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            figure.savefig(temporary, format=kind)


def sync(path: str | os.PathLike[str]) -> None:
    """Waits until a file or folder is on the disk, so that a power failure keeps it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_whole(file: IO[bytes], text: str) -> None:
    """Adds all of `text` at the end of an unbuffered file, or nothing of it."""
    end, data = os.fstat(file.fileno()).st_size, text.encode()
    try:
        while data:  # once, unless the disk is full
            data = data[file.write(data) :]
    except OSError:
        file.truncate(end)
        raise
