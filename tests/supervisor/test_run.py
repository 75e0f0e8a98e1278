"""Real runs under the supervisor, harmed and compared with one that was left alone."""

import itertools
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

HERE = pathlib.Path(__file__).parent
SCRIPT = str(HERE / "script.py")


def command(folder, *options, **settings):
    folder.mkdir(exist_ok=True)
    start = ["-m", "jaxdp", "run", *options] if options else []
    return [sys.executable, *start, SCRIPT, str(folder), json.dumps(settings)]


def run(folder, *options, **settings):
    """Exit code and output of a run, supervised if there are options."""
    done = subprocess.run(
        command(folder, *options, **settings), capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("supervised") / "whole"
    code, output = run(folder)
    assert code == 0, output
    return folder


def result(folder):
    return json.loads((folder / "result.json").read_text())


def taken(folder):
    """The steps that each process has taken, in order."""
    found = {}
    text = (folder / "steps").read_text() if (folder / "steps").exists() else ""
    for line in text.splitlines():
        step, _, process = line.split()
        found.setdefault(process, []).append(int(step))
    return list(found.values())


def assert_same(folder, whole, every):
    """That it ended as the other, and no more than so many steps were repeated."""
    assert result(folder) == result(whole)
    by_process = taken(folder)
    for before, after in zip(by_process, by_process[1:], strict=False):
        assert before[-1] - every <= after[0] - 1 <= before[-1]


def assert_nothing_is_left(folder, root):
    assert not [path for path in root.rglob("*") if path.is_file()]
    assert not list(root.glob("jaxdp-*")), list(root.rglob("*"))
    assert not (folder / "checkpoints" / ".snapshots").exists()
    for process in (folder / "attempts").read_text().split():
        assert not os.path.exists(f"/proc/{process}")


def test_a_killed_run_goes_on_from_a_snapshot(whole, tmp_path):
    folder, root = whole.parent / "killed", tmp_path / "snapshots"
    options = "--snapshot-every", "5", "--snapshot-dir", str(root)
    code, output = run(folder, *options, harm=[[18, "SIGKILL"]], pause=0.05)
    assert code == 0, output
    assert "resumed step 16" in output and output.count("started again") == 1
    assert_same(folder, whole, 5)
    assert_nothing_is_left(folder, root)


# Where checkpoints are saved, too, a snapshot counts when those before it are there.
@pytest.mark.parametrize("devices, saves, most", [(1, 100, 5), (8, 12, 17)])
def test_kills_of_all_kinds(whole, tmp_path, devices, saves, most):
    folder, root = whole.parent / f"kinds{devices}", tmp_path / "snapshots"
    options = "--deadman", "2", "--snapshot-every", "5", "--snapshot-dir", str(root)
    kinds = ["SIGKILL", "segv", "SIGSTOP", "gil", "inject", "hang", "raise", "SIGTERM"]
    kinds += ["exit"]
    harm = [[6 + 5 * number, kind] for number, kind in enumerate(kinds)]
    settings = {"pause": 0.05, "devices": devices, "every": saves}
    code, output = run(folder, *options, harm=harm, **settings)
    assert code == 0, output
    assert output.count("started again") == len(kinds)
    alone = whole.parent / f"alone{devices}"
    assert run(alone, **settings)[0] == 0
    assert_same(folder, alone, most)
    assert_nothing_is_left(folder, root)


@pytest.fixture
def little_memory():
    """What is run in a control group that has 1.5 GB, or it is skipped."""
    root = pathlib.Path("/sys/fs/cgroup/memory")  # of version 1; else of version 2
    name = "memory.limit_in_bytes" if root.is_dir() else "memory.max"
    group = (root if root.is_dir() else root.parent) / f"jaxdp-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("needs the right to make control groups")
    try:
        (group / name).write_text(str(3 * 2**29))
    except OSError:
        group.rmdir()
        pytest.skip("needs the right to limit memory")
    yield "sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"
    group.rmdir()


@pytest.mark.slow
def test_a_control_group_has_no_memory_left(whole, tmp_path, little_memory):
    folder, root = whole.parent / "memory", tmp_path / "snapshots"
    options = "--snapshot-every", "5", "--snapshot-dir", str(root)
    settings = {"harm": [[18, "memory"]], "pause": 0.05}
    started = [*little_memory, *command(folder, *options, **settings)]
    done = subprocess.run(started, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("was ended by SIGKILL, after step 17") == 1
    assert_same(folder, whole, 5)
    assert_nothing_is_left(folder, root)


def test_both_are_killed_and_the_next_start_goes_on(whole, tmp_path):
    folder, root = whole.parent / "both", tmp_path / "snapshots"
    options = "--snapshot-every", "5", "--snapshot-dir", str(root)
    settings = {"harm": [[23, "hang"]], "pause": 0.02}
    process = subprocess.Popen(command(folder, *options, **settings))
    while 23 not in itertools.chain(*taken(folder)):
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()

    code, output = run(folder, *options)
    assert code == 0, output
    assert "left by a run that died, has a snapshot of step 22" in output
    assert "resumed step 22" in output
    assert_same(folder, whole, 5)
    assert_nothing_is_left(folder, root)


def test_the_users_own_exception_at_the_same_step_twice(whole, tmp_path):
    folder, root = whole.parent / "twice", tmp_path / "snapshots"
    options = "--snapshot-every", "5", "--snapshot-dir", str(root)
    code, output = run(folder, *options, harm=[[8, "raise"]] * 9)
    assert code == 1 and len(taken(folder)) == 2
    assert "the second time at this step: it is not started again" in output
    assert "a snapshot of step 6 stays in" in output

    # With that mended it goes on; with the checkpoints removed it starts anew.
    (folder / "attempts").unlink()
    (folder / "checkpoints" / ".snapshots").unlink()
    code, output = run(folder, *options)
    assert code == 0 and "is removed: its checkpoints are gone" in output
    assert "nothing to resume" in output
    assert_nothing_is_left(folder, root)
