"""The metadata of a checkpoint, and the digests of its files.

Callbacks read their own states in the metadata; `Progress` reads those of loaders
(`source`, `place`, `validation`). `files.json` has the SHA-256 of every file. The
SHA-256 of that list is the digest of the checkpoint.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

from ..basics.console import join_numbers, join_some
from ..basics.environment import get_versions
from ..basics.files import check_fields, expand_path, parse_json, read_json
from .orbax_quirks import check_name

FORMAT: Final = 3
"""Version of the layout on disk."""

FORMATS: Final = (2, FORMAT)
"""The formats that are read. Format 2, of jaxdp 0.2, has a digest and fingerprints
beside `files.json`."""

_SCHEMA: Final = {
    "versions": dict,
    "leaves": dict,
    "run_id": str,
    "global_step": int,
    "current_epoch": int,
    "batches_done": int,
    "batches_seen": int,
    "examples_seen": int,
    "source": object,
    "place": object,
    "validation": object,
    "after": int | None,
    "epoch_ended": bool,
    "val_metrics": dict,
    "validated_at": int,
    "logged": dict | None,  # None: not in checkpoints of 0.2
    "history": dict,
    "callbacks": dict,
    "identities": dict,
    "padded_rows": list,
    "arguments": dict | None,
    "evaluated": dict | None,
    "beside_adapters": dict | None,  # [what, fingerprint] of what was left out
}

_LIST: Final = "files.json"
_METADATA: Final = os.path.join("meta", "metadata")


class CheckpointCorrupt(ValueError):
    """A checkpoint is incomplete or damaged: it is not what was saved."""


def check_schema(meta: Any) -> None:
    """Raises a ValueError unless this is the metadata that a trainer saves."""
    check_fields(meta, _SCHEMA, "metadata")
    # File names contain it.
    if not re.fullmatch("[0-9a-f]{32}", meta["run_id"]):
        raise ValueError("`metadata.run_id` must be 32 hexadecimal digits")


def list_files_of_process(path: str, process: int) -> None:
    """Writes a list of the files that one process has written, with their SHA-256.

    The folder `state` may still have a temporary name.
    """
    states = [e.path for e in os.scandir(path) if e.name.startswith("state")]
    sums: dict[str, str] = {}
    for state in states:
        own = _hash_files(state, _list_files(state, f"ocdbt.process_{process}"))
        sums |= {os.path.join("state", name): own[name] for name in own}
    _write_hashes(os.path.join(path, f"{process}.{_LIST}"), sums)


def write_file_list(path: str) -> None:
    """Writes the list of all files of a checkpoint, with their SHA-256.

    It takes in the list that each process wrote, and deletes those lists.
    """
    sums: dict[str, str] = {}
    for entry in list(os.scandir(path)):
        if entry.name.endswith(f".{_LIST}"):
            sums |= read_json(entry.path)
            os.unlink(entry.path)
    rest = [name for name in _list_files(path) if name not in sums]
    _write_hashes(os.path.join(path, _LIST), sums | _hash_files(path, rest))


def read_meta(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the metadata of a checkpoint, after checking its format.

    Raises:
        FileNotFoundError, CheckpointCorrupt, ValueError: as `restore` does.
    """
    return read_sealed(expand_path(path))[0]


def read_sealed(path: str) -> tuple[dict[str, Any], str]:
    """Returns the metadata of a checkpoint, and the digest of the checkpoint."""
    _check_is_checkpoint(path)
    try:
        listed, digest = _read_file_list(path)
        with open(os.path.join(path, _METADATA), "rb") as file:
            content = file.read()
        if hashlib.sha256(content).hexdigest() != listed.get(_METADATA):
            raise ValueError(f"{_METADATA} has changed since it was saved")
        meta = parse_json(content)
        check_fields(meta, {"format": int}, "metadata")
    except (OSError, ValueError) as error:
        raise _make_corrupt(path, str(error)) from error
    if meta["format"] not in FORMATS:
        raise ValueError(
            f"`path`: {path} has format {meta['format']}, and jaxdp"
            f" {get_versions().get('jaxdp')} reads {join_numbers('format', FORMATS)}."
            " Use the version that wrote it. (0.2 reads what 0.1 wrote.)"
        )
    try:
        check_schema(meta)
    except ValueError as error:
        raise _make_corrupt(
            path, f"no trainer has saved its metadata: {error}"
        ) from error
    return meta, digest


def check_files(path: str, process: int = 0, num_processes: int = 1) -> None:
    """Raises if files differ from those that were saved, and names these files.

    Args:
        path: the checkpoint.
        process: the index of this process, which reads a part of the files.
        num_processes: how many processes share the files.
    """
    try:
        listed, _ = _read_file_list(path)
        files = set(_list_files(path))
        # Unlisted files are not read.
        own = sorted(files & listed.keys())[process::num_processes]
        sums = _hash_files(path, own)
        changed = {name for name in own if sums[name] != listed[name]}
    except (OSError, ValueError) as error:
        raise _make_corrupt(path, str(error)) from error
    if changed := changed | (files ^ listed.keys()):
        names = join_some(sorted(changed))
        raise _make_corrupt(path, f"changed since it was saved, or missing: {names}")


def _check_is_checkpoint(path: str) -> None:
    check_name("path", path)
    inside = sorted(os.listdir(path)) if os.path.isdir(path) else []
    if not {"state", "meta"} <= set(inside):
        steps, hint = sorted(filter(str.isdecimal, inside), key=int), ""
        if steps:
            hint = (
                f" It has checkpoints in it: {', '.join(steps[-20:])}. Pass"
                f" {os.path.join(path, steps[-1])}; or, to resume from the newest,"
                f" fit(..., ckpt_path='auto') with a ModelCheckpoint({path!r})."
            )
        raise FileNotFoundError(
            f"`path`: there is no checkpoint at {path} (a folder with `state` and"
            f" `meta` in it).{hint}"
        )


def _make_corrupt(path: str, how: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"`path`: the checkpoint {path} is damaged: {how}.")


def _read_file_list(path: str) -> tuple[dict[str, str], str]:
    with open(os.path.join(path, _LIST), "rb") as file:
        content = file.read()
    listed = parse_json(content)
    if not isinstance(listed, dict):
        raise ValueError(f"{_LIST} is not a list of files")
    return listed, hashlib.sha256(content).hexdigest()


def _hash_files(path: str, names: Iterable[str]) -> dict[str, str]:
    sums = {}
    for name in names:
        with open(os.path.join(path, name), "rb") as file:
            sums[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def _write_hashes(path: str, sums: dict[str, str]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(sums, file, indent=0, sort_keys=True)


def _list_files(path: str, *items: str) -> Iterator[str]:
    """Yields the files in these folders of `path`; by default those of a checkpoint."""
    for item in items or ("state", "meta"):
        for folder, _, files in os.walk(os.path.join(path, item)):
            for name in files:
                yield os.path.relpath(os.path.join(folder, name), path)
