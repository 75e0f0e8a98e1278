"""Files that are written completely or not at all, and JSON of unknown origin."""

import contextlib
import json
import os
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any


def expand_path(path: str | os.PathLike[str]) -> str:
    """Returns the absolute path; a `~` at its start is the home folder."""
    return os.path.abspath(os.path.expanduser(path))


@contextlib.contextmanager
def add_path_to_errors(path: str | os.PathLike[str], whose: str) -> Iterator[None]:
    """Adds the file, its writer and a remedy to errors of the system."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise  # not from the system: a TimeoutError, say
        why = error.strerror or str(error)
        raise OSError(
            error.errno,
            f"`{whose}`: {os.fspath(path)!r} can't be written: {why}. Make room there,"
            " or pass another folder",
        ) from error


@contextlib.contextmanager
def write_atomically(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path, which is renamed to `path` after the block.

    If `path` is no ordinary file, `/dev/stdout` say, yields `path` itself.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        yield path
        return
    path = Path(os.path.realpath(path))  # replaces the target of a link
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_text_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text so that readers see the old file or the new one."""
    with write_atomically(path) as temporary:
        temporary.write_bytes(text.encode())


def sync_to_disk(path: str | os.PathLike[str]) -> None:
    """Waits until a file or folder is on the disk, and survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_atomically(file: IO[bytes], text: str) -> None:
    """Appends all of `text` to an unbuffered file, or nothing."""
    end, data = os.fstat(file.fileno()).st_size, text.encode()
    try:
        while data:  # once, unless the disk is full
            data = data[file.write(data) :]
    except OSError:
        file.truncate(end)
        raise


def read_json(path: str | os.PathLike[str]) -> Any:
    """Reads a JSON file; raises a ValueError if it is not JSON."""
    with open(path, "rb") as file:
        return parse_json(file.read())


def parse_json(text: str | bytes, pairs_hook: Any = None) -> Any:
    """Parses JSON that may be damaged or untrusted; raises a ValueError if it is
    invalid.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs_hook)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def check_fields(value: Any, types: Mapping[str, Any], name: str) -> None:
    """Raises a ValueError unless `value` is an object with fields of these types.

    A field that may be None may be missing. Unknown fields are allowed.
    """
    if not isinstance(value, dict):
        raise ValueError(f"`{name}` is {reprlib.repr(value)}, and must be an object")
    for key, kind in types.items():
        field = value.get(key)
        if not isinstance(field, kind) or (kind is int and isinstance(field, bool)):
            what = getattr(kind, "__name__", str(kind))
            came = reprlib.repr(field) if key in value else "missing"
            raise ValueError(f"`{name}.{key}` is {came}, and must be {what}")
