"""Connections between processes, a line of JSON for each message."""

import contextlib
import json
import socket
import threading
import time
from typing import Any, Final

from ..basics.json_checks import parse_json

_MOST_BYTES: Final = 2**16
"""Of a message. Who sends more is none of us."""

Message = dict[str, Any]


class Connection:
    """Messages over a socket.

    Attributes:
        heard: when something came last, by `time.monotonic`.
    """

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.heard = time.monotonic()
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
