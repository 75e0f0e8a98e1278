"""The processes of a trainer end with it."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch")
if not pathlib.Path("/proc/self/stat").exists():
    pytest.skip("processes are looked up in /proc", allow_module_level=True)

SCRIPT = '''
"""Trains with workers that last, and then does nothing."""
import time
from torch.utils.data import DataLoader
from toys import On, make_small, rows

def wait(trainer, metrics):
    print("waits", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    pairs = [*zip(*rows(16), strict=True)]
    loader = DataLoader(pairs, 4, num_workers=2, persistent_workers=True)
    make_small(callbacks=[On(on_train_epoch_end=wait)]).fit(loader)
'''


def descendants(pid):
    """Returns the children of process `pid`, and their children."""
    parents = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(stat[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


def is_running(pid):
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_workers_end_with_a_killed_trainer(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    before = os.environ.get("PYTHONPATH", "")
    paths = os.pathsep.join([str(pathlib.Path(__file__).parents[1]), before])
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script)],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as trainer:
        assert trainer.stdout is not None
        said = ""
        while "waits" not in said:
            line = trainer.stdout.readline()
            assert line, said
            said += line
        started = descendants(trainer.pid)
        assert len(started) >= 3  # the workers, and the fork server
        try:
            trainer.send_signal(signal.SIGKILL)
            trainer.wait()
            end = time.monotonic() + 10
            while any(map(is_running, started)) and time.monotonic() < end:
                time.sleep(0.05)
            left = list(filter(is_running, started))
        finally:
            for pid in filter(is_running, started):
                os.kill(pid, signal.SIGKILL)
    assert not left
