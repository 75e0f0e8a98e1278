"""JAX's coordination service: barriers and small values between processes.

Its client is no public part of JAX. Only this module uses it.
"""

import concurrent.futures
import functools
import json
from collections.abc import Callable
from typing import Any, Final

import jax
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

    JAX gives all processes the same result. This one stops waiting sooner, and returns
    False, when `gives_up()` is True; it is asked several times a second. Each name can
    be used once.
    """
    wait, milliseconds = _client().wait_at_barrier, max(1, int(timeout * 1000))
    future = _get_waiter().submit(wait, name, milliseconds)
    while True:
        try:
            future.result(_POLL_SECONDS)
            return True
        except TimeoutError:  # from `result`; JAX's timeouts have another class
            if gives_up():
                return False
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # by JAX's version
            if "DEADLINE_EXCEEDED" in str(error):
                return False
            raise


@functools.cache
def _get_waiter() -> concurrent.futures.Executor:
    """Returns the thread that waits, because JAX's wait can't be interrupted."""
    return concurrent.futures.ThreadPoolExecutor(1, "jaxdp barriers")


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
