"""What can be wrong when the processes of a job start: named, and by all of them."""

import concurrent.futures
import socket

import pytest
from crew import free_port

from jaxdp.distributed.launchers import Place
from jaxdp.distributed.roll_call import call_the_roll


def test_a_missing_process_is_named(crew):
    codes, outputs = crew(
        "nothing", processes=3, only=[0, 1], start={"initialization_timeout": 2.0}
    ).join()
    assert codes == [1, 1]
    for output in outputs:
        assert "TimeoutError: after 2 s process 2 of 3 not there" in output


def test_a_missing_process_0_is_named(crew):
    job = crew("nothing", only=[1], start={"initialization_timeout": 1.0})
    (code,), (_, *_) = job.join()
    assert code == 1
    output = (job.folder / "1.txt").read_text()
    assert f"did not reach process 0 at 127.0.0.1, port {job.port}" in output
    assert "nothing listens there" in output


def test_a_port_in_use_is_named(crew):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        codes, outputs = crew(
            "nothing", start={"port": port, "initialization_timeout": 2.0}
        ).join()
    assert codes == [1, 1]
    assert f"another program uses port {port}" in outputs[0]
    assert "another program listens" in outputs[1]


def test_two_processes_of_one_number_are_named(crew):
    codes, outputs = crew("nothing", only=[0, 1, 1], processes=3).join()
    assert codes == [1, 1, 1]
    assert "two processes say that they are number 1: " in outputs[0]
    assert "two processes say that they are number 1: " in outputs[1]


def test_other_versions_are_named(crew):
    start = {"versions": {1: {"jax": "0.1.2"}}}
    codes, outputs = crew("nothing", start=start).join()
    assert codes == [1, 1]
    for output in outputs:
        assert "the version of jax is " in output
        assert ", but 0.1.2 for process 1 (" in output


def test_a_process_that_fails_before_any_fit_ends_all(crew):
    codes, outputs = crew("fail_alone", processes=3).join()
    assert codes == [71, 1, 71]
    assert "ValueError: a bad day" in outputs[1]
    for output in (outputs[0], outputs[2]):
        assert "failed, before the first fit: ValueError: a bad day" in output


def test_a_device_used_too_early_is_named(crew):
    codes, outputs = crew("nothing", start={"too_early": True}).join()
    assert codes == [1, 1]
    assert "was called after the first use of a device" in outputs[0]


def test_processes_start_with_nothing_but_their_variables(crew):
    codes, outputs = crew("nothing", start={"devices": 2}).join()
    assert codes == [0, 0]
    assert "here" in outputs[0] and "here" in outputs[1]


@pytest.mark.parametrize("count, length", [(250, 253), (1000, 70)])
def test_many_processes_with_long_names_hear_who_is_there(monkeypatch, count, length):
    """The answer has all names: more bytes than any other message may have."""
    monkeypatch.setattr(socket, "gethostname", lambda: "h" * length)
    ports = (free_port(),)

    def call(process):
        place = Place("x", process, count, "127.0.0.1", ports, "job", None, None)
        return call_the_roll(place, {"jax": "1"}, 60.0)

    with concurrent.futures.ThreadPoolExecutor(count) as threads:
        found = list(threads.map(call, range(count)))
    for roll_call in found:
        assert len(roll_call.names) == count
        for connection in roll_call.connections.values():
            connection.close()
