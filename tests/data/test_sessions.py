"""Loaders with workers whose dataset is defined in a session without a file."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

SESSION = """
import collections, io, pickle, sys, warnings
warnings.simplefilter("error")  # no fork
import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset
from jaxdp.data import open_loader

{before}
TABLE = np.arange(20_000, dtype=np.float32)
Pair = collections.namedtuple("Pair", "x y")

def half(x):
    return x * 0.5

class Base(Dataset):
    def __len__(self):
        return 8

class Rows(Base):
    def __init__(self, transform):
        self.transform = transform

    def __getitem__(self, index):
        return TABLE[index], self.transform(TABLE[index])

class Stream(IterableDataset):
    def __iter__(self):
        return (np.float32(half(i)) for i in range(8))

def collate(rows):
    return Pair(*map(np.stack, zip(*rows)))

def epoch(*args, **kwargs):
    loader = DataLoader(*args, **kwargs)
    return [tuple(b) for b in open_loader(loader, "train_loader", seed=0).epoch()]

rows = Rows(lambda x: half(x))
for options in ({{}}, {{"collate_fn": collate, "shuffle": True}}):
    here = epoch(rows, 4, **options)
    there = epoch(rows, 4, num_workers=2, **options)
    assert len(there) == 2
    np.testing.assert_array_equal(here, there)
np.testing.assert_array_equal(epoch(Stream(), 4), epoch(Stream(), 4, num_workers=1))
print("the same")
"""

WITHOUT = 'sys.modules["cloudpickle"] = None'


def in_a_session(before=""):
    return subprocess.run(
        [sys.executable, "-c", SESSION.format(before=before)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_classes_of_a_session_come_to_its_workers():
    pytest.importorskip("cloudpickle")
    done = in_a_session()
    assert done.stdout == "the same\n", done.stderr


@pytest.mark.slow
def test_without_cloudpickle_the_ways_out_are_told():
    done = in_a_session(WITHOUT)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "TypeError: the dataset, `collate_fn` or" in last
    for way in ("pip install cloudpickle", "into a module", "num_workers=0"):
        assert way in last
