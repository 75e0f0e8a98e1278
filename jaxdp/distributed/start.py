"""Starting as one of several processes, and ending at once by an exception.

    import jaxdp

    jaxdp.distributed.initialize()   # first, before anything touches a device
    ...
    Trainer(model).fit(loader)

Under torchrun, and what JAX detects, this finds out which process it is. Started alone,
the same script trains alone.

JAX ends a process without an exception where another one is missing or a port is taken.
So there is a roll call before: process 0 listens where JAX's service will be; each
other one sends it a line of JSON and gets one back when all are there. Then nothing
listens any more. Like JAX's service it asks for no credentials.
"""

import contextlib
import json
import math
import os
import socket
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final

import jax

from ..basics import coordination
from ..basics.arguments import check_number
from ..basics.console import Outlet, listed, say
from ..basics.environment import versions
from ..basics.files import check_fields, parse_json
from ..basics.process import is_imported_by_a_worker
from . import meetings
from .launchers import Rank, bind_host, find_rank, join_address, started_several
from .signals import is_stop

_PATIENCE: Final = 10.0  # seconds after which it is said who is missing
_MORE_TIME: Final = 3.0  # in which processes may still come to hear what is wrong
_SILENCE: Final = 1.0  # in which a caller must have shown its card
_MOST_BYTES: Final = 4096  # of a line; who sends more is none of us

_CARD: Final = {"job": str, "process": int, "of": int, "name": str, "facts": dict}
_ANSWER: Final = {"job": str, "wrong": str, "missing": str}

_is_alone_on_purpose = False


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | Sequence[int] | None = None,
    *,
    initialization_timeout: float = 300.0,
    heartbeat_timeout: float = 100.0,
    shutdown_timeout: float = 300.0,
    coordinator_bind_address: str | None = None,
) -> None:
    """Joins the other processes of this job; does nothing if there are none.

    Call it before anything uses a device, and after any `jax.config.update`. Arguments
    that you leave out come from the launcher's environment. A second call does nothing.

    From then on, an exception that nobody catches is printed and ends the process by
    `os._exit`; if a process dies, JAX ends the others after `heartbeat_timeout`, and a
    launcher such as torchrun at once. None exits with code 0: see docs/failures.md.
    Nothing is authenticated, so the network must be trusted.

    Args:
        coordinator_address: "host:port" of process 0, the same for all.
        num_processes: how many there are; 1 trains alone, whatever the environment
            says.
        process_id: the number of this process, from 0.
        local_device_ids: which GPUs of its machine this process uses. By default, the
            processes of a machine share its GPUs evenly, and each says which it has.
        initialization_timeout: seconds that processes wait for each other to start.
        heartbeat_timeout: seconds without a sign of life after which JAX takes a
            process for dead, and ends the others.
        shutdown_timeout: seconds that a process waits for the others when it is done.
        coordinator_bind_address: the address that process 0 listens at; all of its
            machine's by default, or 127.0.0.1 if all processes are on one machine.

    Raises:
        ValueError: if arguments and environment do not give the process's number.
        OSError: if process 0 can't listen at its address.
        TimeoutError: if a process is missing; the message says which.
        RuntimeError: if the processes don't belong together, or JAX has begun already.
    """
    global _is_alone_on_purpose
    if jax.distributed.is_initialized() or is_imported_by_a_worker():
        return
    timeouts = {
        "initialization_timeout": initialization_timeout,
        "heartbeat_timeout": heartbeat_timeout,
        "shutdown_timeout": shutdown_timeout,
    }
    for name, seconds in timeouts.items():
        check_number(name, seconds, above=0)

    rank = find_rank(
        coordinator_address, num_processes, process_id, initialization_timeout
    )
    if rank is None:
        _is_alone_on_purpose = True
        return
    from jax._src import xla_bridge

    if xla_bridge.backends_are_initialized():
        raise RuntimeError(
            "`jaxdp.distributed.initialize()` was called after the first use of a"
            " device, when JAX can no longer join other processes; call it at the"
            " top of the script, before arrays, keys or jax.devices()."
        )

    is_shared = local_device_ids is None and not os.environ.get("JAX_LOCAL_DEVICE_IDS")
    if is_shared:
        local_device_ids = rank.devices
    bind = coordinator_bind_address or bind_host(rank.host)
    call_the_roll(rank, _facts(), initialization_timeout, bind)
    end_at_once_by_exceptions()
    jax.distributed.initialize(
        rank.address,
        rank.count,
        rank.index,
        local_device_ids=local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=math.ceil(initialization_timeout),
        heartbeat_timeout_seconds=math.ceil(heartbeat_timeout),
        shutdown_timeout_seconds=math.ceil(shutdown_timeout),
        coordinator_bind_address=join_address(bind, rank.port),
    )
    # JAX's backends wait for each other too, and not for long. Now all are here.
    if jax.devices()[0].platform == "gpu" and is_shared and rank.note:
        say(rank.note, everywhere=True)


def forgotten() -> str | None:
    """A warning, if there are other processes in the environment only."""
    is_started = jax.distributed.is_initialized() or _is_alone_on_purpose
    several = started_several()
    if is_started or is_imported_by_a_worker() or several is None:
        return None
    launcher, count = several
    return (
        f"{launcher} started {count} processes, and this one trains alone, as each of"
        " them does. Call `jaxdp.distributed.initialize()` at the top of the script to"
        " train together, or `jaxdp.distributed.initialize(num_processes=1)` if that is"
        " meant."
    )


def _facts() -> dict[str, str]:
    """What must be the same everywhere for processes to understand each other."""
    installed = versions()
    python = installed["python"].rpartition(".")[0]
    packages = {f"the version of {n}": installed[n] for n in ("jax", "jaxlib", "jaxdp")}
    return {"the version of Python": python, **packages}


def call_the_roll(rank: Rank, facts: dict[str, str], timeout: float, bind: str) -> None:
    """Waits until all processes are there, and compares their `facts`.

    Raises:
        OSError: if process 0 can't listen at the address `bind`.
        TimeoutError: if somebody is missing after `timeout`.
        RuntimeError: if the processes don't belong together.
    """
    name = f"{socket.gethostname()}, pid {os.getpid()}"
    card = {"job": rank.job, "process": rank.index, "of": rank.count, "name": name}
    take_part = _as_guest if rank.index else _as_host
    answer = take_part(rank, {**card, "facts": facts}, timeout, bind)
    if answer["wrong"]:
        raise RuntimeError(f"the processes don't belong together: {answer['wrong']}.")
    if answer["missing"]:
        raise TimeoutError(
            f"after {timeout:g} s {answer['missing']} of {rank.count} not there. Was"
            f" every process started, with the address of process 0, {rank.address}?"
            " Look at their own output. `initialization_timeout` is how long to wait."
        )


def _as_host(rank: Rank, me: Any, timeout: float, bind: str) -> dict[str, str]:
    cards, wrong, missing, said = {0: me}, "", "", False
    everybody, guests = set(range(rank.count)), list[socket.socket]()
    deadline = (start := time.monotonic()) + timeout
    with _listener(rank, bind) as listener:
        while (absent := everybody - set(cards)) and time.monotonic() < deadline:
            missing = listed("process", absent)[:1000]
            if time.monotonic() > start + _PATIENCE and not said:
                said = True
                say(f"process 0 waits at {rank.address} for {missing}")
            with contextlib.suppress(TimeoutError, ConnectionError):
                guest = listener.accept()[0]
                card = _received(guest, _SILENCE, _CARD, rank.job)
                if card is None or not 0 < card["process"] < card["of"]:
                    guest.close()  # a stranger
                    continue
                guests.append(guest)
                if not wrong and (wrong := _what_is_wrong(cards, card)):
                    deadline = min(deadline, time.monotonic() + _MORE_TIME)
                cards.setdefault(card["process"], card)
    answer = {"wrong": wrong[:1000], "missing": missing if absent else ""}
    for guest in guests:
        with guest:
            _send(guest, {"job": rank.job, **answer})
    return answer


def _as_guest(rank: Rank, me: Any, timeout: float, bind: str) -> dict[str, str]:
    start, said = time.monotonic(), False
    while True:
        why = "another program, or process 0 of another job, listens there"
        try:
            with socket.create_connection((rank.host, rank.port), 5.0) as host:
                _send(host, me)
                seconds = timeout + 2 * _MORE_TIME  # process 0 has less
                answer = _received(host, seconds, _ANSWER, rank.job)
            if answer is not None:
                return answer
        except OSError as error:
            why = str(error)

        waited, who = time.monotonic() - start, f"process {rank.index} of {rank.count}"
        text = f"{who} does not reach process 0 at {rank.address}: {why}"
        if waited > timeout:
            more = "Is that its machine, and does a firewall let others in?"
            raise TimeoutError(f"{text}. {more} (`initialization_timeout`)")
        if waited > _PATIENCE and not said:
            said = True
            say(text, everywhere=True)
        time.sleep(0.1)


def _send(sock: socket.socket, message: Any) -> None:
    with contextlib.suppress(OSError):  # the other side is gone: reading tells that
        sock.sendall(json.dumps(message).encode() + b"\n")


def _received(sock: socket.socket, seconds: float, types: Any, job: str) -> Any:
    """The line of JSON of this job that comes in time, or None."""
    end, line = time.monotonic() + seconds, b""
    with contextlib.suppress(OSError, ValueError):
        while not line.endswith(b"\n"):
            sock.settimeout(max(1e-3, end - time.monotonic()))
            part = sock.recv(_MOST_BYTES + 1 - len(line))
            if not part or time.monotonic() > end:
                return None
            line += part
        if len(line) > _MOST_BYTES:
            return None
        message = parse_json(line)
        check_fields(message, types, "message")
        return message if message["job"] == job else None
    return None


def _what_is_wrong(cards: dict[int, Any], card: Any) -> str:
    """Why the one with this card can't join those that are there, or nothing."""
    me, who = cards[0], f"process {card['process']} ({card['name']})"
    if card["process"] in cards:
        return f"{who} has the number of {cards[card['process']]['name']}"
    mine, theirs = (
        {"the number of processes": c["of"], **c["facts"]} for c in (me, card)
    )
    for name in mine:
        if mine[name] != (its := theirs.get(name)):
            both = f"{mine[name]} for process 0 ({me['name']}), but {its} for {who}"
            return f"{name} is {both}; all must run the same"
    return ""


def _listener(rank: Rank, host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    options: Any = {"family": family, "dualstack_ipv6": host == "::"}
    try:  # the port of a job that has just ended is free, as for JAX's service
        server = socket.create_server((host, rank.port), backlog=rank.count, **options)
    except OSError as error:
        raise OSError(
            f"process 0 can't listen at {host}, port {rank.port}: {error}. If an"
            " earlier run has not ended, end it, or pass another"
            " `coordinator_address`='host:port' to all processes."
        ) from error
    server.settimeout(0.5)
    return server


def end_at_once_by_exceptions() -> None:
    """Has an exception that nobody catches printed, and then the process ended.

    Otherwise this process waits for the others when Python ends, in JAX's `atexit`,
    and they for this one, whose heartbeat goes on.
    """
    print_it, process = sys.excepthook, os.getpid()

    def print_and_leave(
        kind: type[BaseException],
        exception: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        print_it(kind, exception, traceback)
        # By a signal that all have heard all end; and a fork is none of them.
        if is_stop(exception) or os.getpid() != process:
            return
        if coordination.is_there():
            meetings.fail(first_line(exception))
        for stream in (sys.stdout, sys.stderr):
            Outlet(stream).flush()
        os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = print_and_leave


def first_line(exception: BaseException) -> str:
    """An exception in one line, without a full stop."""
    text = str(exception).strip().partition("\n")[0][:500]
    return f"{type(exception).__name__}: {text}".rstrip(".: ")
