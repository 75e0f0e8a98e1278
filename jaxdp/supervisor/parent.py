"""Starts a script, watches over it, and starts it again after a fault."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

from ..basics.arguments import check_count, check_number
from ..basics.console import say
from ..distributed.launchers import find_place
from . import leftovers
from .channel import Beat, open_channel, read_beat, read_end, reset
from .child import VARIABLE

_CHILD: Final = os.path.join(os.path.dirname(__file__), "child.py")

_STOPS: Final = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
_PASSED_ON: Final = (*_STOPS, "SIGUSR1", "SIGUSR2")
_PREEMPTED: Final = 143
"""The exit code of a script that has saved after a signal, whichever it was."""

_LOOK: Final = 0.05
"""Seconds from one look at the child to the next."""

_PATIENCE: Final = 10
"""How many times as long it may be silent where no step can be expected."""

_GRACE: Final = 5.0
"""Seconds that what a dead child has started is given to end by itself."""

_GUARD: Final = f"""
while read -r group; do last=$group; done
sleep {_GRACE:g}
kill -s KILL -- "-$last"
"""
"""For the shell: what this process has started does not outlive it by more."""

_LONGEST_PAUSE: Final = 60.0

_MISTAKES: Final = {
    *("ArithmeticError", "AssertionError", "AttributeError", "FileNotFoundError"),
    *("ImportError", "LookupError", "NameError", "NotImplementedError"),
    *("SyntaxError", "TypeError", "ValueError"),
}
"""What comes again if it comes before the first step."""

_OUTSIDE: Final = {"JaxRuntimeError", "MemoryError", "OSError", "SaveFailed"}
"""What a device, a disk or a network does, which may be better the next time."""


class _End(NamedTuple):
    """How an attempt has ended."""

    code: int
    """As `subprocess` has it: of a signal, its number below zero."""
    step: int
    """The last one that was taken in it, or -1."""
    error: dict[str, Any] = {}
    was_silent: bool = False

    def __str__(self) -> str:
        if self.was_silent:
            return "was silent for too long, and was killed"
        if self.code < 0:
            names = {each.value: each.name for each in signal.Signals}
            return f"was ended by {names.get(-self.code, f'signal {-self.code}')}"
        if not self.error or self.is_a({"SystemExit"}):
            return f"ended with exit code {self.code}"
        kind, text = self.error["kinds"][0], self.error["text"].partition("\n")[0]
        return f"failed: {kind}: {text.rstrip('.:')}"

    def is_a(self, kinds: set[str]) -> bool:
        """Whether it failed with an exception of one of these kinds."""
        return not kinds.isdisjoint(self.error.get("kinds", ()))

    def is_from_outside(self) -> bool:
        """Whether it may be better the next time."""
        text = self.error.get("text", "")
        return "can't start new thread" in text or self.is_a(_OUTSIDE)


class Supervisor:
    """Runs a script until it is done, over its crashes.

    Args:
        script: its path; it calls `fit(..., ckpt_path="auto")`.
        arguments: its own.
        max_restarts: how often it is started again.
        deadman: seconds without a sign of life from its main thread after which it is
            killed; ten times as long where no step can be expected. None: never.
        every: steps from one snapshot to the next; None for none.
        folder: where snapshots are kept; in memory by default.

    Raises:
        FileNotFoundError, ValueError: if it can't be run like this.
    """

    def __init__(
        self,
        script: str,
        arguments: Sequence[str] = (),
        *,
        max_restarts: int = 10,
        deadman: float | None = None,
        every: int | None = None,
        folder: str | None = None,
    ):
        _check(script, max_restarts, deadman, every)
        self._command = [sys.executable, _CHILD, str(os.getpid()), script, *arguments]
        self._max_restarts, self._deadman, self._every = max_restarts, deadman, every
        self._root = leftovers.root_in(folder)
        self._child: subprocess.Popen[bytes] | None = None
        self._heard: set[int] = set()  # signals
        self._early: list[int] = []  # of them, while there was no child
        self._heard_at = time.monotonic()
        self._leaving: list[tuple[int, float]] = []

    def run(self) -> int:
        """Until the script is done, or can't be helped; its exit code, as a shell's."""
        for text in leftovers.sweep(self._root):
            say(f"run: {text}")
        self._path, lock = leftovers.open_session(self._root)
        before, self._guard = self._take_signals(), _start_guard()
        try:
            self._open_channel()
            end = self._attempts()
            self._see_off(wait=True)
            self._clean_up(end)
        finally:
            self._guard.kill()
            self._guard.communicate()
            for number, handler in before.items():
                signal.signal(number, handler)
            leftovers.close_session(self._path, lock)
        return end.code if end.code >= 0 else 128 - end.code

    def _open_channel(self) -> None:
        try:
            open_channel(self._path, every=self._every, deadman=self._deadman)
        except OSError as error:
            raise ValueError(
                f"`--snapshot-dir`: nothing can be written to {self._root}: {error}."
                " Make room there, or pass another folder."
            ) from error

    def _attempts(self) -> _End:
        restarts, pause, furthest = 0, 0.0, -1
        before: _End | None = None
        while True:
            end = self._attempt()
            reason = self._why_no_more(end, before, restarts, furthest)
            if reason is not None:
                if reason:
                    say(f"run: the script {end}{_after(end)}. {reason}")
                return end

            restarts += 1
            furthest = max(furthest, end.step)
            has_moved = end.step > (-1 if before is None else before.step)
            pause = 0.0 if has_moved else min(_LONGEST_PAUSE, max(1.0, 2 * pause))
            then = f"in {pause:g} s" if pause else "now"
            say(
                f"run: the script {end}{_after(end)}. It is started again {then}"
                f" ({restarts} of {self._max_restarts})."
            )
            self._sleep(pause)
            if self._is_told_to_stop():
                return end
            before = end

    def _why_no_more(
        self, end: _End, before: _End | None, restarts: int, furthest: int
    ) -> str | None:
        """Why the script is not started again; "" needs no words, None if it is."""
        if end.code == 0 or self._is_told_to_stop():
            return ""
        if self._heard and end.code in (_PREEMPTED, *(-each for each in self._heard)):
            return ""
        has_begun = max(end.step, furthest) >= 0
        if not has_begun and (end.is_a(_MISTAKES) or end.code == 2):
            return "It would fail again, and is not started again."
        is_same = (
            before is not None
            and end.error
            and not end.is_from_outside()
            and end.step == before.step
            and end.error["kinds"] == before.error.get("kinds")
        )
        if is_same:
            return "That is the second time at this step: it is not started again."
        if restarts >= self._max_restarts:
            return f"It was started again {restarts} times (`--max-restarts`)."
        return None

    def _attempt(self) -> _End:
        """Starts the script, and waits until it has ended."""
        reset(self._path)
        try:
            child = self._child = subprocess.Popen(
                self._command,
                env={**os.environ, VARIABLE: self._path},
                stdout=_unless_unread(1),
                stderr=_unless_unread(2),
                # A session of its own: what a terminal or a launcher sends to the group
                # of this process reaches the script once, passed on.
                start_new_session=True,
            )
        except OSError as error:  # no more processes, or no memory
            return _End(1, -1, {"kinds": ["OSError"], "text": str(error)})
        with contextlib.suppress(OSError):  # somebody has killed it
            os.write(self._guard.stdin.fileno(), f"{child.pid}\n".encode())
        while self._early:
            child.send_signal(self._early.pop(0))

        beat, self._heard_at = read_beat(self._path), time.monotonic()
        was_silent = False
        while child.poll() is None:
            self._see_off()
            if (now := read_beat(self._path)) != beat:
                beat, self._heard_at = now, time.monotonic()
            if self._is_silent(beat):
                was_silent = True
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                break
            time.sleep(_LOOK)
        self._child = None

        code = child.returncode
        if code:
            self._leaving.append((child.pid, time.monotonic() + _GRACE))
        end = read_end(self._path) if code > 0 else {}
        return _End(code, read_beat(self._path).step, end, was_silent)

    def _is_silent(self, beat: Beat) -> bool:
        if self._deadman is None or self._child is None:
            return False
        silence = time.monotonic() - self._heard_at
        is_slow = beat.is_slow and not _is_stopped(self._child.pid)
        return silence > self._deadman * (_PATIENCE if is_slow else 1)

    def _see_off(self, *, wait: bool = False) -> None:
        """Ends what dead children have started, and what has not ended by itself."""
        while self._leaving:
            group, until = self._leaving[0]
            try:
                os.killpg(group, 0)  # is anybody there?
                if time.monotonic() >= until:
                    os.killpg(group, signal.SIGKILL)
                elif wait:
                    time.sleep(_LOOK)
                    continue
                else:
                    return
            except (ProcessLookupError, PermissionError):
                pass
            del self._leaving[0]

    def _clean_up(self, end: _End) -> None:
        """A run that is done leaves nothing; the rest of another can be used yet."""
        for path in leftovers.of_session(self._root, self._path):
            steps = leftovers.steps_in(path)
            if end.code == 0 or not steps:
                leftovers.remove_snapshots(path)
            else:
                say(
                    f"run: a snapshot of step {steps[-1]} stays in {path}, where the"
                    " next `jaxdp run` of this script finds it"
                )

    # Signals.

    def _take_signals(self) -> dict[int, Any]:
        """Passes on what is sent to this process, unless it is ignored (`nohup`)."""
        before = {}
        for name in _PASSED_ON:
            number = getattr(signal, name)
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, self._pass_on)
        before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._stop_both)
        return before

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._heard.add(number)
        if self._child is None:
            self._early.append(number)
        else:
            self._child.send_signal(number)

    def _stop_both(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z, and going on after it."""
        child = self._child
        with contextlib.suppress(ProcessLookupError):
            if child is not None:
                os.killpg(child.pid, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            if child is not None:
                os.killpg(child.pid, signal.SIGCONT)
        self._heard_at = time.monotonic()

    def _is_told_to_stop(self) -> bool:
        return any(signal.Signals(number).name in _STOPS for number in self._heard)

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._is_told_to_stop():
            self._see_off()
            time.sleep(_LOOK)


def _unless_unread(stream: int) -> int | None:
    """The stream of this process, or nowhere if no one reads it, as after `| head`.

    A script that prints would fail by it every time.
    """
    poll = select.poll()
    poll.register(stream, 0)
    return subprocess.DEVNULL if poll.poll(0) else None


def _start_guard() -> Any:
    """Starts what outlives this process, if that is killed, and ends the script.

    It is told the process groups of scripts, and ends the last one then.
    """
    return subprocess.Popen(
        ["/bin/sh", "-c", _GUARD],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )


def _after(end: _End) -> str:
    return f", after step {end.step}" if end.step >= 0 else ""


def _is_stopped(process: int) -> bool:
    """Whether something has stopped a process, which no program does by itself."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] in "tT"


def _check(
    script: str, max_restarts: int, deadman: float | None, every: int | None
) -> None:
    """Raises where a script can't be run like this."""
    if os.name != "posix":
        raise ValueError("`run` needs the signals of Linux or macOS.")
    if not os.path.isfile(script):
        raise FileNotFoundError(f"`{script}`: there is no such file.")
    check_count("--max-restarts", max_restarts, least=0)
    if deadman is not None:
        check_number("--deadman", deadman, above=0, or_else=" seconds")
    if every is not None:
        check_count("--snapshot-every", every, or_else=" steps")
    place = find_place(ask_jax=False)
    if place is not None:
        raise ValueError(
            f"`run` restarts one process, but this is one of {place.num_processes}"
            f" that {place.launcher} started: they can only be started again"
            " together. Have the launcher do it: torchrun --max-restarts, sbatch"
            " --requeue, or `restartPolicy` of Kubernetes."
        )
