"""JAX's coordination service: barriers and small values between processes.

The client is no public part of JAX; here is all that the package takes of it.
"""

import json
from typing import Any

from jax._src import distributed


def is_there() -> bool:
    """Whether this is one of several processes."""
    return distributed.global_state.client is not None and count() > 1


def index() -> int:
    """Which process this is."""
    return distributed.global_state.process_id


def count() -> int:
    """How many processes there are."""
    return distributed.global_state.num_processes


def barrier(name: str, timeout: float) -> bool:
    """Waits for all processes to come to this name; False after `timeout` seconds.

    It is the same for all: none is let through that another one has given up. Each
    name is for one use.
    """
    try:
        _client().wait_at_barrier(name, max(1, int(timeout * 1000)))
    except Exception as error:  # JaxRuntimeError or ValueError, by version
        if "DEADLINE_EXCEEDED" in str(error):
            return False
        raise
    return True


def put(folder: str, value: Any) -> None:
    """Leaves a JSON value for all to read, in place of this process's older one."""
    key = f"{folder}/{index()}"
    _client().key_value_set(key, json.dumps(value), allow_overwrite=True)


def remove(folder: str) -> None:
    """Takes away what this process has left there, and nobody reads any more."""
    _client().key_value_delete(f"{folder}/{index()}")


def read_all(folder: str) -> dict[int, Any]:
    """What processes have left in a folder, by their numbers."""
    entries = _client().key_value_dir_get(folder)
    return {int(key.rpartition("/")[2]): json.loads(text) for key, text in entries}


def _client() -> Any:
    return distributed.global_state.client
