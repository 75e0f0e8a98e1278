"""The global generators of torch, NumPy and Python, and torch's own of a loader."""

import base64
import contextlib
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

_KIND: Final = "torch.Generator"
"""The only one that is saved; 0.2 had others, too."""


@contextlib.contextmanager
def seeded(*numbers: int, torch_alone: bool = False) -> Iterator[None]:
    """Seeds the global generators, if numbers are given; restores them afterwards.

    With `torch_alone` nothing draws from the others, which take a while to save.
    """
    import torch

    users = torch.get_rng_state()
    others = None if torch_alone else (np.random.get_state(), random.getstate())
    if numbers:
        seed_generators(seed_of(*numbers), torch_alone)
    try:
        yield
    finally:
        torch.set_rng_state(users)
        if others is not None:
            np.random.set_state(others[0])
            random.setstate(others[1])


def seed_generators(seed: int, torch_alone: bool = False) -> None:
    """Seeds the global generators."""
    import torch

    torch.default_generator.manual_seed(seed)
    if not torch_alone:
        np.random.seed(seed % 2**32)
        random.seed(seed)


def seed_of(*numbers: int) -> int:
    """Returns a seed that all of the numbers decide."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


def torch_generators(loader: Any) -> dict[str, Any]:
    """Returns torch's generators of a torch `DataLoader` and its samplers, by path.

    Each once; none of another loader.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(loader, torch.utils.data.DataLoader):
        return {}
    generators: dict[str, Any] = {}
    known = [torch.default_generator]  # which is seeded for every epoch
    waiting: list[tuple[str, Any]] = [("", loader)]
    while waiting:
        path, part = waiting.pop(0)
        generator = getattr(part, "generator", None)
        is_torchs = generator is not None and isinstance(generator, torch.Generator)
        if is_torchs and all(generator is not other for other in known):
            known.append(generator)
            generators[f"{path}generator"] = generator
        for name in ("sampler", "batch_sampler"):
            if (inner := getattr(part, name, None)) is not None:
                waiting.append((f"{path}{name}.", inner))
    return generators


def states_of(generators: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the states of torch's generators by name, for `set_states`; JSON."""
    return {name: {"kind": _KIND, "state": _text(g)} for name, g in generators.items()}


def set_states(generators: Mapping[str, Any], states: Any) -> None:
    """Restores those of the generators that are among `states`, and of their kind."""
    for name in states.keys() & generators:
        if states[name]["kind"] == _KIND:
            import torch

            content = bytearray(base64.b64decode(states[name]["state"]))
            generators[name].set_state(torch.frombuffer(content, dtype=torch.uint8))


def _text(generator: Any) -> str:
    return base64.b64encode(generator.get_state().numpy().tobytes()).decode()
