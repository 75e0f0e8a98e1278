"""Processes that die, fail or stop: the others end too, and say which one it was."""

import os
import re

import pytest

pytest.importorskip("torch")

import tasks


@pytest.mark.parametrize("index", [0, 1])
def test_a_killed_process_ends_the_others(crew, index):
    job = crew("fit", processes=3, at=(index, 5, tasks.kill))
    codes, outputs = job.join()
    assert codes[index] == -9
    for other in {0, 1, 2} - {index}:
        # An error of JAX's is sometimes quicker, if it is process 0.
        assert codes[other] == 71 or codes[other] == 1 and index == 0
        assert re.search(rf"jaxdp: process {index} \(.* died", outputs[other])


@pytest.mark.parametrize("index", [0, 1])
def test_a_failing_callback_ends_all(crew, index):
    codes, outputs = crew("fit", at=(index, 5, tasks.fail)).join()
    assert codes[index] == 1 and codes[1 - index] == 71
    assert "raised by the callback At in on_boundary" in outputs[index]
    said = f"jaxdp: process {index} ("
    assert said in outputs[1 - index]
    assert "failed, at step 5 of epoch 0: ValueError: a bad day" in outputs[1 - index]


def test_a_failing_loader_ends_all(crew):
    codes, outputs = crew("fit_with_a_broken_row").join()
    assert codes[0] != 0 and codes[1] != 0
    for output in outputs:
        assert "OSError: a row can't be read" in output


@pytest.mark.parametrize("index", [0, 1])
def test_a_stopped_process_ends_the_others(crew, index):
    job = crew("fit", at=(index, 5, tasks.stop), start={"heartbeat_timeout": 8.0})
    codes, outputs = job.join(but=[index])
    assert codes[1 - index] == 71
    said = rf"process {index} \(.*not a word of it for \d+ s"
    assert re.search(said, outputs[1 - index])

    job.signal(index, "SIGCONT")  # it does not go on alone
    codes, outputs = job.join()
    assert codes[index] != 0
    assert re.search(rf"process {1 - index} \(.* died", outputs[index])


@pytest.mark.slow
def test_a_process_that_leaves_ends_the_others(crew):
    codes, outputs = crew("fit", at=(1, 5, tasks.leave)).join()
    assert codes[0] == 71
    assert "failed, at step 5 of epoch 0: SystemExit: 0" in outputs[0]


def test_a_process_that_leaves_before_a_test_ends_the_others(crew):
    codes, outputs = crew("leave_a_test").join()
    assert codes[0] == 71
    said = r"jaxdp: process 1 \(.* has ended, after test. Process 0, in test, can't"
    assert re.search(said, outputs[0])


def test_an_error_that_all_have_and_catch_ends_nobody(crew):
    codes, outputs = crew("catch_it").join()
    assert codes == [0, 0]
    for output in outputs:
        # Gloo may write between two words.
        assert "caught" in output and "a row can't be read" in output
        assert "went on to step 8" in output


@pytest.mark.slow
def test_kills_while_several_processes_write_a_checkpoint(crew, tmp_path):
    codes, outputs = crew("save_often", path=str(tmp_path / "whole")).join()
    assert codes == [0, 0]
    (end,) = re.findall("ended .*", outputs[0])

    folder = tmp_path / "killed"
    for index in (0, 1, 1, 0):
        job = crew("save_often", path=str(folder))
        saved = whole(folder)
        while not (whole(folder) - saved and being_written(folder)):
            assert all(process.is_alive() for process in job.processes)
        job.signal(index, "SIGKILL")
        codes, outputs = job.join()
        assert codes[index] == -9 and codes[1 - index] != 0

    codes, outputs = crew("save_often", path=str(folder)).join()
    assert codes == [0, 0]
    assert re.search(r"resumed step \d+", outputs[0])
    assert [re.findall("ended .*", output) for output in outputs] == [[end], [end]]
    assert not being_written(folder)


def whole(folder):
    names = os.listdir(folder) if folder.exists() else []
    return {int(name) for name in names if name.isdecimal()}


def being_written(folder):
    names = os.listdir(folder) if folder.exists() else []
    return [name for name in names if "tmp" in name]
