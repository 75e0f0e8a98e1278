"""The roll call: who is there, before JAX starts.

JAX ends a process without an exception where another one is missing or a port is taken.
So process 0 listens where JAX's service will be; each other one sends it a line of JSON
and gets one back when all are there. Then nothing listens any more. Like JAX's service
it asks for no credentials.
"""

import contextlib
import json
import os
import socket
import time
from typing import Any, Final

from ..basics.console import listed, say
from ..basics.json_checks import check_fields, parse_json
from .launchers import Rank

_PATIENCE: Final = 10.0  # seconds after which it is said who is missing
_MORE_TIME: Final = 3.0  # in which processes may still come to hear what is wrong
_SILENCE: Final = 1.0  # in which a caller must have shown its card
_MOST_BYTES: Final = 4096  # of a line; who sends more is none of us

_CARD: Final = {"job": str, "process": int, "of": int, "name": str, "facts": dict}
_ANSWER: Final = {"job": str, "wrong": str, "missing": str}


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
