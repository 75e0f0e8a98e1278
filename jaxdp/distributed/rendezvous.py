"""The rendezvous: the processes of a job find each other before JAX starts.

JAX ends a process without an exception if another one is missing or a port is taken. So
process 0 first listens at the address of JAX's later service. Each other process sends
it a line of JSON, and gets one back when all have connected; then the port is closed.
Like JAX's service, the rendezvous asks for no credentials.
"""

import contextlib
import json
import os
import socket
import time
from typing import Any, Final

from ..basics.console import join_numbers, log_info
from ..basics.files import check_fields
from .launchers import RankInfo

_LOG_MISSING_SECONDS: Final = 10.0
"""Seconds after which process 0 says which processes it waits for."""
_LATE_SECONDS: Final = 3.0  # for processes that come after an error was found
_RECEIVE_SECONDS: Final = 1.0  # in which a client must have sent its message
_MAX_BYTES: Final = 4096  # of a message

_RANK_FIELDS: Final = {"process": int, "of": int, "name": str}
_ANSWER_FIELDS: Final = {"wrong": str, "missing": str}


def exchange_ranks(rank: RankInfo, timeout: float, bind: str) -> None:
    """Waits until all processes have connected; raises unless all ranks are there."""
    name = f"{socket.gethostname()}, pid {os.getpid()}"
    own = {"process": rank.index, "of": rank.count, "name": name}
    if rank.index:
        answer = _send_rank(rank, own, timeout)
    else:
        answer = _serve_ranks(rank, own, timeout, bind)
    if answer["wrong"]:
        raise RuntimeError(f"the processes don't belong together: {answer['wrong']}.")
    if answer["missing"]:
        raise TimeoutError(
            f"after {timeout:g} s {answer['missing']} of {rank.count} not there. Was"
            f" every process started, with the address of process 0, {rank.address}?"
            " Look at their own output. `initialization_timeout` is how long to wait."
        )


def _serve_ranks(rank: RankInfo, own: Any, timeout: float, bind: str) -> dict[str, str]:
    """Waits, as process 0, for a message of every other process; sends each what is
    missing or wrong.
    """
    messages, conflict = {0: own}, ""
    clients: list[socket.socket] = []
    deadline = time.monotonic() + timeout
    log_time = time.monotonic() + _LOG_MISSING_SECONDS

    def format_missing() -> str:
        missing = {*range(rank.count)} - {*messages}
        return join_numbers("process", missing)[:1000] if missing else ""

    with _open_listener(rank, bind) as listener:
        while len(messages) < rank.count and time.monotonic() < deadline:
            if time.monotonic() > log_time:
                log_time = deadline
                log_info(f"process 0 waits at {rank.address} for {format_missing()}")
            with contextlib.suppress(TimeoutError, ConnectionError):
                client = listener.accept()[0]
                message = _receive(client, _RECEIVE_SECONDS, _RANK_FIELDS)
                if message is None or not 0 < message["process"] < message["of"]:
                    client.close()  # another program
                    continue
                clients.append(client)
                if not conflict and (conflict := _find_conflict(messages, message)):
                    deadline = min(deadline, time.monotonic() + _LATE_SECONDS)
                messages.setdefault(message["process"], message)
    answer = {"wrong": conflict[:1000], "missing": format_missing()}
    for client in clients:
        with client:
            _send(client, answer)
    return answer


def _send_rank(rank: RankInfo, own: Any, timeout: float) -> dict[str, str]:
    """Sends the message of this process to process 0, and waits for its answer."""
    deadline = time.monotonic() + timeout
    while True:
        reason = "another program listens there"
        try:
            with socket.create_connection((rank.host, rank.port), 5.0) as host:
                _send(host, own)
                seconds = timeout + 2 * _LATE_SECONDS  # process 0 has less
                answer = _receive(host, seconds, _ANSWER_FIELDS)
            if answer is not None:
                return answer
        except OSError as error:
            reason = str(error)
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"process {rank.index} of {rank.count} does not reach process 0 at"
                f" {rank.address}: {reason}. Is that its machine, and does a firewall"
                " let others in? (`initialization_timeout`)"
            )
        time.sleep(0.1)


def _send(sock: socket.socket, message: Any) -> None:
    with contextlib.suppress(OSError):  # a lost connection shows when it is read
        sock.sendall(json.dumps(message).encode() + b"\n")


def _receive(sock: socket.socket, seconds: float, types: Any) -> Any:
    """Returns a message with these fields; None if none arrives within `seconds`."""
    sock.settimeout(seconds)
    try:
        with sock.makefile("rb") as lines:
            message = json.loads(lines.readline(_MAX_BYTES))
        check_fields(message, types, "message")
    except (OSError, ValueError, RecursionError):
        return None
    return message


def _find_conflict(messages: dict[int, Any], message: Any) -> str:
    """Returns why the sender of `message` can't join the others, or ""."""
    sender = f"process {message['process']} ({message['name']})"
    if message["process"] in messages:
        return f"{sender} has the number of {messages[message['process']]['name']}"
    if message["of"] != messages[0]["of"]:
        return (
            f"the number of processes is {messages[0]['of']} for process 0"
            f" ({messages[0]['name']}), but {message['of']} for {sender}"
        )
    return ""


def _open_listener(rank: RankInfo, host: str) -> socket.socket:
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
