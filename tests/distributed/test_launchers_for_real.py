"""Jobs under real launchers, where they are installed."""

import os
import pathlib
import re
import subprocess
import sys
import time

import pytest

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]


def launch(*command, folder):
    """All that a launched job has printed, and its exit code."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("JAX_NUM")}
    environ["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, HERE, HERE.parent)))
    environ["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        env=environ,
        cwd=folder,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_torchrun_restarts_a_job_killed_twice_which_ends_as_if_it_had_not_been(
    crew, tmp_path
):
    outputs = crew("survive", path=str(tmp_path / "a")).finish()
    code, output = launch(
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nproc-per-node=2", "--max-restarts=3"),
        str(HERE / "under_torchrun.py"),
        *(str(tmp_path / "b"), str(tmp_path / "memory"), "1"),
        folder=tmp_path,
    )
    assert code == 0, output
    first, second = map(int, re.findall("resumed step (\\d+) ", output))
    assert first in (4, 6) and second in (8, 9, 10)
    (end,) = re.findall("ended .*", outputs[0])
    assert output.count(end) == 2


@pytest.mark.slow
def test_torchrun_ends_a_job_soon_after_a_process_raised(tmp_path):
    code, output = launch(
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
        *(str(HERE / "under_torchrun.py"), "raise"),
        folder=tmp_path,
    )
    end = time.monotonic()
    assert code == 1 and "Traceback" in output
    assert "At in on_boundary" in output and "has failed" in output
    times = re.findall("heard of an exception at ([.0-9]*)", output)
    raised, heard = sorted(map(float, times))
    assert heard - raised < 1.9 and end - raised < 3, output


@pytest.mark.slow
def test_ray_restarts_a_job_killed_twice_which_ends_as_if_it_had_not_been(
    crew, tmp_path
):
    pytest.importorskip("ray.train")
    outputs = crew("survive", path=str(tmp_path / "a")).finish()
    code, output = launch(
        *(sys.executable, str(ROOT / "examples" / "ray_train.py")),
        *("--workers=2", "--restarts=2", f"--output={tmp_path / 'ray'}"),
        *(str(HERE / "under_ray.py"), str(tmp_path / "b"), "1"),
        folder=tmp_path,
    )
    assert code == 0, output
    texts = [(tmp_path / "b" / f"begun-{i}").read_text() for i in range(2)]
    assert texts == ["..."] * 2
    ends = [(tmp_path / "b" / f"end-{i}").read_text() for i in range(2)]
    assert ends == re.findall("ended .*", outputs[0]) * 2
