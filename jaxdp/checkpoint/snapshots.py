"""What a checkpoint keeps, in one file in memory: quickly written, soon outdated.

    <path>/120, <path>/140     two at most, each named by its step
    <path>/.writing            the next one, which gets its name when it is whole

A file begins with the SHA-256 of the rest: the metadata of a checkpoint as JSON, and
the bytes of its arrays, one after the other. The older file is written over by the
next, so that memory is asked for twice, and then never again.
"""

import contextlib
import hashlib
import json
import math
import os
import stat
import threading
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, Final

import jax
import jax.numpy as jnp
import numpy as np

from ..basics.console import say
from ..basics.environment import versions
from ..basics.host_memory import is_on_host
from ..basics.json_checks import MOST_BYTES, parse_json
from ..distributed import put
from ..step import TrainState
from .leaves import arrays_of, dtype_in, name_leaves, shape_in, shapes, unname_leaves
from .metadata import FORM, FORMAT
from .restoring import check_same, corrupt
from .saving import wait_for_savings

_MAGIC: Final = b"jaxdp snapshot 1"
_HEAD: Final = len(_MAGIC) + 32 + 8
"""Bytes before the metadata: these, a SHA-256, and how long the metadata is."""

_WRITING: Final = ".writing"

_MOST_COPIED: Final = 2**28
"""Bytes of a state that is copied on the accelerator, so that nothing waits. A larger
one is brought to the host before the next step: it might not fit in there twice."""


class Snapshots:
    """The newest two snapshots of a run, in a folder of their own."""

    def __init__(self, path: str):
        self.path = path
        self._thread: threading.Thread | None = None
        self._awaits_checkpoint = self._lacks_room = False

    def steps(self) -> list[int]:
        """Those of which there is one, in ascending order."""
        try:
            return sorted(int(n) for n in os.listdir(self.path) if n.isdecimal())
        except FileNotFoundError:
            return []

    def impostors(self) -> list[int]:
        """As `CheckpointDir` has it: none, since nobody else writes here."""
        return []

    def path_of(self, step: int) -> str:
        """The file of a step."""
        return os.path.join(self.path, str(int(step)))

    def forget_after(self, step: int) -> None:
        """Removes those of later steps, which a run has not gone on from."""
        for later in self.steps():
            if later > step:
                os.unlink(self.path_of(later))

    def start(
        self, step: int, state: TrainState, meta: Callable[[], dict[str, Any]]
    ) -> None:
        """Begins one in the background, when the one before is there.

        If that waits for a checkpoint, which may take long, this one is left out.

        Args:
            step: of the state.
            state: placed; the next step may overwrite it.
            meta: gives what is kept beside it, as JSON values; called at once.
        """
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(0.01)
            if self._awaits_checkpoint:
                return
        arrays = _kept(arrays_of(state))
        described = {
            "format": FORMAT,
            "versions": versions(),
            "leaves": shapes(name_leaves(state)),
            "fingerprints": {},
            **meta(),
        }
        content = json.dumps(described).encode()
        thread = threading.Thread(
            target=self._write, args=(step, content, arrays), name="jaxdp snapshot"
        )
        try:
            thread.start()
            self._thread = thread
        except RuntimeError:  # there can't be more of them
            self._write(step, content, arrays)

    def finish(self) -> None:
        """Waits until the one that is being written is there."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, step: int, content: bytes, arrays: Mapping[str, Any]) -> None:
        temporary = os.path.join(self.path, _WRITING)
        try:
            if len(known := self.steps()) > 1:
                os.replace(self.path_of(known[0]), temporary)
            with open(temporary, "r+b" if known[1:] else "wb", buffering=0) as file:
                _fill(file, content, arrays)
            self._awaits_checkpoint = True
            wait_for_savings()  # it knows of the checkpoints that began before it
            self._awaits_checkpoint = False
            os.replace(temporary, self.path_of(step))
            self._lacks_room = False
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            if not self._lacks_room:
                say(
                    f"no snapshot of step {step} was taken: {error}. Training"
                    " continues, and the next snapshot is tried."
                )
            self._lacks_room = True
        except RuntimeError as error:  # of the device: the next step tells more
            say(f"no snapshot of step {step} was taken: {error}")


def _kept(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Copies that the next step does not overwrite. Where they are small it is not
    waited for."""
    leaves = list(arrays.values())
    on_cpu = jax.default_backend() == "cpu"
    is_small = on_cpu or sum(leaf.nbytes for leaf in leaves) <= _MOST_COPIED
    if is_small and not any(map(is_on_host, leaves)):
        return dict(zip(arrays, _copied(leaves), strict=True))
    return {name: np.array(leaf) for name, leaf in arrays.items()}


@jax.jit
def _copied(leaves: list[Any]) -> list[Any]:
    return [jnp.copy(leaf) for leaf in leaves]


def _fill(file: BinaryIO, content: bytes, arrays: Mapping[str, Any]) -> None:
    """Writes a snapshot over whatever is in a file."""
    size = _HEAD + len(content) + sum(array.nbytes for array in arrays.values())
    file.truncate(size)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)  # is there room for all of it?

    digest = hashlib.sha256()
    file.seek(_HEAD - 8)
    for part in (len(content).to_bytes(8, "little"), content, *arrays.values()):
        if not isinstance(part, bytes):
            array = np.ascontiguousarray(part)  # waits for the device, in the thread
            part = array.reshape(-1).view(np.uint8).data
        digest.update(part)
        _write_all(file, part)
    file.seek(0)
    _write_all(file, _MAGIC + digest.digest())


def _write_all(file: BinaryIO, data: Any) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def is_snapshot(path: str | os.PathLike[str]) -> bool:
    """Whether there is a file that calls itself one; a checkpoint is a folder."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def restore_snapshot(
    path: str | os.PathLike[str],
    like: Callable[[Mapping[str, tuple[int, ...]]], TrainState],
    take_up: Callable[[dict[str, Any]], None],
) -> tuple[TrainState, dict[str, Any]]:
    """What `restore` does for a checkpoint.

    Raises:
        FileNotFoundError, CheckpointCorrupt, ValueError: as `restore` does.
    """
    path = os.path.abspath(path)
    meta, arrays = _read(path)
    state = like({name: shape_in(text) for name, text in meta["leaves"].items()})
    check_same(path, shapes(name_leaves(state)), meta["leaves"])
    take_up(meta)

    wanted = arrays_of(state)
    placed = {name: put(arrays[name], leaf.sharding) for name, leaf in wanted.items()}
    return unname_leaves(placed, state), meta


def _read(path: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The metadata and arrays of a snapshot, whole and of this user."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise corrupt(path, "it is not a file of yours")
        head = file.read(_HEAD)
        digest = hashlib.sha256(head[-8:])
        length = int.from_bytes(head[-8:], "little")
        if not head.startswith(_MAGIC) or length > min(MOST_BYTES, status.st_size):
            raise corrupt(path, "it does not begin as a snapshot does")
        digest.update(content := file.read(length))
        try:
            meta = parse_json(content)
            FORM(meta, "metadata")
        except ValueError as error:
            raise corrupt(path, f"its metadata can't be read: {error}") from error

        arrays = {}
        for name, text in meta["leaves"].items():
            dtype, shape = dtype_in(text), shape_in(text)
            if (size := math.prod(shape) * dtype.itemsize) > status.st_size:
                raise corrupt(path, f"{name} in it is larger than the file")
            if size:
                read = np.empty(size, np.uint8)
                file.readinto(read.data)
                digest.update(read.data)
                arrays[name] = read.view(dtype).reshape(shape)
    if digest.digest() != head[len(_MAGIC) : -8]:
        raise corrupt(path, "it has changed since it was written (its SHA-256 differs)")
    return meta, arrays
