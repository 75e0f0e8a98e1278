"""Files that are written whole or left as they were, and JSON from elsewhere."""

import contextlib
import json
import os
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final


def expand_path(path: str | os.PathLike[str]) -> str:
    """The absolute path that a user means; a `~` at its start is the home."""
    return os.path.abspath(os.path.expanduser(path))


@contextlib.contextmanager
def add_path_to_errors(path: str | os.PathLike[str], whose: str) -> Iterator[None]:
    """Has what the system says of a file name the file, its writer and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise  # of the program, such as a TimeoutError, not of the system
        why = error.strerror or str(error)
        raise OSError(
            error.errno,
            f"`{whose}`: {os.fspath(path)!r} can't be written: {why}. Make room there,"
            " or pass another folder",
        ) from error


@contextlib.contextmanager
def write_atomically(path: str | os.PathLike[str]) -> Iterator[Path]:
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


def write_text_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text in one piece: who looks sees the old one or the new one."""
    with write_atomically(path) as temporary:
        temporary.write_bytes(text.encode())


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Saves a figure of matplotlib in one piece, in the format of its suffix."""
    path = Path(expand_path(path))
    kind = path.suffix.removeprefix(".") or "png"
    with add_path_to_errors(path, "plot"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(path) as temporary:
            figure.savefig(temporary, format=kind)


def sync_to_disk(path: str | os.PathLike[str]) -> None:
    """Waits until a file or folder is on the disk, so that a power failure keeps it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_atomically(file: IO[bytes], text: str) -> None:
    """Adds all of `text` at the end of an unbuffered file, or nothing of it."""
    end, data = os.fstat(file.fileno()).st_size, text.encode()
    try:
        while data:  # once, unless the disk is full
            data = data[file.write(data) :]
    except OSError:
        file.truncate(end)
        raise


MAX_JSON_BYTES: Final = 2**28


def read_json(path: str | os.PathLike[str]) -> Any:
    """The JSON in a file.

    Raises:
        OSError: if it can't be read.
        ValueError: if it is not JSON, or too large.
    """
    return parse_json(read_json_bytes(path))


def read_json_bytes(path: str | os.PathLike[str]) -> bytes:
    """What is in a file of JSON; raises as `read_json` does."""
    with open(path, "rb") as file:
        # Asked first: a file of nothing but zeros is as long as it likes to be.
        check_json_size(os.fstat(file.fileno()).st_size)
        return file.read()


def parse_json(content: bytes, *, unique_keys: bool = False) -> Any:
    """Returns the value of a JSON text in UTF-8.

    Raises:
        ValueError: if it is none; with `unique_keys`, also if an object has one twice.
    """
    hook = _reject_repeated_keys if unique_keys else None
    try:
        return json.loads(content.decode(), object_pairs_hook=hook)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def _reject_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def check_json_size(size: int) -> None:
    """Raises a ValueError if so many bytes are too many to be read."""
    if size > MAX_JSON_BYTES:
        raise ValueError(f"it has {size:,} bytes, and {MAX_JSON_BYTES:,} are the most")


def check_fields(value: Any, types: Mapping[str, Any], name: str) -> None:
    """Raises a ValueError unless `value` is an object with fields of these types.

    A field that may be None may be missing; unknown ones are let be.
    """
    if not isinstance(value, dict):
        raise ValueError(f"`{name}` is {reprlib.repr(value)}, and must be an object")
    for key, kind in types.items():
        field = value.get(key)
        if not isinstance(field, kind) or (kind is int and isinstance(field, bool)):
            what = getattr(kind, "__name__", str(kind))
            came = reprlib.repr(field) if key in value else "missing"
            raise ValueError(f"`{name}.{key}` is {came}, and must be {what}")
