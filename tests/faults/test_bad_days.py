"""Disks, neighbours, loaders, callbacks and clocks that misbehave."""

import contextlib
import functools
import os
import resource
import signal
import subprocess

import pytest
from toys import HOOKS, At, assert_equal_leaves, batches, run_python
from toys import on_one_device as make

from jaxdp import Callback
from jaxdp.callbacks import ModelCheckpoint
from jaxdp.checkpoint import SaveFailed


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB of its own, or a limit on the size of files."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode == 0:
        yield folder
        subprocess.run(["umount", str(folder)], check=True)
    else:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        yield folder
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)


def fill(folder, saver):
    """Leaves no byte on a small disk, once what is being saved is on it."""
    saver._finish_save(wait=True)
    if os.path.ismount(folder):
        ballast = open(folder / "ballast", "wb", buffering=0)
        with ballast as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
    else:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, limit))


def empty(folder):
    if os.path.ismount(folder):
        (folder / "ballast").unlink()
    else:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


at = functools.partial(At, hook="on_boundary")


ORBAX_IS_LOUD = pytest.mark.filterwarnings(
    # Its writing threads end by exceptions that nobody waits for.
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)


@ORBAX_IS_LOUD
def test_a_full_disk_stops_the_fit_and_costs_no_checkpoint(small_disk, table):
    folder = small_disk / "run"
    saver = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=1)
    trainer = make(saver, at(3, lambda trainer: fill(small_disk, saver)))
    with pytest.raises(SaveFailed, match=r"run/4 could not be written.* B free\)\. E"):
        trainer.fit(batches(*[8] * 20))
    empty(small_disk)
    assert set(os.listdir(folder)) == {".lock", "3"}
    again = make(ModelCheckpoint(folder, every_n_train_steps=1))
    again.fit(batches(*[8] * 20), ckpt_path="last")
    assert again.global_step == 20
    saw = "SaveFailed at the next step, with the free space; the last checkpoint stays"
    table.add("a full disk", saw)


@pytest.mark.slow
@ORBAX_IS_LOUD
def test_a_full_disk_may_be_survived(small_disk, table):
    folder = small_disk / "run"
    saver = ModelCheckpoint(folder, every_n_train_steps=2, on_save_error="warn")
    full = at(3, lambda trainer: fill(small_disk, saver))
    trainer = make(saver, full, at(7, lambda trainer: empty(small_disk)))
    match = "could not be written.*Training continues"
    with pytest.warns(UserWarning, match=match) as seen:
        trainer.fit(batches(*[8] * 9))
    assert len(seen) == 2  # of steps 4 and 6
    assert set(os.listdir(folder)) == {".lock", "9"}  # the last of the fit
    make().load(folder / "9")
    saw = "a warning each time; it saves again when there is room"
    table.add("a full disk, `on_save_error='warn'`", saw, tries=2)


def test_where_nothing_can_be_written_is_found_at_the_start(tmp_path, table):
    (tmp_path / "file").write_text("")
    for path in ("/proc/run", tmp_path / "file", tmp_path / "file" / "run"):
        trainer = make(ModelCheckpoint(path))
        with pytest.raises(OSError, match="`dirpath`: checkpoints can't be written to"):
            trainer.fit(batches(8, 8))
        assert trainer.global_step == 0
    saw = "an error before the first step"
    table.add("a dirpath that can't be written to", saw, tries=3)


@pytest.mark.slow
def test_a_second_run_in_one_folder_is_refused(jobs, table):
    process, root = jobs.start("two", epochs=6, pause=0.2)
    jobs.wait_for_step(process, root, 5)
    trainer = make(ModelCheckpoint(root / "checkpoints"))
    with pytest.raises(RuntimeError, match=f"another run writes .* {process.pid} on"):
        trainer.fit(batches(8))
    process.kill()
    process.join()
    with pytest.raises(
        ValueError, match="does not fit this trainer"
    ):  # no longer the lock
        trainer.fit(batches(8), ckpt_path="last")
    inside = at(1, lambda trainer: make(ModelCheckpoint(root / "b")).fit(batches(8)))
    with pytest.raises(RuntimeError, match="or another fit of this process"):
        make(ModelCheckpoint(root / "b"), inside).fit(batches(8))
    make(ModelCheckpoint(root / "b")).fit(batches(8))
    saw = "the second is refused, with process and host; a dead run locks nothing"
    table.add("two runs in one folder", saw, tries=2)


def test_a_loader_that_raises(tmp_path, table):
    class Raising:
        def __iter__(self):
            yield from data[:5]
            raise OSError("no such image")

    data, folder = batches(*[8] * 6), tmp_path / "run"
    whole = make()
    whole.fit(data)
    with pytest.raises(OSError, match="no such image") as caught:
        make(ModelCheckpoint(folder, every_n_train_steps=2)).fit(Raising())
    assert "in batch 5 of epoch 0 of `train_loader`" in caught.value.__notes__
    again = make(ModelCheckpoint(folder))
    again.fit(data, ckpt_path="last")
    assert_equal_leaves(again.state, whole.state)
    saw = "the error, with epoch and batch; resumed bit for bit"
    table.add("the loader raises at step k", saw)


OF_A_FIT = [hook for hook in HOOKS if not hook.startswith(("on_test", "on_predict"))]


@pytest.mark.slow_but("on_save_checkpoint", "teardown")
@pytest.mark.parametrize("hook", OF_A_FIT)
def test_a_callback_that_raises(tmp_path, table, hook):
    def fail(*_):
        raise RuntimeError("a bug")

    bad = type("Bad", (Callback,), {hook: fail})()
    data, folder = (batches(8, 8, 8), batches(8)), tmp_path / "run"
    saver = ModelCheckpoint(folder, every_n_train_steps=1)
    stop = at(2, fail) if hook == "on_exception" else Callback()
    with pytest.raises(RuntimeError, match="a bug") as caught:
        make(bad, saver, stop).fit(*data)
    notes = "\n".join(caught.value.__notes__)
    assert f"raised by the callback Bad in {hook}" in notes or (
        hook == "on_exception" and "and after that: RuntimeError: a bug" in notes
    )
    again, whole = make(ModelCheckpoint(folder)), make()
    again.fit(*data, max_epochs=2, ckpt_path="auto")
    whole.fit(*data, max_epochs=2)
    assert_equal_leaves(again.state, whole.state)
    assert again.history["val_loss"] == whole.history["val_loss"]
    saw = "the error, with callback and hook; resumed bit for bit"
    table.add("a callback raises, in each hook", saw)


def test_a_clock_that_jumps_back(jobs, table):
    import job

    code, output = jobs.run("clock", epochs=6, prepare=job.turn_back_the_clock)
    assert code == 0, output
    jobs.assert_same("clock", "whole")
    table.add("the clock jumps back", "nothing")


@pytest.mark.slow
def test_a_worker_that_is_killed(jobs, table):
    import job

    harm = [("on_train_batch_end", 3, job.kill_a_worker)]
    many = {"epochs": 1, "rows": 400}  # more than is read ahead
    assert jobs.run("no worker", **many)[0] == 0
    code, output = jobs.run("worker", **many, workers=2, harm=harm)
    assert code == 1 and "exited unexpectedly" in output, output
    assert "Workers that run out of memory are killed, too" in output
    code, output = jobs.run("worker", **many)
    assert code == 0, output
    jobs.assert_same("worker", "no worker")
    saw = "torch's error and a likely cause; resumed bit for bit, without workers"
    table.add("a loader's worker is killed", saw)


def test_a_script_that_ends_after_fit_has_its_checkpoint(tmp_path, table):
    script = """
import os, sys
import numpy as np
from jaxdp.callbacks import ModelCheckpoint
from toys import linear, on_one_device
saver = ModelCheckpoint(sys.argv[1], every_n_train_steps=1)
x = np.ones((8, 500), np.float32)
on_one_device(saver, model=linear(500, 500), loss="mse").fit([(x, x)] * 3)
os._exit(0)
"""
    done = run_python(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(os.listdir(tmp_path)) == {".lock", "3"}
    table.add("`os._exit` right after `fit`", "nothing: the checkpoint is on disk")
