"""Seeds of the global random generators of torch, NumPy and Python."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np


@contextlib.contextmanager
def seed_globally(*numbers: int, torch_only: bool = False) -> Iterator[None]:
    """Seeds the global generators, if numbers are given, and restores them afterwards.

    With `torch_only`, leaves out the generators of NumPy and Python, whose states take
    long to save.
    """
    import torch

    users = torch.get_rng_state()
    others = None if torch_only else (np.random.get_state(), random.getstate())
    if numbers:
        seed_generators(make_seed(*numbers), torch_only)
    try:
        yield
    finally:
        torch.set_rng_state(users)
        if others is not None:
            np.random.set_state(others[0])
            random.setstate(others[1])


def seed_generators(seed: int, torch_only: bool = False) -> None:
    """Seeds the global generators."""
    import torch

    torch.default_generator.manual_seed(seed)
    if not torch_only:
        np.random.seed(seed % 2**32)
        random.seed(seed)


def make_seed(*numbers: int) -> int:
    """Returns a seed that depends on all of the numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
