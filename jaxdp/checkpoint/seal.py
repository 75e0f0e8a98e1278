"""Whether the files of a checkpoint are those that its `files.json` lists."""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Final

from ..basics.json_checks import Form, by_name, read_json, text
from .leaves import shape_in

_LIST: Final = "files.json"

_LISTED: Final[Form] = by_name(text("[0-9a-f]{64}", "64 hexadecimal digits"))

_BYTES_EACH: Final = 16
"""Of the largest kind of number there is."""

_MORE_BYTES: Final = 2**26
_MORE_BYTES_PER_ARRAY: Final = 2**20
"""What Orbax may need to describe arrays; thousands of devices take some space."""


def write_list(path: str) -> None:
    """Lists the files of the checkpoint `path`."""
    sums = {name: _sum_of(path, name) for name in _files(path)}
    with open(os.path.join(path, _LIST), "w", encoding="utf-8") as file:
        json.dump(sums, file, indent=0, sort_keys=True)


def read_list(path: str) -> dict[str, str]:
    """The SHA-256 of every file that was saved, by its path in the checkpoint `path`.

    Raises:
        OSError, ValueError: if they can't be read.
    """
    listed = read_json(os.path.join(path, _LIST))
    _LISTED(listed, _LIST)
    return listed


def changed_files(
    path: str, listed: Mapping[str, str], arrays: Mapping[str, str]
) -> list[str]:
    """Which files of a checkpoint are not what they were, are missing or are new.

    Those that are not listed are not read, nor any if they are larger than the `arrays`
    (dtypes and shapes by name) can be.
    """
    sizes: dict[str, int] = {}
    for name in _files(path):
        if name not in listed:
            return [name]
        sizes[name] = os.lstat(os.path.join(path, name)).st_size
    if missing := sorted(listed.keys() - sizes.keys()):
        return missing
    most = _MORE_BYTES + sum(map(_most_bytes, arrays.values()))
    if sum(sizes.values()) > most:
        largest = max(sizes, key=lambda name: sizes[name])
        return [f"{largest} ({sizes[largest]:,} bytes, more than all can have)"]
    return sorted(name for name in sizes if _sum_of(path, name) != listed[name])


def _sum_of(path: str, name: str) -> str:
    with open(os.path.join(path, name), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(path: str) -> Iterator[str]:
    for item in ("state", "meta"):
        for folder, _, files in os.walk(os.path.join(path, item)):
            for name in files:
                yield os.path.relpath(os.path.join(folder, name), path)


def _most_bytes(array: str) -> int:
    return _MORE_BYTES_PER_ARRAY + _BYTES_EACH * math.prod(shape_in(array))
