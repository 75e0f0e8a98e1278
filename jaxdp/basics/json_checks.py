"""JSON that comes from elsewhere: read up to a size, its fields of known types."""

import json
import os
import reprlib
from collections.abc import Mapping
from typing import Any, Final

MOST_BYTES: Final = 2**28


def read_json(path: str | os.PathLike[str]) -> Any:
    """The JSON in a file.

    Raises:
        OSError: if it can't be read.
        ValueError: if it is not JSON, or too large.
    """
    return parse_json(read_bytes(path))


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """What is in a file of JSON; raises as `read_json` does."""
    with open(path, "rb") as file:
        # Asked first: a file of nothing but zeros is as long as it likes to be.
        check_size(os.fstat(file.fileno()).st_size)
        return file.read()


def parse_json(content: bytes) -> Any:
    """The value of a JSON text in UTF-8, or a ValueError."""
    try:
        return json.loads(content.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def check_size(size: int) -> None:
    """Raises a ValueError if so many bytes are too many to be read."""
    if size > MOST_BYTES:
        raise ValueError(f"it has {size:,} bytes, and {MOST_BYTES:,} are the most")


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
