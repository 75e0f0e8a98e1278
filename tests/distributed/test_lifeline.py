"""The roll call with strangers at the door."""

import contextlib
import json
import resource
import socket
import threading
import time

import pytest

from jaxdp.distributed import roll_call
from jaxdp.distributed.launchers import Place
from jaxdp.distributed.roll_call import call_the_roll

CARD = {"jaxdp": 1, "job": "j", "process": 1, "of": 2, "name": "x", "facts": {}}

LINES = {
    "brackets without end": b"[" * 60_000 + b"\n",
    "brackets that end": b"[" * 30_000 + b"]" * 30_000 + b"\n",
    "deep in a card": json.dumps(CARD).encode()[:-1] + b',"x":' + b"[" * 30_000 + b"\n",
    "more than a message": b"x" * 200_000,
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "no text": b"\xff\xfe\n",
    "null": b"null\n",
    "number": b"9" * 5000 + b"\n",
    "process 99": json.dumps(CARD | {"process": 99}).encode() + b"\n",
    "process -1": json.dumps(CARD | {"process": -1}).encode() + b"\n",
    "process true": json.dumps(CARD | {"process": True}).encode() + b"\n",
    "process 1.0": json.dumps(CARD | {"process": 1.0}).encode() + b"\n",
    "of true": json.dumps(CARD | {"process": 0, "of": True}).encode() + b"\n",
    "facts in a list": json.dumps(CARD | {"facts": [1]}).encode() + b"\n",
    "nothing at all": b"",
    "another job": json.dumps(CARD | {"job": "k"}).encode() + b"\n",
}


def place(process, port):
    return Place("a test", process, 2, "127.0.0.1", (port,), "j")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class InThread:
    """What a function gives or raises, in a thread of its own."""

    def __init__(self, function, *arguments):
        self.found = self.error = None

        def run():
            try:
                self.found = function(*arguments)
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def result(self):
        self.thread.join(30)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.found


def call(port):
    end = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 5)
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_strangers_do_not_disturb_the_roll_call():
    port = free_port()
    host = InThread(call_the_roll, place(0, port), {"version": "1"}, 20.0)
    with contextlib.ExitStack() as strangers:
        for line in LINES.values():
            stranger = strangers.enter_context(call(port))
            with contextlib.suppress(OSError):  # it may hang up before all is sent
                stranger.sendall(line)
        guest = InThread(call_the_roll, place(1, port), {"version": "1"}, 20.0)
        rolls = guest.result(), host.result()
    assert [set(roll.names) for roll in rolls] == [{0, 1}, {0, 1}]
    assert set(rolls[1].connections) == {1}
    for roll in rolls:
        for connection in roll.connections.values():
            connection.close()


def test_callers_that_say_nothing_are_hung_up_on(monkeypatch):
    monkeypatch.setattr(roll_call, "_SILENCE", 0.1)
    port = free_port()
    host = InThread(call_the_roll, place(0, port), {}, 2.0)
    with call(port) as silent, call(port) as slow:
        slow.sendall(b"{")
        for stranger in silent, slow:
            stranger.settimeout(5)
            assert b"welcome" not in stranger.recv(100)
    with pytest.raises(TimeoutError, match="process 1 of 2 not there"):
        host.result()


@pytest.mark.parametrize(
    "answer",
    [
        b'{"welcome": true}\n{"names": ' + b"[" * 30_000 + b"\n",
        b'{"welcome": true}\n',
    ],
)  # fmt: skip
def test_one_that_poses_as_process_0_is_not_waited_for_without_end(answer, monkeypatch):
    monkeypatch.setattr(roll_call, "_MORE_TIME", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port, stop = server.getsockname()[1], threading.Event()

        def pose():
            while not stop.is_set():
                with contextlib.suppress(OSError), server.accept()[0] as sock:
                    sock.sendall(answer)
                    while not stop.wait(0.02):
                        sock.sendall(b'{"more": 1}\n')

        server_thread = InThread(pose)
        with pytest.raises(
            TimeoutError, match="process 1 of 2 did not reach process 0"
        ):
            InThread(call_the_roll, place(1, port), {}, 0.3).result()
        stop.set()
        server_thread.result()


def test_too_few_files_are_told_before_anybody_is_called(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (66, 4096))
    with pytest.raises(OSError, match="0 of 2 can open 66 files.* `ulimit -n 68"):
        call_the_roll(place(0, 0), {}, 5.0)
