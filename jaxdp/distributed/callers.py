"""Who calls a process of a job, strangers included, and what they may say."""

import errno
import os
import selectors
import socket
import time
from typing import Any, Final

from ..basics.json_checks import by_name, fields, has_form, maybe, text, whole

_LINE: Final = text(r"[^\x00-\x1f\x7f]{0,300}", "a line of text")

_CARD: Final = fields(
    {
        "jaxdp": whole(1, 1),
        "job": text(),
        "process": whole(),
        "of": whole(1),
        "name": _LINE,
        "facts": by_name(_LINE),
    }
)

_ANSWER: Final = fields(
    {"wrong": text(), "missing": text(), "names": by_name(_LINE), "port": whole()}
)

_MESSAGE: Final = fields(
    {"from": whole()},
    {
        "at": text(),
        "done": text(),
        "dead": whole(),
        "text": text(),
        "failed": text(),
        "fit": maybe(whole()),
    },
)

MOST_STRANGERS: Final = 64
"""Callers at a time that have shown no card, beside those that are awaited."""

_SILENCE: Final = 5.0
"""Seconds in which a card must have been shown; ours do it at once."""

_SHORTAGES: Final = errno.EMFILE, errno.ENFILE

_OTHER_FILES: Final = 32
"""That JAX may need, beside one for each process."""


def is_card(card: Any) -> bool:
    """Whether it is a process like this one that has called."""
    return has_form(card, _CARD) and card["process"] < card["of"]


def is_answer(answer: Any, count: int) -> bool:
    """Whether process 0 of so many may have said this when all were there."""
    if not has_form(answer, _ANSWER):
        return False
    is_refusal = answer["wrong"] or answer["missing"]
    return bool(is_refusal) or set(answer["names"]) == set(map(str, range(count)))


def is_message(message: Any) -> bool:
    """Whether a process may tell this while it runs."""
    return has_form(message, _MESSAGE)


def check_room(process: int, count: int) -> None:
    """Raises an OSError unless a process may open the files that it will need.

    Each connection is one, and JAX ends a process that lacks some without saying why.

    Args:
        process: which one this is. Process 0 is connected to all others twice.
        count: how many there are.
    """
    needed = _OTHER_FILES + (0 if process else 2 * count)
    opened: list[int] = []
    try:
        for _ in range(needed):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno not in _SHORTAGES:
            raise
        few = f"{len(opened)} of the {needed} files"
        raise _no_room(process, count, error, few) from error
    finally:
        for each in opened:
            os.close(each)


def accepted(listener: socket.socket, count: int) -> socket.socket | None:
    """Who calls process 0 of so many; None if it has given up meanwhile."""
    try:
        return listener.accept()[0]
    except OSError as error:
        if error.errno in _SHORTAGES:
            raise _no_room(0, count, error, "no more of the files") from error
        return None


def hang_up(selector: selectors.BaseSelector, most: int) -> None:
    """Closes connections of those who call and show no card, or are too many.

    Args:
        selector: has them, each with its `Connection`.
        most: how many may stay; the latest do.
    """
    keys = [key for key in selector.get_map().values() if key.data is not None]
    keys.sort(key=lambda key: key.data.since)
    now = time.monotonic()
    for place, key in enumerate(keys):
        if place < len(keys) - most or now - key.data.since > _SILENCE:
            selector.unregister(key.fileobj)
            key.data.close()


def _no_room(process: int, count: int, error: OSError, few: str) -> OSError:
    return OSError(
        error.errno,
        f"process {process} of {count} can open {few} that it needs to be connected to"
        f" the others ({error.strerror}){_limit()}. Raise the limit before it starts,"
        " with `ulimit -n 65536` in its shell or LimitNOFILE of its service.",
    )


def _limit() -> str:
    try:
        import resource
    except ImportError:  # Windows
        return ""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"; its limit is {soft}, and may be raised to {hard}"
