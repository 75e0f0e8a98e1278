"""What the supervisor does, with scripts that train nothing."""

import os
import signal
import stat
import subprocess
import sys
import textwrap
import time

import pytest

from jaxdp.supervisor import Supervisor, leftovers

BEAT = """
    import os, signal, struct, sys, time
    beats = open(os.path.join(os.environ["JAXDP_SUPERVISED"], "beat"), "r+b", 0)
    def beat(count, step, is_slow=False):
        beats.seek(0)
        beats.write(struct.pack("<3q", count, step, is_slow))
"""
ATTEMPT = """
    attempts = open("attempts", "a+")
    attempts.write("x")
    attempts.seek(0)
    attempt = len(attempts.read())
"""


@pytest.fixture
def run(tmp_path, monkeypatch, caplog):
    """Runs a script; its exit code, and what the supervisor said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jaxdp.supervisor.parent._GRACE", 0.5)

    def run(code, *arguments, **options):
        (tmp_path / "script.py").write_text(
            textwrap.dedent(BEAT) + textwrap.dedent(ATTEMPT) + textwrap.dedent(code)
        )
        caplog.clear()
        options.setdefault("folder", str(tmp_path))
        with caplog.at_level("INFO"):
            result = Supervisor("script.py", arguments, **options).run()
        return result, [record.getMessage() for record in caplog.records]

    return run


def attempts():
    with open("attempts") as file:
        return len(file.read())


def test_a_script_runs_as_python_runs_it(run, tmp_path):
    (tmp_path / "beside.py").write_text("value = 7")
    code = """
        import __main__, beside, pickle
        class Mine: pass
        assert pickle.loads(pickle.dumps(Mine())).__class__ is __main__.Mine
        assert __name__ == "__main__" and __file__ == os.path.abspath("script.py")
        assert sys.argv[0] == "script.py" and sys.path[0] == os.path.dirname(__file__)
        assert sys.argv[1:] == ["--max-restarts", "5"] and beside.value == 7
    """
    assert run(code, "--max-restarts", "5") == (0, [])
    assert not list(tmp_path.glob("jaxdp-*"))


@pytest.mark.parametrize(
    "how, code, said",
    [
        ("sys.exit(3)", 3, "ended with exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was ended by SIGKILL"),
        ("os._exit(70)", 70, "ended with exit code 70"),
        ("raise OSError('disk')", 1, "failed: OSError: disk"),
        ("raise OSError('disks:\\n  a\\n  b')", 1, "failed: OSError: disks, after"),
    ],
)
def test_it_is_started_again_and_its_exit_code_comes_back(run, how, code, said):
    result, messages = run(f"beat(attempt, attempt)\n{how}", max_restarts=2)
    assert result == code and attempts() == 3
    assert [said in message for message in messages] == [True] * 3
    assert "(2 of 2)" in messages[1] and "`--max-restarts`" in messages[2]


@pytest.mark.parametrize(
    "how, tries, said",
    [
        ("raise ValueError('no such option')", 1, "would fail again"),
        ("import nothing_of_that_name", 1, "would fail again"),
        ("def", 1, "SyntaxError"),
        ("sys.exit(2)", 1, "would fail again"),
        ("beat(1, 45); raise ValueError('the 46th batch')", 2, "second time at this"),
        ("beat(1, 40 + attempt); raise KeyError(attempt)", 4, "--max-restarts"),
        # Not the script's mistake: it has got further before.
        (
            "if attempt > 1: raise FileNotFoundError('data')\nbeat(1, 5); os._exit(1)",
            4,
            "--max-restarts",
        ),
        ("beat(1, 45); raise OSError('the disk is full')", 4, "--max-restarts"),
        ('raise RuntimeError("can\'t start new thread")', 4, "--max-restarts"),
    ],
)
def test_an_error_that_would_come_again_is_not_tried_again(
    run, monkeypatch, how, tries, said
):
    monkeypatch.setattr("jaxdp.supervisor.parent._LONGEST_PAUSE", 0.01)
    result, messages = run(how, max_restarts=3)
    assert result in (1, 2) and said in messages[-1]
    assert how == "def" or attempts() == tries  # not even compiled


def test_no_process_can_be_started_for_now(run, monkeypatch):
    monkeypatch.setattr("jaxdp.supervisor.parent._LONGEST_PAUSE", 0.01)
    tries, start = [], subprocess.Popen

    def full(command, **options):
        if command[0] == sys.executable:
            tries.append(command)
            if len(tries) == 1:
                raise BlockingIOError(11, "Resource temporarily unavailable")
        return start(command, **options)

    monkeypatch.setattr(subprocess, "Popen", full)
    result, messages = run("")
    assert result == 0 and len(tries) == 2
    assert "failed: OSError: [Errno 11] Resource temporarily" in messages[0]


def test_pauses_grow_where_it_comes_no_further(run, monkeypatch):
    pauses = []
    monkeypatch.setattr(Supervisor, "_sleep", lambda self, pause: pauses.append(pause))
    run("beat(1, max(0, 3 - attempt)); os._exit(1)", max_restarts=9)
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60]


def test_a_second_fit_of_a_script_gets_further_by_steps_of_its_own(run, monkeypatch):
    pauses = []
    monkeypatch.setattr(Supervisor, "_sleep", lambda self, pause: pauses.append(pause))
    run("beat(1, [32, 6, 12, 18][attempt - 1]); os._exit(1)", max_restarts=3)
    assert pauses == [0, 1, 0]


@pytest.mark.parametrize(
    "how, least, most",
    [
        ("beat(1, 1)\ntime.sleep(60)", 0.2, 1.5),
        ("time.sleep(60)", 2.0, 4.0),  # no step can be expected yet
        ("os.kill(os.getpid(), signal.SIGSTOP)", 0.2, 1.5),
    ],
)
def test_silence_is_ended(run, how, least, most):
    started = time.monotonic()
    result, messages = run(how, deadman=0.2, max_restarts=0)
    assert result == 137 and "was silent for too long" in messages[0]
    assert least < time.monotonic() - started < most + 1.0  # of a busy machine


def test_signs_of_life_keep_it_alive(run):
    code = "for i in range(10): beat(i, i); time.sleep(0.1)"
    assert run(code, deadman=0.8, max_restarts=0) == (0, [])


def start(code):
    """The supervisor as a process of its own, in a group of its own."""
    with open("script.py", "w") as file:
        file.write(textwrap.dedent(BEAT) + textwrap.dedent(code))
    command = [sys.executable, "-m", "jaxdp", "run", "--snapshot-dir", ".", "script.py"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, process_group=0)
    wait_for(lambda: os.path.exists("ready"))
    return process


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_alive(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_signal_to_the_group_arrives_once_and_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    process = start("""
        got = []
        def note(number, frame):
            got.append(number)
        signal.signal(signal.SIGTERM, note)
        open("ready", "w").close()
        end = time.monotonic() + 60
        while not got and time.monotonic() < end: time.sleep(0.01)
        time.sleep(0.3)
        sys.exit(100 + len(got))
    """)
    os.killpg(process.pid, signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 101 and error == b""


def test_nothing_outlives_a_supervisor_that_is_killed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    process = start("""
        import subprocess
        other = subprocess.Popen(["sleep", "120"], stderr=subprocess.DEVNULL)
        with open("ready.part", "w") as file: file.write(f"{os.getpid()} {other.pid}")
        os.rename("ready.part", "ready")
        time.sleep(60)
    """)
    started = [int(word) for word in (tmp_path / "ready").read_text().split()]
    assert all(map(is_alive, started))
    process.kill()
    process.communicate(timeout=60)
    wait_for(lambda: not any(map(is_alive, started)))


def test_what_a_dead_script_has_started_is_ended(run, tmp_path):
    run(
        """
        import subprocess
        other = subprocess.Popen(["sleep", "60"])
        open("other", "w").write(str(other.pid))
        os._exit(1)
        """,
        max_restarts=0,
    )
    other = int((tmp_path / "other").read_text())
    wait_for(lambda: not is_alive(other))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_restarts": -1}, "`--max-restarts` must be 0 or more; got -1"),
        ({"deadman": 0.0}, "`--deadman` must be more than 0 seconds; got 0"),
        ({"every": 0}, "`--snapshot-every` must be 1 or more steps; got 0"),
    ],
)
def test_options_that_make_no_sense(run, options, message):
    with pytest.raises(ValueError, match=message):
        run("", **options)


@pytest.mark.parametrize(
    "environment, launcher",
    [
        (
            {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "to",
        ),
        (
            {
                "SLURM_JOB_ID": "1",
                "SLURM_PROCID": "0",
                "SLURM_STEP_NODELIST": "n[1-2]",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_LOCALID": "0",
            },
            "srun",
        ),
    ],
)
def test_one_of_several_processes_is_refused(run, monkeypatch, environment, launcher):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"one of 4 that {launcher}"):
        run("")


def test_no_room_at_the_start(run, tmp_path, monkeypatch):
    def full(path, **settings):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxdp.supervisor.parent.open_channel", full)
    with pytest.raises(ValueError, match="`--snapshot-dir`: nothing can be written to"):
        run("")
    assert not list(tmp_path.glob("jaxdp-*"))


def test_room_for_why_a_script_has_failed_is_taken_before(run):
    code = """
        path = os.path.join(os.environ["JAXDP_SUPERVISED"], "end.json")
        os.link(path, "end")  # what is written later, is written over it
        raise ValueError("a bad argument")
    """
    assert run(code, max_restarts=0)[0] == 1
    with open("end") as file:
        assert "a bad argument" in file.read()


def test_a_script_that_is_not_there(run):
    with pytest.raises(FileNotFoundError, match="`gone.py`: there is no such file"):
        Supervisor("gone.py")


def test_snapshots_are_kept_where_only_the_user_can_go(tmp_path):
    root = leftovers.root_in(str(tmp_path))
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    root.chmod(0o755)
    with pytest.raises(ValueError, match="is not a folder that only you can use"):
        leftovers.root_in(str(tmp_path))
    root.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is not a folder that only you can use"):
        leftovers.root_in(str(tmp_path))


def test_the_folder_may_be_removed_by_another_that_ends(tmp_path):
    """Between a supervisor's first look and its own session."""
    root = leftovers.root_in(str(tmp_path))
    leftovers.close_session(*leftovers.open_session(root))
    assert not root.exists()
    assert leftovers.sweep(root) == []
    first, second = leftovers.open_session(root), leftovers.open_session(root)
    leftovers.close_session(*first)
    assert os.path.isdir(second[0])
    leftovers.close_session(*second)
    assert not root.exists()


def test_what_the_dead_left_is_told_and_what_nobody_can_use_is_removed(tmp_path):
    root = leftovers.root_in(str(tmp_path))
    for name in ("used", "removed"):
        (tmp_path / name).mkdir()
        path = leftovers.make_snapshots(str(root), str(tmp_path / name), "session-dead")
        with open(os.path.join(path, "40"), "w") as file:
            file.write("x")
    (root / "session-dead").mkdir()
    os.unlink(tmp_path / "removed" / ".snapshots")

    said = sorted(leftovers.sweep(root), key=lambda text: "gone" in text)
    assert "has a snapshot of step 40" in said[0] and said[0].endswith("used")
    assert said[1].endswith("is removed: its checkpoints are gone") and len(said) == 2
    assert not (root / "session-dead").exists() and not os.path.exists(path)
    found = leftovers.find_snapshots(str(root), str(tmp_path / "used"))
    assert found is not None

    # A copy of the checkpoints has no part in it, nor has a forged name.
    (tmp_path / "copy").mkdir()
    token = (tmp_path / "used" / ".snapshots").read_text()
    for text in (token, "../../etc", "x" * 32):
        (tmp_path / "copy" / ".snapshots").write_text(text)
        assert leftovers.find_snapshots(str(root), str(tmp_path / "copy")) is None

    # One that is in use is neither told of nor touched.
    session, lock = leftovers.open_session(root)
    name = os.path.basename(session)
    leftovers.make_snapshots(str(root), str(tmp_path / "used"), name)
    assert leftovers.sweep(root) == []
    os.close(lock)


def test_a_script_that_prints_goes_on_when_nobody_reads_it_any_more(tmp_path):
    code = """
        for step in range(3):
            print("a line", flush=True)
            time.sleep(0.2)
        open("done", "w")
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(BEAT) + textwrap.dedent(code))
    command = [sys.executable, "-m", "jaxdp", "run", "--snapshot-dir", ".", "script.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "a line\n"
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 0 and (tmp_path / "done").exists()
    assert "BrokenPipeError" in errors and errors.count("It is started again") == 1
