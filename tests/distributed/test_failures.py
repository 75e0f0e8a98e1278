"""Processes that die, fail or stop: none ends with exit code 0, and none hangs."""

import os
import re
import time

import pytest

pytest.importorskip("torch")

import tasks

SOON = {"heartbeat_timeout": 8.0, "shutdown_timeout": 8.0}


ENDS = {
    # Its exit code, a line of the others if it is not process 0, and their seconds.
    tasks.kill: (-9, "tasks are unhealthy", 30),
    tasks.fail: (
        1,
        r"process 1 on \S+ has failed: ValueError: a bad day; it was at",
        10,
    ),
    tasks.leave: (None, r"process 1 on \S+ has ended its program, .*; it was at", 10),
    tasks.stop: (None, "", 30),
}


@pytest.mark.slow_but("1-kill", "1-fail")
@pytest.mark.parametrize("what", ENDS, ids=lambda what: what.__name__)
@pytest.mark.parametrize("index", [0, 1])
def test_a_process_that_ends_before_the_others_ends_them(crew, index, what):
    code, line, seconds = ENDS[what]
    count = 3 if what is tasks.kill else 2
    job = crew("fit", processes=count, at=(index, 5, what), start=SOON)
    job.wait_for("done 5", index)
    start = time.monotonic()
    others = [process for n, process in enumerate(job.processes) if n != index]
    for process in others:  # `Lockstep` would wait for 600 s
        process.join(60)
    assert time.monotonic() - start < seconds
    if what is tasks.stop:
        job.signal(index, "SIGCONT")  # it does not go on alone
    codes, outputs = job.join()
    assert 0 not in codes, outputs
    assert code in (None, codes[index])
    if what is tasks.fail:
        assert "raised by the callback At in on_boundary" in outputs[index]
    if index:  # with process 0 goes the service that would name it
        assert any(re.search(line, output) for output in outputs)
    if index and what is tasks.fail:
        pattern = "heard of an exception at (.*)"
        heard, raised = (float(*re.findall(pattern, output)) for output in outputs)
        assert heard - raised < 1.9  # which JAX's barrier takes at least to give up


def test_one_that_raises_does_not_wait_for_the_others(crew):
    job = crew("fail_alone", processes=2)  # the other one sleeps for a minute
    job.wait_for("a bad day", index=1)
    seen = time.monotonic()
    job.processes[1].join(60)
    assert job.processes[1].exitcode == 1 and time.monotonic() - seen < 10


@pytest.mark.slow
def test_a_timeout_holds_also_where_a_step_is_in_flight(crew, tmp_path):
    """Which a logger waits for, as the fit ends."""
    job = crew(
        "fit",
        before=(1, 5, tasks.stop),
        lockstep={"timeout": 4.0, "warn_after": 2.0},
        logs=str(tmp_path / "logs"),
        log_every_n_steps=1,
        processes=2,
    )
    job.wait_for("before 5", index=1)
    seen = time.monotonic()
    job.processes[0].join(60)
    assert time.monotonic() - seen < 4 + 10 + 6
    assert job.processes[0].exitcode == 1
    told = r"has waited for [45] s for process 1 on \S+ \(`Lockstep\(timeout=...\)`\)"
    assert re.search(told, job.output(0))


@pytest.mark.slow
def test_an_error_that_all_have_and_catch_ends_nobody(crew):
    outputs = crew("catch_it").finish()
    for output in outputs:
        # Gloo may write between two words.
        assert "caught" in output and "a row can't be read" in output
        assert "went on to step 8" in output


@pytest.mark.slow
def test_kills_while_several_processes_write_a_checkpoint(crew, tmp_path):
    outputs = crew("save_often", path=str(tmp_path / "whole")).finish()
    (end,) = re.findall("ended .*", outputs[0])

    folder = tmp_path / "killed"
    for index in (0, 1, 1, 0):
        job = crew("save_often", path=str(folder), start=SOON)
        saved = whole(folder)
        while not (whole(folder) - saved and being_written(folder)):
            assert all(process.is_alive() for process in job.processes)
        job.signal(index, "SIGKILL")
        codes, outputs = job.join()
        assert codes[index] == -9 and codes[1 - index] != 0

    outputs = crew("save_often", path=str(folder)).finish()
    assert re.search(r"resumed step \d+", outputs[0])
    assert [re.findall("ended .*", output) for output in outputs] == [[end], [end]]
    assert not being_written(folder)


def whole(folder):
    return {name for name in listed(folder) if name.isdecimal()}


def being_written(folder):
    return [name for name in listed(folder) if "tmp" in name]


def listed(folder):
    return os.listdir(folder) if folder.exists() else []
