"""Runs that are killed, by whomever and whenever, and started again."""

import os
import pathlib
import random
import shutil
import signal
import tempfile
import time

import pytest
from how_long import LONG


def listed(folder):
    return os.listdir(folder) if folder.exists() else []


@pytest.fixture
def memory(tmp_path):
    """A folder in memory, where there is such a place."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = pathlib.Path(tempfile.mkdtemp(prefix="jaxdp-test-", dir=shared))
    yield path
    shutil.rmtree(path)


MID_SAVE = 12 if LONG else 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20 if LONG else 1))
def test_kills_at_random_moments(jobs, table, seed):
    generator = random.Random(seed)
    name, killed = f"killed{seed}", 0
    while killed < 10:
        process, root = jobs.start(name, epochs=6, pause=0.01)
        if generator.random() < 0.2:  # anywhere, compilation included
            process.join(generator.uniform(0.0, 3.0))
        else:
            jobs.wait_for_step(process, root, 0)
            target = jobs.step(root) + generator.randint(0, 5)
            jobs.wait_for_step(process, root, target)
            process.join(generator.uniform(0.0, 0.05))
        number = generator.choice([signal.SIGKILL, signal.SIGTERM])
        if not process.is_alive():
            break  # it came to its end
        os.kill(process.pid, number)
        process.join(120)
        # SIGTERM before `fit` has begun is answered by nobody.
        assert process.exitcode in (-9, -15, 143, 0), jobs.output(name)
        killed += process.exitcode != 0
    code, output = jobs.run(name, epochs=6)
    assert code == 0, output
    jobs.assert_same(name, "whole")
    text = "`resumed step N`; ends with the bits of an unbroken run"
    table.add("kill -9 and SIGTERM at random moments", text, killed)


@pytest.mark.slow
def test_kills_of_a_run_with_checkpoints_in_memory_too(jobs, table, memory):
    """The newest whole one is gone on from, wherever it is, and however it was lost."""
    generator, name = random.Random(0), "memory"
    options = {"epochs": 6, "memory": memory, "pause": 0.05}
    folders = [memory, jobs.folder / name / "checkpoints"]
    for number in range(8):
        process, root = jobs.start(name, **options)
        jobs.wait_for_step(process, root, 0)
        jobs.wait_for_step(process, root, jobs.step(root) + generator.randint(1, 4))
        process.join(generator.uniform(0.0, 0.05))
        process.kill()
        process.join(120)
        assert process.exitcode == -9, jobs.output(name)

        if number % 4 == 2:  # the machine was started again
            shutil.rmtree(memory)
        steps = [(int(n), f) for f in folders for n in listed(f) if n.isdecimal()]
        (newest, where), *_, (oldest, _) = sorted(steps, key=lambda s: -s[0])
        if number % 4 == 3:  # the newest is damaged
            (where / str(newest) / "files.json").unlink()
            newest = max(step for step, folder in steps if folder != where)
        before = len(jobs.output(name))
        process, root = jobs.start(name, **options)
        jobs.wait_for_step(process, root, oldest)
        process.kill()
        process.join(120)
        assert f"resumed step {newest} " in jobs.output(name)[before:]
    code, output = jobs.run(name, **options)
    assert code == 0, output
    jobs.assert_same(name, "whole")
    saw = "`resumed step N`, the newest whole one of both; the bits of an unbroken run"
    table.add("kill -9 with a second `ModelCheckpoint` in memory", saw, tries=16)


@pytest.mark.slow
def test_kills_while_a_checkpoint_is_written(jobs, table):
    killed = 0
    for attempt in range(MID_SAVE):
        process, root = jobs.start("saving", epochs=6, width=4000)
        start = jobs.step(root)
        folder = root / "checkpoints"

        def is_writing(folder=folder):
            return folder.exists() and any("tmp" in name for name in os.listdir(folder))

        jobs.wait_for_step(process, root, start + 1 + attempt % 3)
        jobs.wait(process, is_writing)
        if process.is_alive():
            process.kill()
            killed += 1
        process.join(120)
    code, output = jobs.run("saving", epochs=6, width=4000)
    assert code == 0, output
    assert jobs.run("saved", epochs=6, width=4000)[0] == 0
    jobs.assert_same("saving", "saved")
    saw = "the previous one is used; no leftovers"
    table.add("kill -9 while a checkpoint is written", saw, killed)


@pytest.mark.slow
def test_kills_while_a_checkpoint_is_removed(jobs, table, tmp_path):
    import job

    from jaxdp.checkpoint.folder import CheckpointDir

    survived, tries = 0, 20 if LONG else 5
    for attempt in range(tries):
        folder = tmp_path / str(attempt)
        for step in range(3):
            inside = folder / str(step) / "state"
            inside.mkdir(parents=True)
            for number in range(400):
                (inside / str(number)).touch()
        process = jobs.context.Process(target=job.remove, args=(str(folder), 1))
        process.start()
        while os.path.exists(folder / "1"):
            assert process.is_alive() or not os.path.exists(folder / "1")
        time.sleep(0.0005 * attempt)
        process.kill()
        process.join()
        there = CheckpointDir(folder)
        assert there.list_steps() == [0, 2]
        there.open()
        survived += set(os.listdir(folder)) == {"0", "2", ".lock"}
        there.close()
    saw = "it is gone; the next start removes the rest"
    table.add("kill -9 while an old checkpoint is removed", saw, tries, survived)


TERM = "SIGTERM at each of six moments of a run", "exit code 143; resumed bit for bit"
SIGNALS = {  # the fault, what the user sees, hook and call that send it, the exit code
    "a step": (*TERM, ("on_train_batch_end", 4, "SIGTERM"), 143, {}),
    "a save": (*TERM, ("on_boundary", 3, "SIGTERM"), 143, {}),
    "validation": (*TERM, ("on_validation_batch_end", 3, "SIGTERM"), 143, {}),
    "the end of an epoch": (*TERM, ("on_train_epoch_end", 1, "SIGTERM"), 143, {}),
    "compilation": (*TERM, ("setup", 1, "SIGTERM"), 143, {}),
    "a second one at once": (*TERM, ("on_train_batch_end", 5, "SIGTERM"), -15, {}),
    "ctrl-c": ("Ctrl-C to all processes, two workers",
               "KeyboardInterrupt, no tracebacks of workers",
               ("on_train_batch_end", 4, "SIGINT", True), 1, {"workers": 2}),
    "usr1": ("SIGUSR1 with Preemption(action='return')",
             "`fit` returns after a checkpoint",
             ("on_train_batch_end", 4, "SIGUSR1"), 0,
             {"preemption": ("SIGUSR1", "return")}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("moment", SIGNALS)
def test_signals_at_chosen_moments(jobs, table, moment):
    import job

    fault, saw, (hook, at, *sent), expected, options = SIGNALS[moment]
    harm = [(hook, at, job.send_signal, *sent)] * (1 + ("second" in moment))
    code, output = jobs.run(moment, epochs=6, harm=harm, **options)
    assert code == expected, output
    assert output.count("Traceback") == (code == 1)
    if code == 0:
        assert jobs.result(moment)["step"] == at
    code, output = jobs.run(moment, epochs=6)  # with any number of workers
    assert code == 0, output
    jobs.assert_same(moment, "whole")
    table.add(fault, saw)
