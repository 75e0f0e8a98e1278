"""Compiled steps, kept beside checkpoints: who goes on from one has the same program.

    <folder of checkpoints>/programs/<name>     one file for each step

A file is a line of JSON, which says what the program was compiled for; a line with the
SHA-256 of that and the program, and a signature of it; and the program, as JAX pickles
it. To load a program is to run code, so a signature is asked for first, made with a key
that only this user can read. What others have signed, or nobody, is not looked into,
unless `JAXDP_TRUST_PROGRAMS=1` says that whoever can write there is trusted.
"""

import collections
import contextlib
import hashlib
import hmac
import json
import os
import pathlib
import re
import secrets
import stat
import tempfile
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Final

import jax
from jax.experimental import serialize_executable
from jaxlib.version import __version__ as jaxlib_version

from ..basics.console import say, warn
from ..basics.files import replacing
from ..basics.process import cache_home, processor
from ..distributed import Processes

_FOLDER: Final = "programs"
_SWITCH: Final = "JAXDP_TRUST_PROGRAMS"
_NAME: Final = re.compile(r"[0-9a-f]{32}")
_UNFINISHED: Final = re.compile(r"\.[0-9a-f]{32}\.\d+")
_MOST_FILES: Final = 32
_MOST_BYTES: Final = 2**28
"""What is kept beside the checkpoints of a folder, of which the oldest go, and how
large each may be."""

_CALLS_BACK: Final = re.compile(r"custom_call @\w*callback|stablehlo\.(send|recv)\b")
"""A program that calls Python, which is not in what JAX makes of it."""

_CACHE_HIT: Final = "/jax/compilation_cache/cache_hits"
_IS_HEARD: Final = "/jaxdp/is_heard"
_events: Final[collections.Counter[str]] = collections.Counter()

_NO_LINKS: Final = (
    os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
)

_KEY_OF_THIS_PROCESS: Final = secrets.token_bytes(32)


class KeptPrograms:
    """Compiles steps, or takes those kept beside a checkpoint. One process writes."""

    def __init__(self, processes: Processes):
        self._processes = processes
        self._path = ""  # of the folder that was looked in last
        self._found: dict[str, bytes] = {}  # files
        self._told: set[str] = set()
        self._in_use: weakref.WeakValueDictionary[str, Any] = (
            weakref.WeakValueDictionary()
        )
        self._loaded: dict[str, bytes] = {}  # of those in use
        self._made_for: dict[str, bytes] = {}  # the line of each in use
        self._written: set[tuple[str, str]] = set()
        self._thread: threading.Thread | None = None

    def compile(
        self, lowered: Any, options: dict[str, Any], devices: Sequence[Any]
    ) -> jax.stages.Compiled:
        """`lowered.compile(options)`, or the same program as it is kept."""
        text = lowered.as_text()
        made_for = {
            "program": hashlib.sha256(text.encode()).hexdigest(),
            "options": {name: str(value) for name, value in options.items()},
            **_here(devices),
        }
        line = json.dumps(made_for, sort_keys=True).encode() + b"\n"
        name = _name(line)
        compiled = self._kept(name, lowered, devices)
        if compiled is None:
            # Where some are in use here, this is one more shape.
            if self._found and self._found.keys().isdisjoint(self._made_for):
                self._tell(
                    "a step is compiled again, and last bits may differ from before:"
                    f" the programs kept in {self._path} are of other code, shapes,"
                    " options, devices or versions"
                )
            hits = _cache_hits()
            compiled = lowered.compile(options)
            # A program that XLA has loaded for a CPU it can't write whole again.
            if _CALLS_BACK.search(text) or (
                devices[0].platform == "cpu" and _cache_hits() > hits
            ):
                return compiled
        self._in_use[name], self._made_for[name] = compiled, line
        return compiled

    def look_in(self, folder: str) -> None:
        """Takes what is kept in a folder of checkpoints, from now on.

        All processes call this, and take what all can read.
        """
        self._path, self._found = os.path.join(folder, _FOLDER), {}
        self._told.clear()
        key, foreign = _key(), 0
        for path in _files(self._path)[:_MOST_FILES]:
            try:
                content, is_ours = _read(path, key)
            except (OSError, ValueError) as error:
                warn(f"{path}, a compiled step, is skipped: {error}.")
                continue
            if is_ours or os.environ.get(_SWITCH) == "1":
                self._found[path.name] = content
                self._written.add((folder, path.name))
            else:
                foreign += 1

        if foreign:
            say(
                f"{foreign} of the compiled steps kept in {self._path} are not"
                " used: they were signed with another key than this user's on"
                " this machine, and loading them would run their code."
                f" {_SWITCH}=1 allows them, if you trust everybody who can write"
                " there. Steps are compiled again; last bits may differ"
            )

        if self._processes.count > 1:
            each = self._processes.all("the compiled steps", sorted(self._found))
            common = set.intersection(*map(set, each))
            self._found = {name: self._found[name] for name in common}

    def keep_in(self, folder: str) -> None:
        """Begins to write the steps in use into a folder of checkpoints, each once."""
        new = [
            (name, compiled)
            for name, compiled in list(self._in_use.items())
            if (folder, name) not in self._written
        ]
        if not new or self._processes.index:
            return
        self.finish()
        self._written.update((folder, name) for name, _ in new)
        thread = threading.Thread(
            target=self._write, args=(folder, new), name="jaxdp programs"
        )
        try:
            thread.start()
            self._thread = thread
        except RuntimeError:  # there can't be more of them
            self._write(folder, new)

    def finish(self) -> None:
        """Waits until what is being written is written."""
        if self._thread is not None:
            self._thread.join()
        self._thread = None

    def _kept(
        self, name: str, lowered: Any, devices: Sequence[Any]
    ) -> jax.stages.Compiled | None:
        content = self._found.get(name)
        if content is None:
            return None
        try:
            compiled = serialize_executable.deserialize_and_load(
                content.split(b"\n", 2)[2],
                lowered.in_tree,
                lowered.out_tree,
                devices[0].client,
                devices,
            )
        except Exception as error:  # whatever this version of JAX raises
            text = f"{self._path}/{name}, a compiled step, can't be loaded"
            warn(f"{text}: {error}. It is compiled again.")
            return None
        self._loaded[name] = content
        self._tell(f"compiled steps were loaded from {self._path}")
        return compiled

    def _tell(self, text: str) -> None:
        if text not in self._told:
            say(text)
        self._told.add(text)

    def _write(self, folder: str, new: list[tuple[str, Any]]) -> None:
        path = pathlib.Path(folder, _FOLDER)
        try:
            path.mkdir(exist_ok=True)
            if path.is_symlink():  # it could lead anywhere
                raise OSError("it is a link")
            for entry in list(path.iterdir()):  # of a process that was killed
                if _UNFINISHED.fullmatch(entry.name):
                    entry.unlink()

            for name, compiled in new:
                if (path / name).is_symlink():
                    (path / name).unlink()  # it could lead anywhere
                content = self._loaded.get(name) or _serialized(
                    compiled, self._made_for[name]
                )
                if content is not None:
                    with replacing(path / name) as temporary:
                        temporary.write_bytes(content)

            for old in _files(path)[_MOST_FILES:]:
                old.unlink()
        except OSError as error:
            self._tell(f"compiled steps can't be kept in {path}: {error}")
            self._written.difference_update((folder, name) for name, _ in new)


def _cache_hits() -> int:
    """How many programs JAX has had from a cache of its own while it was heard."""
    before = _events[_IS_HEARD]
    jax.monitoring.record_event(_IS_HEARD)
    if _events[_IS_HEARD] == before:  # nobody listens yet, or not any more
        jax.monitoring.register_event_listener(
            lambda event, **_: _events.update([event])
        )
    return _events[_CACHE_HIT]


def _here(devices: Sequence[Any]) -> dict[str, Any]:
    """What decides besides the program itself what XLA makes of it."""
    first, config = devices[0], jax.config
    levels = "jax_optimization_level", "jax_exec_time_optimization_effort"
    return {
        "jax": f"{jax.__version__}, {jaxlib_version}",
        "devices": f"{len(devices)} x {first.device_kind}",
        "their numbers": [device.id for device in devices],
        "platform": first.client.platform_version,
        "processor": processor() if first.platform == "cpu" else "any",
        "processes": jax.process_count(),
        "flags": [
            os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
        ]
        + [str(getattr(config, name, None)) for name in levels],
    }


def _serialized(compiled: Any, line: bytes) -> bytes | None:
    """What a file has of a program, or None for one that can't be brought into one."""
    try:
        program, _, _ = serialize_executable.serialize(compiled)
    except Exception:  # whatever this version of JAX raises
        return None
    digest = _digest(line, program)
    signed = f"{digest} {_signature(_key(), digest)}\n".encode()
    content = line + signed + program
    return content if len(content) <= _MOST_BYTES else None


def _name(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()[:32]


def _files(folder: str | os.PathLike[str]) -> list[pathlib.Path]:
    """The programs in a folder, the newest first."""
    try:
        found = [each for each in os.scandir(folder) if _NAME.fullmatch(each.name)]
        found.sort(key=lambda each: -each.stat(follow_symlinks=False).st_mtime)
    except OSError:
        return []
    return [pathlib.Path(each.path) for each in found]


def _read(path: pathlib.Path, key: bytes) -> tuple[bytes, bool]:
    """The file of a program, not yet looked into, and whether `key` has signed it.

    Raises:
        OSError, ValueError: if it is damaged.
    """
    with open(os.open(path, _NO_LINKS), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
            raise ValueError("its size is not plausible")
        content = file.read()
    line, signed, program = (*content.split(b"\n", 2), b"", b"")[:3]
    digest, _, signature = signed.decode("ascii", "replace").partition(" ")
    if _name(line + b"\n") != path.name or _digest(line + b"\n", program) != digest:
        raise ValueError("its content has changed")
    is_ours = hmac.compare_digest(signature.encode(), _signature(key, digest).encode())
    return content, is_ours


def _digest(line: bytes, program: bytes) -> str:
    return hashlib.sha256(line + program).hexdigest()


def _signature(key: bytes, digest: str) -> str:
    return hmac.digest(key, digest.encode(), "sha256").hex()


def _key() -> bytes:
    """The key that this user signs with, made where there is none.

    Where it can't be kept to this user alone, one that this process forgets.
    """
    try:
        path = cache_home() / "programs.key"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            descriptor, new = tempfile.mkstemp(dir=path.parent)  # nobody else's to read
            os.write(descriptor, secrets.token_bytes(32))
            os.close(descriptor)
            try:
                with contextlib.suppress(FileExistsError):  # somebody else was faster
                    os.link(new, path)  # whole
            finally:
                os.unlink(new)
        with open(os.open(path, _NO_LINKS), "rb") as file:
            status, key = os.fstat(file.fileno()), file.read(64)
    except (OSError, RuntimeError):  # no home, or one that is not to be written to
        return _KEY_OF_THIS_PROCESS
    is_own = os.name != "posix" or (
        status.st_uid == os.geteuid() and not status.st_mode & 0o77
    )
    return key if is_own and len(key) == 32 else _KEY_OF_THIS_PROCESS
