"""A network that is slow, loses packets, or is cut."""

import json
import pathlib
import re
import subprocess
import sys

import network
import pytest

SCRIPT = str(pathlib.Path(__file__).with_name("network.py"))


def train(folder, **link):
    """The exit codes and outputs of two processes that train over such a link."""
    folder.mkdir()
    job = subprocess.run(
        [sys.executable, SCRIPT, str(folder), json.dumps(link)],
        stdout=subprocess.PIPE,
        timeout=300,
        check=False,
    )
    if job.returncode == network.NO_RIGHTS:
        pytest.skip("needs the right to make network namespaces")
    outputs = [(folder / f"{index}.txt").read_text() for index in range(2)]
    assert job.returncode == 0, outputs
    return json.loads(job.stdout), outputs


@pytest.mark.slow
def test_delay_and_loss_change_no_bit(tmp_path):
    good, bad = {}, {"delay": 0.02, "loss": 0.03}
    ends = []
    for number, link in enumerate((good, bad)):
        codes, outputs = train(tmp_path / str(number), **link)
        assert codes == [0, 0], outputs
        ends += [re.findall("end 20 .*", output) for output in outputs]
    assert len(ends[0]) == 1 and ends == [ends[0]] * 4


@pytest.mark.slow
def test_a_link_that_is_cut_ends_both(tmp_path):
    codes, outputs = train(tmp_path / "cut", cut_after=600)
    assert 0 not in codes, outputs
