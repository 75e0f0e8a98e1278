"""Workarounds for Orbax: names of folders, and its temporary folders."""

import glob
import os
import re


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
