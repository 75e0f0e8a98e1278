"""JAX's coordination service: barriers and small values between processes.

Its client is no public part of JAX. Only this module uses it.
"""

import functools
import json
import queue
import threading
from collections.abc import Callable
from typing import Any, Final

from jax._src import distributed

_POLL_SECONDS: Final = 0.25
"""The seconds between two calls of `gives_up` at a barrier."""


def has_peers() -> bool:
    """Returns True if this is one of several processes."""
    return distributed.global_state.client is not None and process_count() > 1


def process_index() -> int:
    """Returns the number of this process."""
    return distributed.global_state.process_id


def process_count() -> int:
    """Returns the number of processes."""
    return distributed.global_state.num_processes


def wait_at_barrier(name: str, timeout: float, gives_up: Callable[[], bool]) -> bool:
    """Waits until all processes wait at this name; returns False after `timeout` s.

    All processes get the same result. Each name can be used once. This process gives up
    sooner if `gives_up()`, which is called several times a second. A thread does the
    waiting, because JAX's wait can't be interrupted.
    """
    names, ends = _start_waiter()
    names.put((name, max(1, int(timeout * 1000))))
    reached, error = "", None
    while reached != name:  # an earlier one, which was given up, may come first
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
    """Starts the waiting thread; returns its queues of names and of results."""
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
    """Publishes a JSON value of this process, in place of its older one."""
    key = f"{folder}/{process_index()}"
    _client().key_value_set(key, json.dumps(value), allow_overwrite=True)


def delete_value(folder: str) -> None:
    """Deletes the value of this process."""
    _client().key_value_delete(f"{folder}/{process_index()}")


def read_values(folder: str) -> dict[int, Any]:
    """Reads the values of a folder, by process."""
    entries = _client().key_value_dir_get(folder)
    return {int(key.rpartition("/")[2]): json.loads(text) for key, text in entries}


def _client() -> Any:
    return distributed.global_state.client
