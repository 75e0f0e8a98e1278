"""Nobody reads what a run says: the terminal is closed, `tee` has ended."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from toys import on_one_device as make

HERE = pathlib.Path(__file__).parent


def start(folder, steps, *shell, **options):
    paths = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
    return subprocess.Popen(
        [*shell, sys.executable, str(HERE / "unheard.py"), str(folder), steps],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_is_answered_when_nobody_reads(tmp_path, table, name):
    run = start(tmp_path, "1000000", stdout=-1, stderr=subprocess.STDOUT)
    progress = tmp_path / "progress"
    while not (progress.exists() and progress.read_text() not in ("", "1", "2")):
        assert run.poll() is None, run.communicate()[0].decode()
        run.stdout.read1()  # as `tee` does
    run.stdout.close()  # and now it ends
    before = int(progress.read_text())
    while int(progress.read_text() or 0) < before + 3:
        assert run.poll() is None, "the run ends with its reader"
        time.sleep(0.01)
    run.send_signal(getattr(signal, name))
    if name == "SIGHUP":  # from the kernel and from the shell
        run.send_signal(signal.SIGHUP)
    assert run.wait(60) == 143
    folder = tmp_path / "checkpoints"
    (checkpoint,) = [p for p in folder.iterdir() if p.name.isdecimal()]
    trainer = make()
    trainer.load(checkpoint)
    assert trainer.global_step == int(progress.read_text())
    table.add(f"{name} when nobody reads the output", "saved; exit code 143")


@pytest.mark.slow
def test_a_healthy_run_goes_on_when_nobody_reads(tmp_path, table):
    run = start(tmp_path, "all", stderr=subprocess.PIPE)
    assert run.wait(120) == 0, run.stderr.read().decode()
    run.stderr.close()
    trainer = make()
    trainer.load(tmp_path / "checkpoints" / "30")
    assert (tmp_path / "metrics.csv").read_text().count("\n") == 4  # a row per epoch
    table.add("stderr is a broken pipe, on a full disk or none", "nothing", tries=3)
