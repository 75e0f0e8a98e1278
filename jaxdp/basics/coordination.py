"""JAX's coordination service: barriers and short texts between processes.

The client is no public part of JAX; here is all that the package takes of it.
"""

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
    """Waits for all processes to come to this name; False if not all did in time.

    It is the same for all: none is let through that another one has given up. Each
    name is for one use.

    Args:
        timeout: seconds.
    """
    try:
        _client().wait_at_barrier(name, max(1, int(timeout * 1000)))
    except Exception as error:  # JaxRuntimeError or ValueError, by version
        if "DEADLINE_EXCEEDED" in str(error):
            return False
        raise
    return True


def put(key: str, text: str) -> None:
    """Leaves a text for all processes to read, in place of an older one."""
    _client().key_value_set(key, text, allow_overwrite=True)


def remove(key: str) -> None:
    """Takes a text away that nobody reads any more."""
    _client().key_value_delete(key)


def read_all(folder: str) -> dict[str, str]:
    """The texts whose keys begin with `folder` and a slash, by the rest of the key."""
    found = _client().key_value_dir_get(folder)
    return {key.rpartition("/")[2]: text for key, text in found}


def _client() -> Any:
    return distributed.global_state.client
