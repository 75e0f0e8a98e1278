"""Runs peers in turn, each in its own process with its own terminal."""

import contextlib
import ctypes
import fcntl
import json
import math
import os
import pty
import resource
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .peers import PEERS
from .works import WORKS, Work

ROOT = Path(__file__).parent.parent
SECONDS = 600
"""After which a process is given up."""

_SUBREAPER = 36
"""Linux's `PR_SET_CHILD_SUBREAPER`: orphans become children of this process."""


def run_round(
    work: Work, peers: Sequence[str], *, turn: int = 0, toy: bool = False
) -> dict[str, Any]:
    """Trains with each of `peers`. The expert runs first; in odd turns it runs last.

    Returns:
        A dict of plain JSON with "work", and by peer "seconds_per_step", "loss",
        "busy", "skipped" and "failed". "busy" is the share of the cores' time that
        other programs used meanwhile. "skipped" is the reason why a peer was not run.
        "failed" is the end of its output, or a note that its loss differs from the
        expert's, so that its time means nothing.
    """
    found: dict[str, Any] = {"work": work.name}
    parts = ("seconds_per_step", "loss", "busy", "skipped", "failed")
    found |= {part: {} for part in parts}
    for name in peers if turn % 2 == 0 else reversed(peers):
        result = run_one(work, name, toy=toy)
        for part in parts:
            if result.get(part) is not None:
                found[part][name] = result[part]
    found["failed"] |= find_cheats(work, found["loss"])
    for name in found["failed"]:
        found["seconds_per_step"].pop(name, None)
    return found


def find_cheats(work: Work, losses: dict[str, float]) -> dict[str, str]:
    """Returns, by peer, a message for each loss that differs from the expert's."""
    expected = losses.get("expert", math.nan)
    return {
        name: f"its final loss is {loss:.6g} and the expert's {expected:.6g}, further"
        f" apart than {work.tolerance:g} of it: it did other work"
        for name, loss in losses.items()
        if abs(loss - expected) > work.tolerance * abs(expected)
    }


def run_one(work: Work, peer: str, *, toy: bool = False) -> dict[str, Any]:
    """Returns the result of `benchmarks.worker.measure`, or {"failed": end of the
    output}.
    """
    with tempfile.TemporaryDirectory() as folder, _terminal() as (slave, shown):
        output = Path(folder, "result.json")
        command = [sys.executable, "-m", "benchmarks.worker", work.name, peer]
        command += [str(output), *(["--toy"] if toy else [])]
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(work.devices),
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            "TERM": os.environ.get("TERM", "xterm"),
        }
        # The process runs outside the repository, so that it leaves no files in it.
        before = clocks()
        wait_for_all(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=slave,
            stderr=slave,
        )
        seconds, everybody, mine = (
            b - a for a, b in zip(before, clocks(), strict=True)
        )
        if output.exists():
            busy = max(0.0, everybody - mine) / (seconds * (os.cpu_count() or 1))
            return json.loads(output.read_text()) | {"busy": busy}
        return {"failed": bytes(shown)[-3000:].decode(errors="replace")}


def wait_for_all(command: list[str], **options: Any) -> None:
    """Runs a process, and on Linux also waits for the processes that it leaves behind.

    A server that forks workers ends after the process that started it. The system
    reports the time of a process only if another process waits for it.
    """
    set_option = getattr(ctypes.CDLL(None), "prctl", lambda *_: None)
    set_option(_SUBREAPER, 1, 0, 0, 0)
    with subprocess.Popen(command, process_group=0, **options) as process:
        try:
            process.wait(SECONDS)
        except BaseException as exception:
            process.kill()
            if not isinstance(exception, subprocess.TimeoutExpired):
                raise
    deadline = time.monotonic() + 10  # the remaining processes are idle
    with contextlib.suppress(ChildProcessError):  # no process remains
        while time.monotonic() < deadline:
            if os.waitpid(-process.pid, os.WNOHANG)[0] == 0:
                time.sleep(0.01)


def clocks() -> tuple[float, float, float]:
    """Returns seconds: wall clock, busy time of all cores, part for these processes."""
    used = [resource.getrusage(resource.RUSAGE_SELF)]
    used += [resource.getrusage(resource.RUSAGE_CHILDREN)]
    mine = sum(usage.ru_utime + usage.ru_stime for usage in used)
    everybody, stat = mine, Path("/proc/stat")
    if stat.exists():
        user, nice, system, _, _, *rest = map(int, stat.read_text().split()[1:9])
        everybody = (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), everybody, mine


@contextlib.contextmanager
def _terminal() -> Iterator[tuple[int, bytearray]]:
    """Yields a terminal to write to, so that progress bars are drawn, and its
    output.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    shown = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # the other side was closed
            while data := os.read(master, 65536):
                shown.extend(data)
                del shown[:-10000]

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield slave, shown
    finally:
        os.close(slave)
        reader.join(5)
        os.close(master)


def choose(works: str | None, peers: str | None) -> tuple[list[Work], list[str]]:
    """Parses `--only W1,W4` and `--peers expert,jaxdp`; always includes the expert."""
    chosen = [WORKS[name] for name in _names(works, WORKS, "--only")]
    names = _names(peers, PEERS, "--peers")
    return chosen, ["expert", *(name for name in names if name != "expert")]


def _names(given: str | None, known: Any, option: str) -> list[str]:
    if given is None:
        return list(known)
    names = given.split(",")
    for name in names:
        if name not in known:
            raise SystemExit(f"`{option}` has {name!r}; there are {', '.join(known)}.")
    return names
