"""Workarounds for Orbax: names of folders, its log, its temporary folders."""

import contextlib
import glob
import logging
import os
import re
from collections.abc import Iterator
from typing import Final

_NOT_WRITTEN: Final = r"[][*?\\\ud800-\udfff]"
_NOT_READ: Final = r"[\\\ud800-\udfff]"


def check_name(argument: str, path: str, *, to_read: bool = False) -> None:
    """Raises a ValueError if Orbax would look for `path` in another place.

    After writing, Orbax looks for files by a glob of the full path. Tensorstore takes a
    backslash for a slash, and needs UTF-8.
    """
    pattern = _NOT_READ if to_read else _NOT_WRITTEN
    wrong = sorted(set(re.findall(pattern, path.replace(os.sep, "/"))))
    if wrong:
        raise ValueError(
            f"`{argument}`: Orbax can't {'read' if to_read else 'write'} checkpoints in"
            f" {path!r}, because there is {' and '.join(map(repr, wrong))} in the path."
            " Rename the folder, to 'lr=0.1,seed=1' say."
        )


def find_unfinished(path: str) -> list[str]:
    """Returns the temporary folders that Orbax writes to before it renames one."""
    return glob.glob(f"{glob.escape(path)}.orbax-checkpoint-tmp*")


@contextlib.contextmanager
def silence_orbax() -> Iterator[None]:
    """Hides Orbax's log of errors within the block, which are raised as well."""

    def is_of_others(record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname

    logger = logging.getLogger("absl")
    logger.addFilter(is_of_others)
    try:
        yield
    finally:
        logger.removeFilter(is_of_others)
