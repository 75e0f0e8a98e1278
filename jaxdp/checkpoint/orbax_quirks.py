"""What Orbax has to be helped with: names of folders, its log, what it has not written.

It looks for the parts of what it has written by a glob with the whole path in it, and
Tensorstore takes a backslash for a slash and wants UTF-8. So with `runs/seed=[1]/9`
every save would look well, and nothing could ever be read. Such a folder is passed to
them by another name: that of a link which lives as long as the reading or the writing.
Parents are why a plain name beside it would be no help.
"""

import collections
import contextlib
import glob
import json
import logging
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

_MISREAD: Final = r"[*?\[\]]" if os.sep == "\\" else r"[*?\[\]\\]"
_ZARRAY: Final = ".zarray"


def is_misread(path: str) -> bool:
    """Whether Orbax would look for `path` elsewhere."""
    try:
        path.encode()
    except UnicodeEncodeError:  # bytes that are no UTF-8
        return True
    return re.search(_MISREAD, path) is not None


@contextlib.contextmanager
def as_orbax_reads(folder: str) -> Iterator[str]:
    """A path to `folder` that means it to Orbax, too: most often `folder` itself.

    Raises:
        OSError: if no link to it can be made.
    """
    if not is_misread(folder):
        yield folder
        return
    if is_misread(tempfile.gettempdir()):
        raise OSError(
            f"Orbax can't write to {folder!r} because of its name, and no link to"
            f" it can be made in {tempfile.gettempdir()!r}; set TMPDIR to a folder"
            " without any of * ? [ ] and backslashes"
        )
    with tempfile.TemporaryDirectory(prefix="jaxdp-") as here:
        link = os.path.join(here, "checkpoints")
        os.symlink(folder, link, target_is_directory=True)
        yield link


def as_orbax_writes(path: str) -> str:
    """What Orbax may call the folder that is to be `path`: most often that."""
    folder, name = os.path.split(path)
    if not is_misread(name):
        return path
    printable = name.encode(errors="replace").decode()
    return os.path.join(folder, f"{re.sub(_MISREAD, '_', printable)}.unnamed")


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
    """Arrays of `shapes` that Orbax has not wholly written to `folder`.

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
