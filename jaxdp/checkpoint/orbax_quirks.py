"""Workarounds for Orbax: names of folders, its log, its temporary folders."""

import contextlib
import glob
import logging
import os
import re
from collections.abc import Iterator


def check_name(argument: str, path: str) -> None:
    """Raises a ValueError if Orbax would look for `path` in another place.

    After writing, Orbax looks for files by a glob of the full path. Tensorstore takes a
    backslash for a slash, and needs UTF-8.
    """
    wrong = set(re.findall(r"[][*?\\\ud800-\udfff]", path.replace(os.sep, "/")))
    if wrong:
        raise ValueError(
            f"`{argument}`: Orbax can't write checkpoints in {path!r}, because there is"
            f" {' and '.join(map(repr, sorted(wrong)))} in the path. Rename the folder,"
            " to 'lr=0.1,seed=1' say."
        )


def find_unfinished(path: str) -> list[str]:
    """Returns the temporary folders that Orbax writes to before it renames one."""
    return glob.glob(f"{glob.escape(path)}.orbax-checkpoint-tmp*")


@contextlib.contextmanager
def silence_orbax() -> Iterator[None]:
    """Hides, in the block, Orbax's log of errors that it also raises.

    On a full disk this log has some 600 lines.
    """

    def is_of_others(record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname

    logger = logging.getLogger("absl")
    logger.addFilter(is_of_others)
    try:
        yield
    finally:
        logger.removeFilter(is_of_others)
