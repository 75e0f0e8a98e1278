"""Connections between processes, a line of JSON for each message; and strangers."""

import contextlib
import errno
import json
import os
import selectors
import socket
import threading
import time
from typing import Any, Final

from ..basics.json_checks import parse_json

_MOST_BYTES: Final = 2**16
"""Of a message. Who sends more is none of us."""

MOST_STRANGERS: Final = 64
"""Callers at a time that have shown no card, beside those that are awaited."""

_SILENCE: Final = 5.0
"""Seconds in which a card must have been shown; ours do it at once."""

_OTHER_FILES: Final = 32
"""That JAX may need, beside one for each process."""

Message = dict[str, Any]


class Connection:
    """Messages over a socket.

    Attributes:
        since: when it began, by `time.monotonic`.
        heard: when something came last.
    """

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.since = self.heard = time.monotonic()
        self._buffer = b""
        self._lock = threading.Lock()
        sock.settimeout(5.0)

    def send(self, message: Message) -> None:
        """Sends, or does nothing if the other side is gone: reading tells that."""
        with self._lock, contextlib.suppress(OSError):
            self.sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """What has come, or None if no more can. Waits for something to come."""
        try:
            data = self.sock.recv(_MOST_BYTES)
        except TimeoutError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self.heard = time.monotonic()
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        try:
            messages = [parse_json(line, _MOST_BYTES) for line in lines]
        except ValueError:
            return None
        is_ours = all(isinstance(message, dict) for message in messages)
        return messages if is_ours and len(self._buffer) <= _MOST_BYTES else None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.close()


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


def check_room(process: int, count: int) -> None:
    """Raises an OSError unless a process may open the files that it will need.

    Each connection is one, and JAX ends a process that lacks some without saying why.

    Args:
        process: which one this is. Process 0 is connected to all others twice, and has
            room for strangers.
        count: how many there are.
    """
    needed = _OTHER_FILES + (0 if process else 2 * count + MOST_STRANGERS)
    opened: list[int] = []
    try:
        for _ in range(needed):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise OSError(
            error.errno,
            f"process {process} of {count} can open {len(opened)} of the {needed} files"
            f" that it needs to be connected to the others ({error.strerror});"
            f" {_limit()}. Raise the limit before it starts, with `ulimit -n 65536` in"
            " its shell or LimitNOFILE of its service.",
        ) from error
    finally:
        for each in opened:
            os.close(each)


def _limit() -> str:
    import resource  # which Windows has not, nor such limits

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"its limit is {soft}, and may be raised to {hard}"
