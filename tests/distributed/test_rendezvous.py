"""All processes of a job name the fault if they can't start together."""

import concurrent.futures
import contextlib
import json
import re
import socket
import threading
import time

import pytest
from toys import free_port

from jaxdp.distributed.launchers import RankInfo
from jaxdp.distributed.rendezvous import exchange_ranks

CARD = {"process": 1, "of": 2, "name": "x"}

STRANGERS = {
    "brackets": b"[" * 3000 + b"]" * 3000 + b"\n",
    "deep in a card": json.dumps(CARD).encode()[:-1] + b',"x":' + b"[" * 3000 + b"\n",
    "more than a message": b"x" * 200_000,
    "no text": b"\xff\xfe\n",
    "null": b"null\n",
    "nothing at all": b"",
    **{
        f"{wrong}": json.dumps(CARD | wrong).encode() + b"\n"
        for wrong in (
            {"process": 99},
            {"process": 0},
            {"process": True},
            {"name": [1]},
        )
    },
}


@pytest.mark.parametrize("options, error", [
    ({"processes": 3, "only": [0, 1], "start": {"initialization_timeout": 2.0}},
     "TimeoutError: after 2 s process 2 of 3 not there"),
    ({"processes": 3, "only": [0, 1, 1]},
     r"the processes don't belong together: process 1 \(.* has the number of "),
    ({"start": {"too_early": True}}, "was called after the first use of a device"),
], ids=["missing", "doubled", "too early"])  # fmt: skip
def test_each_process_names_why_they_do_not_start(crew, options, error):
    outputs = crew("nothing", **options).finish(1)
    assert all(re.search(error, output) for output in outputs[:2])


def test_a_missing_process_0_is_named(crew):
    job = crew("nothing", only=[1], start={"initialization_timeout": 1.0})
    (code,), (_, *_) = job.join()
    assert code == 1
    output = (job.folder / "1.txt").read_text()
    said = f"process 1 of 2 does not reach process 0 at 127.0.0.1:{job.port}: "
    assert f"{said}[Errno 111] Connection refused" in output


@pytest.fixture
def fast_clock(monkeypatch):
    """A clock by which processes wait, twenty times as fast as others."""
    start, monotonic = time.monotonic(), time.monotonic
    clock = lambda: start + 20 * (monotonic() - start)  # noqa: E731
    monkeypatch.setattr(time, "monotonic", clock)


def test_who_is_missing_is_said_while_others_wait(fast_clock, caplog):
    port = free_port()
    with pytest.raises(TimeoutError, match="process 1 of 2 not there"):
        join(0, port, timeout=21.0)
    assert f"process 0 waits at 127.0.0.1:{port} for process 1" in caplog.text


@pytest.mark.slow
def test_a_port_in_use_is_named(crew):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        outputs = crew(
            "nothing", start={"port": port, "initialization_timeout": 2.0}
        ).finish(1)
    assert f"process 0 can't listen at 127.0.0.1, port {port}: " in outputs[0]
    assert "Address already in use" in outputs[0]
    assert "another program listens there" in outputs[1]


def join(process, port, count=2, timeout=20.0):
    """The roll call, as one of the processes has it."""
    exchange_ranks(RankInfo(process, count, "127.0.0.1", port), timeout, "127.0.0.1")


def call(port):
    end = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 5)
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.fixture
def threads():
    with concurrent.futures.ThreadPoolExecutor(500) as pool:
        yield pool


def test_strangers_do_not_disturb_the_roll_call(threads):
    port = free_port()
    host = threads.submit(join, 0, port)
    with contextlib.ExitStack() as strangers:
        for line in STRANGERS.values():
            stranger = strangers.enter_context(call(port))
            with contextlib.suppress(OSError):  # it may hang up before all is sent
                stranger.sendall(line)
        threads.submit(join, 1, port).result(60)
        host.result(60)
    with pytest.raises(ConnectionRefusedError):  # nothing listens after it
        socket.create_connection(("127.0.0.1", port), 5)


def test_callers_that_say_nothing_are_hung_up_on(threads):
    port = free_port()
    host = threads.submit(join, 0, port, timeout=2.5)
    with call(port) as stranger:
        stranger.settimeout(5)
        assert stranger.recv(100) == b""
    with pytest.raises(TimeoutError, match="process 1 of 2 not there"):
        host.result(60)


@pytest.mark.parametrize("answer", [b"[" * 3000 + b"\n", b'{"wrong": ""}\n', b""])
def test_one_that_poses_as_process_0_is_not_waited_for_without_end(
    answer, fast_clock, threads
):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port, stop = server.getsockname()[1], threading.Event()

        def pose():
            while not stop.is_set():
                with contextlib.suppress(OSError), server.accept()[0] as sock:
                    sock.sendall(answer)

        posing = threads.submit(pose)
        with pytest.raises(TimeoutError, match="another program listens there"):
            join(1, port, timeout=6.0)
        stop.set()
        posing.result(60)


def test_many_processes_with_long_names_come_together(monkeypatch, threads):
    monkeypatch.setattr(socket, "gethostname", lambda: "h" * 253)
    port, count = free_port(), 400
    calls = [threads.submit(join, i, port, count, 60.0) for i in range(count)]
    assert [each.result(90) for each in calls] == [None] * count
