"""What Orbax needs help with: names of folders, its log, what it has not written."""

import collections
import contextlib
import glob
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

_ZARRAY: Final = ".zarray"


def check_path(argument: str, path: str, unfit: str = "*?[]\\") -> None:
    """Raises a ValueError for a path that Orbax would take for another one.

    It looks for the parts of what it has written by a glob with the whole path in it,
    and Tensorstore takes a backslash for a slash and wants UTF-8: every save would look
    well, and nothing could ever be read.
    """
    bytes_that_are_no_text = any("\ud800" <= letter <= "\udfff" for letter in path)
    if bytes_that_are_no_text or set(path.replace(os.sep, "/")) & set(unfit):
        raise ValueError(
            f"`{argument}`: Orbax, which writes and reads checkpoints, takes the path"
            f" {path!r} for another one. Rename the folder, or pass one whose path is"
            f" plain text without any of {' '.join(unfit)}."
        )


def unfinished(path: str) -> list[str]:
    """The folders that Orbax writes to before one of them is `path`."""
    return glob.glob(f"{glob.escape(path)}.orbax-checkpoint-tmp*")


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """What Orbax logs meanwhile of an error, the error that is raised says, too."""

    def is_of_others(record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname

    logger = logging.getLogger("absl")
    logger.addFilter(is_of_others)
    try:
        yield
    finally:
        logger.removeFilter(is_of_others)


def unreadable(folder: str, shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Those of the arrays of `shapes` that Orbax has not wholly written to `folder`.

    Takes milliseconds: it reads what there is of them, and no array.
    """
    import tensorstore

    base = {"driver": "file", "path": os.path.join(folder, "")}
    tree = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    entries = [key.decode().rpartition("/") for key in tree.list().result()]
    chunks = collections.Counter(name for name, _, last in entries if last != _ZARRAY)
    headers = {
        name: tree.read(f"{name}/{_ZARRAY}")
        for name, _, last in entries
        if last == _ZARRAY
    }

    def is_whole(name: str, shape: Sequence[int]) -> bool:
        if name not in headers:
            return False
        header = json.loads(headers[name].result().value)
        grid = (-(-n // m) for n, m in zip(shape, header["chunks"], strict=True))
        return header["shape"] == list(shape) and chunks[name] == math.prod(grid)

    return [name for name, shape in shapes.items() if not is_whole(name, shape)]
