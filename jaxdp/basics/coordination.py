"""JAX's coordination service: barriers and small values between processes.

The client is no public part of JAX; here is all that the package takes of it.
"""

import functools
import json
import queue
import threading
from collections.abc import Callable
from typing import Any, Final

from jax._src import distributed

_POLL_SECONDS: Final = 0.25
"""After how many seconds at a barrier, each time, it is asked whether to give up."""


def has_peers() -> bool:
    """Whether this is one of several processes."""
    return distributed.global_state.client is not None and process_count() > 1


def process_index() -> int:
    """Which process this is."""
    return distributed.global_state.process_id


def process_count() -> int:
    """How many processes there are."""
    return distributed.global_state.num_processes


def wait_at_barrier(name: str, timeout: float, gives_up: Callable[[], bool]) -> bool:
    """Waits for all processes to come to this name; False after `timeout` seconds.

    It is the same for all: none is let through that another one has given up. Each
    name is for one use. This process gives up sooner where `gives_up`, which is asked
    several times a second: a thread waits for it, because JAX's wait can't be ended.
    """
    names, ends = _start_waiter()
    names.put((name, max(1, int(timeout * 1000))))
    reached, error = "", None
    while reached != name:  # but another one, which was given up
        try:
            reached, error = ends.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            if gives_up():
                return False
    if error is not None and "DEADLINE_EXCEEDED" not in str(error):
        raise error
    return error is None


@functools.cache
def _start_waiter() -> tuple[queue.SimpleQueue[Any], queue.SimpleQueue[Any]]:
    """Where to leave names and timeouts for the thread that waits, and how it ended."""
    names, ends = queue.SimpleQueue(), queue.SimpleQueue()

    def wait() -> None:
        while True:
            name, timeout = names.get()
            error = None
            try:
                _client().wait_at_barrier(name, timeout)
            except Exception as raised:  # JaxRuntimeError or ValueError, by version
                error = raised
            ends.put((name, error))

    threading.Thread(target=wait, name="jaxdp barriers", daemon=True).start()
    return names, ends


def put_value(folder: str, value: Any) -> None:
    """Leaves a JSON value for all to read, in place of this process's older one."""
    key = f"{folder}/{process_index()}"
    _client().key_value_set(key, json.dumps(value), allow_overwrite=True)


def delete_value(folder: str) -> None:
    """Takes away what this process has left there, and nobody reads any more."""
    _client().key_value_delete(f"{folder}/{process_index()}")


def read_values(folder: str) -> dict[int, Any]:
    """What processes have left in a folder, by their numbers."""
    entries = _client().key_value_dir_get(folder)
    return {int(key.rpartition("/")[2]): json.loads(text) for key, text in entries}


def _client() -> Any:
    return distributed.global_state.client
