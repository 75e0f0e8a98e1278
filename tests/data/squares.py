"""A dataset for several test files, and comparisons of batches."""

import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import Dataset  # noqa: E402


class Squares(Dataset):
    """Item i is (i, i*i), or i and random numbers if `noisy`."""

    def __init__(self, count=23, noisy=False):
        self.count = count
        self.noisy = noisy

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        if self.noisy:
            return i, float(torch.rand(())), np.random.rand(), random.random()
        return i, np.float32(i * i)


def flat(batches):
    return [[np.asarray(leaf) for leaf in batch] for batch in batches]


def assert_same(ours, theirs):
    ours, theirs = flat(ours), flat(theirs)
    assert len(ours) == len(theirs)
    for mine, yours in zip(ours, theirs, strict=True):
        for a, b in zip(mine, yours, strict=True):
            np.testing.assert_array_equal(a, b)
