"""The roll call: process 0 hears who is there before JAX starts.

JAX's own start-up ends the process without an exception where another one is missing or
a port is taken, so these are found here, and named. Like JAX's own service it asks for
no credentials: the network must be trusted.
"""

import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ..basics.console import listed, say
from ..basics.json_checks import by_name, fields, has_form, parse_json, text, whole
from .launchers import Place, join_address

_PATIENCE: Final = 10.0
"""Seconds after which it is said who is missing."""

_MORE_TIME: Final = 3.0
"""Seconds in which processes may still come to hear what is wrong."""

_MOST_BYTES: Final = 2**16
"""Of a message. Who sends more is none of us."""

_MOST_OF_A_NAME: Final = 2**9
"""Bytes that each process adds to the answer, which names all."""

_SILENCE: Final = 1.0
"""Seconds in which a caller must have shown its card; ours do it at once."""

_OTHER_FILES: Final = 64
"""That a process may have open, beside those for each other one."""

_REMEDY: Final = (
    "Pass the right `coordinator_address`='host:port', or set JAX_COORDINATOR_ADDRESS,"
    " for all processes"
)

_CARD: Final = fields(
    {
        "jaxdp": whole(1, 1),
        "job": text(),
        "process": whole(),
        "of": whole(1),
        "name": text(),
        "facts": by_name(text()),
    }
)

Message = dict[str, Any]


class Connection:
    """Messages over a socket, a line of JSON of at most so many bytes for each."""

    def __init__(self, sock: socket.socket, most: int = _MOST_BYTES):
        self.sock = sock
        self._most = most
        self.heard = time.monotonic()  # when something came last
        self._buffer = b""
        self._lock = threading.Lock()
        sock.settimeout(5.0)

    def send(self, message: Message) -> None:
        """Sends, or does nothing if the other side is gone: reading tells that."""
        with self._lock, contextlib.suppress(OSError):
            self.sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """What has come, or None if no more can. Waits for something to come."""
        try:
            data = self.sock.recv(_MOST_BYTES)
        except TimeoutError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self.heard = time.monotonic()
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        try:
            messages = [parse_json(line, self._most) for line in lines]
        except ValueError:
            return None
        is_ours = all(isinstance(message, dict) for message in messages)
        return messages if is_ours and len(self._buffer) <= self._most else None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.close()


class RollCall(NamedTuple):
    """What all processes of a job have agreed on before JAX starts."""

    connections: dict[int, Connection]
    """By process: of process 0 to all others, of these to process 0."""
    names: dict[int, str]
    address: str
    """Where JAX's service is to be, as the others reach it."""
    bind_address: str


def call_the_roll(
    place: Place, facts: Mapping[str, Any], timeout: float, bind: str | None = None
) -> RollCall:
    """Waits until all processes are there, and compares their `facts`.

    Raises:
        OSError: if process 0 can't listen at any of `place.ports` (of the address
            `bind`, if that is given), or a process may not open enough files.
        TimeoutError: if somebody is missing after `timeout`.
        RuntimeError: if the processes don't belong together.
    """
    _check_room(place)
    me = {
        "jaxdp": 1,
        "job": place.job,
        "process": place.process_id,
        "of": place.num_processes,
        "name": f"{socket.gethostname()}, pid {os.getpid()}",
        "facts": dict(facts),
    }
    if place.process_id == 0:
        return _as_host(place, me, timeout, bind)
    return _as_guest(place, me, timeout)


def _as_host(place: Place, me: Message, timeout: float, bind: str | None) -> RollCall:
    start = time.monotonic()
    deadline = start + timeout
    host = _bind_host(place) if bind is None else bind
    listener, port = _listen(place, host)
    cards: dict[int, Message] = {0: me}
    there: list[tuple[int, Connection]] = []
    wrong = missing = ""
    said = False

    with listener:
        while len(cards) < place.num_processes:
            now = time.monotonic()
            absent = listed("process", set(range(place.num_processes)) - set(cards))
            if now > deadline:
                missing = f"{absent} of {place.num_processes} not there"
                break
            if now > start + _PATIENCE and not said:
                said = True
                where = join_address(place.host, port)
                say(f"process 0 waits for {absent} at {where}")

            if (caller := _next_caller(listener, place)) is None:
                continue
            card, connection = caller
            if not wrong and (wrong := _what_is_wrong(cards, card)):
                # Those who are on their way shall hear it too.
                deadline = min(deadline, now + _MORE_TIME)
            there.append((card["process"], connection))
            cards.setdefault(card["process"], card)

    names = {p: f"process {p} ({card['name']})" for p, card in cards.items()}
    answer = {"wrong": wrong, "missing": missing, "names": names, "port": port}
    for _, connection in there:
        connection.send(answer)
    _check_answer(answer, place, timeout)
    address = join_address(place.host, port)
    return RollCall(dict(there), names, address, join_address(host, port))


def _next_caller(
    listener: socket.socket, place: Place
) -> tuple[Message, Connection] | None:
    """One of this job who shows its card, if one comes soon; strangers are sent off."""
    try:
        connection = Connection(listener.accept()[0])
    except OSError:  # nobody came, or who called has given up meanwhile
        return None
    end = time.monotonic() + _SILENCE
    connection.sock.settimeout(_SILENCE)
    while (messages := connection.receive()) == [] and time.monotonic() < end:
        pass
    connection.sock.settimeout(5.0)

    card = messages[0] if messages else {}
    is_one = has_form(card, _CARD) and card["process"] < card["of"]
    if is_one and card["job"] == place.job:
        connection.send({"welcome": True})
        return card, connection
    connection.send({"other": place.job})
    connection.close()
    return None


def _as_guest(place: Place, me: Message, timeout: float) -> RollCall:
    start = time.monotonic()
    where = f"process 0 at {place.host}, {listed('port', place.ports)}"
    who = f"process {place.process_id} of {place.num_processes}"
    said = False
    while True:
        why = "nothing listens there"
        for port in place.ports:
            # Process 0 has less time to say whether all are there.
            found = _call(place, port, me, timeout + 2 * _MORE_TIME)
            if isinstance(found, str):
                why = found or why
                continue
            connection, answer = found
            _check_answer(answer, place, timeout)
            names = {int(process): name for process, name in answer["names"].items()}
            address = join_address(place.host, port)
            return RollCall({0: connection}, names, address, "")

        waited = time.monotonic() - start
        if waited > timeout:
            raise TimeoutError(
                f"{who} did not reach {where}, within {timeout:g} s: {why}. Has it been"
                " started, is that its machine, and does a firewall let others in?"
                " `initialization_timeout` is how long to wait."
            )
        if waited > _PATIENCE and not said:
            said = True
            say(f"{who} waits for {where}: {why}", everywhere=True)
        time.sleep(0.1)


def _call(
    place: Place, port: int, me: Message, seconds: float
) -> tuple[Connection, Message] | str:
    """A connection to process 0 and its answer; else what is there, "" for nothing."""
    most = _MOST_BYTES + _MOST_OF_A_NAME * place.num_processes
    try:
        connection = Connection(socket.create_connection((place.host, port), 5.0), most)
    except OSError as error:
        return "" if isinstance(error, ConnectionRefusedError) else str(error)
    connection.send(me)
    messages, end = connection.receive(), time.monotonic() + seconds
    first = messages[0] if messages else {}
    who = "process 0 of another job" if "other" in first else "another program"
    why = f"{who} listens at port {port}"
    if "welcome" in first:
        why = "it ended, or did not say whether all are there"
        while messages is not None and time.monotonic() < end:
            for message in messages:
                if "names" in message:
                    return connection, message
            messages = connection.receive()
    connection.close()
    return why


def _what_is_wrong(cards: Mapping[int, Message], card: Message) -> str:
    """Why the one with this card can't join those that are there, or nothing."""
    me, process = cards[0], card["process"]
    if process in cards:
        both = f"{cards[process]['name']} and {card['name']}"
        return f"two processes say that they are number {process}: {both}"
    mine, its = ({"the number of processes": c["of"], **c["facts"]} for c in (me, card))
    for name, value in mine.items():
        if its.get(name) != value:
            return (
                f"{name} is {value} for process 0 ({me['name']}), but {its.get(name)}"
                f" for process {process} ({card['name']}); all must run the same"
            )
    return ""


def _check_answer(answer: Message, place: Place, timeout: float) -> None:
    if answer["wrong"]:
        raise RuntimeError(
            f"the processes of this job don't belong together: {answer['wrong']}."
        )
    if answer["missing"]:
        raise TimeoutError(
            f"after {timeout:g} s {answer['missing']}, and the others wait. Was every"
            f" process started, with the address of process 0, {place.host}? Look at"
            " their own output. `initialization_timeout` is how long to wait."
        )


def _bind_host(place: Place) -> str:
    """The address of this machine that the others will come to."""
    try:
        found = socket.getaddrinfo(place.host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise OSError(
            f"{place.host}, the address of process 0, is not the name of a"
            f" machine: {error}. {_REMEDY}."
        ) from error
    addresses = [str(entry[4][0]) for entry in found]
    loopback = [a for a in addresses if a == "::1" or a.startswith("127.")]
    by_name = place.host != "localhost" and place.host not in addresses
    if len(loopback) == len(addresses) and by_name and not place.is_on_one_host:
        return "0.0.0.0"  # /etc/hosts says so here, but not to the others
    return addresses[0]


def _listen(place: Place, host: str) -> tuple[socket.socket, int]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in place.ports:
        # The port of a job that has just ended is free, as for JAX's service.
        try:
            listener = socket.create_server(
                (host, port),
                family=family,
                backlog=place.num_processes + 64,  # and strangers
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            raise OSError(
                f"process 0 can't listen at {join_address(host, port)}:"
                f" {os.strerror(error.errno or 0)}. It runs on {socket.gethostname()},"
                f" which must have that address. {_REMEDY};"
                " `coordinator_bind_address` if it listens at another address than the"
                " others call."
            ) from error
        listener.settimeout(0.5)
        return listener, port
    raise OSError(
        f"process 0 can't listen on {socket.gethostname()}: another program uses"
        f" {listed('port', place.ports)} of {host}. It may be an earlier run that"
        f" did not end. {_REMEDY}, with another port."
    )


def _check_room(place: Place) -> None:
    """JAX ends a process that may open too few files without saying why.

    Each connection is one, and process 0 is connected to all others twice.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    needed = _OTHER_FILES + (0 if place.process_id else 2 * place.num_processes)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < needed:  # -1 is no limit
        raise OSError(
            errno.EMFILE,
            f"process {place.process_id} of {place.num_processes} can open {soft}"
            f" files, but needs {needed} to be connected to the others. Raise the limit"
            f" before the process starts, with `ulimit -n {needed}` in its shell or"
            " LimitNOFILE of its service.",
        )
