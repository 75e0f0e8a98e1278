"""Random generators of every kind that a loader may have."""

import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

KINDS = {
    "np.random.Generator": lambda: np.random.default_rng(3),
    "MT19937": lambda: np.random.Generator(np.random.MT19937(3)),
    "Philox": lambda: np.random.Generator(np.random.Philox(3)),
    "SFC64": lambda: np.random.Generator(np.random.SFC64(3)),
    "BitGenerator": lambda: np.random.PCG64DXSM(3),
    "RandomState": lambda: np.random.RandomState(3),
    "random.Random": lambda: random.Random(3),
    "torch.Generator": lambda: torch.Generator().manual_seed(3),
}


def draw(generator, count):
    """A number below `count`, of any kind of generator."""
    if isinstance(generator, torch.Generator):
        return int(torch.randint(count, (), generator=generator))
    if isinstance(generator, np.random.BitGenerator):
        return int(generator.random_raw() % count)
    if isinstance(generator, random.Random):
        return generator.randrange(count)
    if isinstance(generator, np.random.RandomState):
        return int(generator.randint(count))
    return int(generator.integers(count))
