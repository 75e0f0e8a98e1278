"""Whether the files of a checkpoint are those that were saved.

`files.json` has the SHA-256 of each of them. The SHA-256 of that list is the digest of
the checkpoint.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any, Final

from ..basics.console import some_of
from ..basics.files import parse_json, read_bytes

_LIST: Final = "files.json"
_METADATA: Final = os.path.join("meta", "metadata")


def write_list(path: str) -> None:
    """Lists the files of the checkpoint `path`."""
    sums = {name: _sum_of(path, name) for name in _files(path)}
    with open(os.path.join(path, _LIST), "w", encoding="utf-8") as file:
        json.dump(sums, file, indent=0, sort_keys=True)


def read_metadata(path: str) -> tuple[Any, str]:
    """The metadata of a checkpoint as it was saved, and the checkpoint's digest.

    Raises:
        OSError, ValueError: if they can't be read, or were changed.
    """
    listed, digest = _read_list(path)
    content = read_bytes(os.path.join(path, _METADATA))
    if hashlib.sha256(content).hexdigest() != listed.get(_METADATA):
        raise ValueError(f"{_METADATA} has changed since it was saved")
    return parse_json(content), digest


def check_files(path: str) -> None:
    """Raises a ValueError that names the files which changed, are missing or new.

    Those that are not listed are not read.
    """
    listed, _ = _read_list(path)
    there = set(_files(path))
    known = there & listed.keys()
    changed = {name for name in known if _sum_of(path, name) != listed[name]}
    if changed := changed | (there ^ listed.keys()):
        names = some_of(sorted(changed))
        raise ValueError(f"changed since it was saved, or missing: {names}")


def _read_list(path: str) -> tuple[dict[str, str], str]:
    content = read_bytes(os.path.join(path, _LIST))
    listed = parse_json(content)
    if not isinstance(listed, dict):
        raise ValueError(f"{_LIST} is not a list of files")
    return listed, hashlib.sha256(content).hexdigest()


def _sum_of(path: str, name: str) -> str:
    with open(os.path.join(path, name), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(path: str) -> Iterator[str]:
    for item in ("state", "meta"):
        for folder, _, files in os.walk(os.path.join(path, item)):
            for name in files:
                yield os.path.relpath(os.path.join(folder, name), path)
