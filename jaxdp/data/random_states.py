"""The global generators of torch, NumPy and Python, and torch's own of a loader."""

import base64
import contextlib
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

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


def find_parts(loader: Any) -> dict[str, Any]:
    """Returns a torch `DataLoader` and its samplers, each once, by their paths."""
    parts: dict[str, Any] = {}
    known, waiting = set[int](), [("", loader)]
    for path, part in waiting:  # which gets longer
        if id(part) in known:
            continue
        known.add(id(part))
        parts[path] = part
        for name in ("sampler", "batch_sampler"):
            if (inner := getattr(part, name, None)) is not None:
                waiting.append((f"{path}{name}.", inner))
    return parts


def find_torch_generators(loader: Any) -> dict[str, Any]:
    """Returns torch's generators of a torch `DataLoader` and its samplers, by path.

    Each generator is listed once. A loader that is not torch's has none.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(loader, torch.utils.data.DataLoader):
        return {}
    generators: dict[str, Any] = {}
    known = {id(torch.default_generator)}  # this one is seeded for every epoch
    for path, part in find_parts(loader).items():
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator) and id(generator) not in known:
            known.add(id(generator))
            generators[f"{path}generator"] = generator
    return generators


def get_states(generators: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the states of torch's generators by name, for `set_states`; JSON."""
    return {
        name: {"state": base64.b64encode(generator.get_state().numpy()).decode()}
        for name, generator in generators.items()
    }


def set_states(generators: Mapping[str, Any], states: Any) -> None:
    """Restores the states of the generators that `states` names."""
    for name in states.keys() & generators:
        import torch

        content = bytearray(base64.b64decode(states[name]["state"]))
        generators[name].set_state(torch.frombuffer(content, dtype=torch.uint8))
