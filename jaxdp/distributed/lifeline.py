"""A connection from every process to process 0, from before JAX starts to the end.

Process 0 calls the roll first: JAX's own start-up ends the process without an exception
where another one is missing or a port is taken, so these are found here, and named. The
connections then stay. The kernel closes those of a process that dies, however it dies,
so all others know at once, where a collective would leave them waiting.

Like JAX's own service it asks for no credentials: the network must be trusted.
"""

import contextlib
import errno
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from ..basics.console import listed, say
from ..basics.json_checks import parse_json
from . import callers
from .launchers import Place

_MOST_BYTES: Final = 2**16
"""Of a message. Who sends more is none of us."""

_PATIENCE: Final = 10.0
"""Seconds of the roll call after which it is said who is missing."""

GRACE: Final = 3.0
"""Seconds in which a process may still come to the error that another one has had."""

_PAUSE: Final = 0.3

Message = dict[str, Any]


class RollCall(NamedTuple):
    """What all processes of a job have agreed on before JAX starts."""

    connections: "dict[int, Connection]"
    """By process: of process 0 to all others, of these to process 0."""
    names: dict[int, str]
    address: str
    """Where JAX's service is to be, as the others reach it."""
    bind_address: str


class Connection:
    """Messages over a socket, a line of JSON each."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.since = self.heard = time.monotonic()
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
            messages = [parse_json(line, _MOST_BYTES) for line in lines]
        except ValueError:
            return None
        if len(self._buffer) > _MOST_BYTES:
            return None
        if not all(isinstance(message, dict) for message in messages):
            return None
        return messages

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.close()


class Lifeline:
    """What the processes of a job hear of each other while it runs.

    A thread of every process listens, and tells process 0 once a second what its own
    is doing; process 0 passes on what all must know.

    Args:
        place: of this process.
        roll: what `call_the_roll` gave.
        timeout: seconds without a word after which a process counts as dead.
        end: ends this process, with a text for the user. Called in a thread.

    Attributes:
        where: what this process is doing, for the others to tell if it dies.
        lost: why each process is gone that should not be.
        is_fitting: whether it now needs all others.
    """

    def __init__(
        self, place: Place, roll: RollCall, timeout: float, end: Callable[[str], None]
    ):
        self.place = place
        self.names = roll.names
        self.timeout = timeout
        self.where = "before the first fit"
        self.lost: dict[int, str] = {}
        self._connections = roll.connections
        self._end_process = end
        self._fits = 0
        self.is_fitting = False
        self._failing = False
        self._heard_at: dict[int, tuple[float, str]] = {}
        self._done: dict[int, str] = {}
        self._thread = threading.Thread(
            target=self._watch, name="jaxdp Lifeline", daemon=True
        )
        # A forked worker would keep the connections open after this process's death.
        os.register_at_fork(after_in_child=self._close)

    def start(self) -> None:
        self._thread.start()

    def begin_fit(self) -> None:
        """From now on no other process may go missing."""
        self._fits, self.is_fitting = self._fits + 1, True
        for process, where in self._done.items():
            self._end_later(f"{self.names[process]} has ended, {where}", self._fits)

    def end_fit(self, failure: str | None = None) -> None:
        """The fit has ended here; elsewhere too, unless by a `failure` of this one."""
        if self.is_fitting and failure is not None:
            self._tell({"failed": f"{self.where}: {failure}", "fit": self._fits})
        self.is_fitting = False

    def fail(self, failure: str) -> None:
        """Tells all others that this process ends now, and by what.

        From now on what they tell does not end it.
        """
        self._failing = True
        # If it fails by the death of another one, that will be heard of soon.
        time.sleep(_PAUSE)
        self._tell({"failed": f"{self.where}: {failure}", "fit": None})

    def wait_for_others(self) -> None:
        """To be called last: process 0 waits for the others to leave.

        With it goes JAX's service, and JAX ends them before they can tell anything.
        """
        end = time.monotonic() + 2 * GRACE
        while (
            self.place.process_id == 0 and self._connections and time.monotonic() < end
        ):
            time.sleep(0.02)

    def leave(self) -> None:
        """This process has come to its end, and is not missed from now on."""
        self._tell({"done": self.where})

    def _tell(self, message: Message) -> None:
        message = {"from": self.place.process_id, **message}
        for connection in list(self._connections.values()):
            connection.send(message)

    def _watch(self) -> None:
        # Not so often that process 0 of a large job is kept busy.
        interval = max(min(1.0, self.timeout / 5), self.place.num_processes / 500)
        spoke = 0.0
        with selectors.DefaultSelector() as selector:
            for process, connection in self._connections.items():
                selector.register(connection.sock, selectors.EVENT_READ, process)
            while self._connections:
                for key, _ in selector.select(interval):
                    messages = self._connections[key.data].receive()
                    for message in messages or ():
                        self._hear(message, key.data)
                    if messages is None:
                        selector.unregister(key.fileobj)
                        self._lose(key.data, "its connection was closed")
                now = time.monotonic()
                if now - spoke > interval:
                    spoke = now
                    self._tell({"at": self.where})
                for process, connection in list(self._connections.items()):
                    silent = now - connection.heard
                    if silent > self.timeout and process not in self._done:
                        selector.unregister(connection.sock)
                        self._lose(process, f"not a word of it for {silent:.0f} s")

    def _hear(self, message: Message, teller: int) -> None:
        if not callers.is_message(message) or message["from"] not in self.names:
            return
        process = message["from"]
        if self.place.process_id == 0 and process != teller:
            return  # only process 0 speaks for others
        if "at" in message:
            self._heard_at[process] = time.monotonic(), str(message["at"])
            return
        if self.place.process_id == 0:
            for other, connection in list(self._connections.items()):
                if other != process:
                    connection.send(message)
        name = self.names[process]
        if "dead" in message:
            self._end(message["dead"], message.get("text", ""))
        elif "done" in message:
            self._done[process] = str(message["done"])
            if self.is_fitting:
                self._end_later(f"{name} has ended, {message['done']}", self._fits)
        elif "failed" in message:
            text, fit = f"{name} failed, {message['failed']}", message.get("fit")
            if fit is None:
                self.lost.setdefault(process, text)
            self._end_later(text, fit)

    def _lose(self, process: int, how: str) -> None:
        self._connections.pop(process).close()
        if process in self._done or process in self.lost:
            return
        text = f"{self.names[process]} died ({how})"
        if process in self._heard_at:
            when, where = self._heard_at[process]
            text += f"; {time.monotonic() - when:.1f} s before it was {where}"
        if self.place.process_id == 0:
            self._tell({"dead": process, "text": text})
        self._end(process, text)

    def _end(self, process: int, text: str) -> None:
        if process == self.place.process_id:
            return
        self.lost.setdefault(process, text)
        if not self._failing:
            self._end_process(text)

    def _end_later(self, text: str, fit: int | None) -> None:
        """Ends this process after a while, in which it may fail by itself.

        All may have had the same error, and each may have something to do about it.

        Args:
            text: for the user.
            fit: only if it is still in this one.
        """

        def end() -> None:
            is_concerned = fit is None or self.is_fitting and self._fits == fit
            if is_concerned and not self._failing:
                self._end_process(text)

        timer = threading.Timer(GRACE, end)
        timer.daemon = True
        timer.start()

    def _close(self) -> None:
        for connection in self._connections.values():
            connection.close()


def call_the_roll(
    place: Place, facts: Mapping[str, Any], timeout: float, bind: str | None = None
) -> RollCall:
    """Waits until all processes are there, and compares what they are.

    Args:
        place: of this process.
        facts: what must be the same for all, by name.
        timeout: seconds.
        bind: the address of this machine that process 0 listens at.

    Raises:
        OSError: if process 0 can't listen at any of `place.ports`, or a process may
            not open enough files.
        TimeoutError: if somebody is missing after `timeout`.
        RuntimeError: if the processes don't belong together.
    """
    callers.check_room(place.process_id, place.num_processes)
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
    host = _bind_host(place) if bind is None else bind
    listener, port = _listen(place, host)
    cards: dict[int, Message] = {0: me}
    there: list[tuple[int, Connection]] = []
    wrong = missing = ""
    said = False
    deadline = start + timeout
    with listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while len(cards) < place.num_processes:
            now = time.monotonic()
            absent = listed("process", set(range(place.num_processes)) - set(cards))
            if now > deadline:
                missing = f"{absent} of {place.num_processes} not there"
                break
            if now > start + _PATIENCE and not said:
                said = True
                say(f"process 0 waits for {absent} at {_join(place.host, port)}")
            callers.hang_up(selector, place.num_processes + callers.MOST_STRANGERS)
            for key, _ in selector.select(min(0.5, timeout)):
                if key.data is None:
                    sock = callers.accepted(listener, place.num_processes)
                    if sock is not None:
                        selector.register(sock, selectors.EVENT_READ, Connection(sock))
                    continue
                connection: Connection = key.data
                messages = connection.receive()
                if messages == []:
                    continue
                selector.unregister(key.fileobj)
                card = messages[0] if messages else {}
                if not callers.is_card(card) or card["job"] != place.job:
                    connection.send({"other": place.job})
                    connection.close()
                    continue
                connection.send({"welcome": True})
                if not wrong and (wrong := _what_is_wrong(cards, card)):
                    # Those who are on their way shall hear it too.
                    deadline = min(deadline, now + GRACE)
                there.append((card["process"], connection))
                cards.setdefault(card["process"], card)
        callers.hang_up(selector, 0)
    names = {p: f"process {p} ({card['name']})" for p, card in cards.items()}
    answer = {"wrong": wrong, "missing": missing, "names": names, "port": port}
    for _, connection in there:
        connection.send(answer)
    _check_answer(answer, place, timeout)
    return RollCall(dict(there), names, _join(place.host, port), _join(host, port))


def _as_guest(place: Place, me: Message, timeout: float) -> RollCall:
    start = time.monotonic()
    ports = listed("port", place.ports)
    who = f"process {place.process_id} of {place.num_processes}"
    said = False
    while True:
        why = "nothing listens there"
        for port in place.ports:
            connection, messages, problem = _call(place.host, port, me)
            if connection is None:
                why = problem or why
                continue
            why = "it ended while the others were starting"
            patience = time.monotonic() + timeout + 2 * GRACE  # process 0 has less
            while messages is not None:
                for message in messages:
                    if callers.is_answer(message, place.num_processes):
                        _check_answer(message, place, timeout)
                        names = {int(p): name for p, name in message["names"].items()}
                        address = _join(place.host, port)
                        return RollCall({0: connection}, names, address, "")
                messages = connection.receive()
                if messages is not None and time.monotonic() > patience:
                    why, messages = "it did not say whether all are there", None
            connection.close()
        waited = time.monotonic() - start
        if waited > timeout:
            raise TimeoutError(
                f"{who} did not reach process 0 at {place.host}, {ports}, within"
                f" {timeout:g} s: {why}. Has it been started, is that its machine, and"
                " does a firewall let others in? `initialization_timeout` is how long"
                " to wait."
            )
        if waited > _PATIENCE and not said:
            said = True
            say(
                f"{who} waits for process 0 at {place.host}, {ports}: {why}",
                everywhere=True,
            )
        time.sleep(0.1)


def _call(
    host: str, port: int, me: Message
) -> tuple[Connection | None, list[Message] | None, str]:
    """A connection to process 0 and what it has said by now; else what is there."""
    try:
        connection = Connection(socket.create_connection((host, port), 5.0))
    except ConnectionRefusedError:
        return None, None, ""
    except OSError as error:
        return None, None, str(error)
    connection.send(me)
    messages = connection.receive()
    if messages and "welcome" in messages[0]:
        return connection, messages, ""
    connection.close()
    if messages and "other" in messages[0]:
        return None, None, f"process 0 of another job listens at port {port}"
    return None, None, f"another program listens at port {port}"


def _what_is_wrong(cards: Mapping[int, Message], card: Message) -> str:
    """Why the one with this card can't join those that are there, or nothing."""
    me, process = cards[0], card["process"]
    if card["of"] != me["of"]:
        return (
            f"process {process} ({card['name']}) says that there are {card['of']}"
            f" processes, process 0 ({me['name']}) says {me['of']}"
        )
    if process in cards:
        return (
            f"two processes say that they are number {process}:"
            f" {cards[process]['name']} and {card['name']}"
        )
    for name, value in me["facts"].items():
        if card["facts"].get(name) != value:
            return (
                f"{name} is {value} for process 0 ({me['name']}), but"
                f" {card['facts'].get(name)} for process {process} ({card['name']});"
                " all processes must run the same"
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
            f"{place.host}, where process 0 is to be found, is no name of a machine:"
            f" {error}. Pass `coordinator_address`='host:port', or set"
            " JAX_COORDINATOR_ADDRESS."
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
        listener = socket.socket(family, socket.SOCK_STREAM)
        # As JAX's service does: the port of a job that has just ended is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(place.num_processes + callers.MOST_STRANGERS)
            listener.setblocking(False)  # a caller may be gone again
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                continue
            raise OSError(
                f"process 0 can't listen at {_join(host, port)}: {error.strerror}. It"
                f" runs on {socket.gethostname()}, which must have that address: pass"
                " the right one as `coordinator_address`='host:port', or set"
                " JAX_COORDINATOR_ADDRESS; `coordinator_bind_address` if it listens at"
                " another one than the others call."
            ) from error
        return listener, port
    raise OSError(
        f"process 0 can't listen on {socket.gethostname()}: something else does at"
        f" {listed('port', place.ports)} of {host}. It may be a run that was not ended."
        " Pass another port in `coordinator_address`='host:port', or set"
        " JAX_COORDINATOR_ADDRESS, for all processes."
    )


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
