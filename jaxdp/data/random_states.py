"""The states of random generators.

Those of the global ones of torch, NumPy and Python come in sets, one for whoever draws
in turn. Those that a torch loader and its samplers have of their own are JSON.
"""

import base64
import contextlib
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

_KIND: Final = "torch.Generator"
"""The only one that is saved; 0.2 had others, too."""


class Generators:
    """A set of states for the global generators of torch, NumPy and Python.

    It starts at the seed, or at the current states. With `torch_alone` nothing draws
    from the others, which take a while to save.
    """

    def __init__(self, seed: int | None = None, *, torch_alone: bool = False):
        self._seed = seed
        self._torch_alone = torch_alone
        self.states: tuple[Any, ...] | None = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Puts this set in place, and the user's back afterwards."""
        users = _global_states(self._torch_alone)
        if self.states is not None:
            _set_global_states(self.states)
        elif self._seed is not None:
            seed_generators(self._seed, self._torch_alone)
        try:
            yield
        finally:
            self.states = _global_states(self._torch_alone)
            _set_global_states(users)

    def drawn(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of a loader that draws from these."""
        while True:
            with self.active():
                batch = next(batches, self)
            if batch is self:
                return
            yield batch


def _global_states(torch_alone: bool = False) -> tuple[Any, ...]:
    import torch

    if torch_alone:
        return (torch.get_rng_state(),)
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _set_global_states(states: tuple[Any, ...]) -> None:
    import torch

    torch.set_rng_state(states[0])
    if len(states) > 1:
        np.random.set_state(states[1])
        random.setstate(states[2])


def seed_generators(seed: int, torch_alone: bool = False) -> None:
    import torch

    torch.default_generator.manual_seed(seed)
    if not torch_alone:
        np.random.seed(seed % 2**32)
        random.seed(seed)


def seed_of(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


def torch_generators(loader: Any) -> dict[str, Any]:
    """torch's generators of a torch `DataLoader` and of its samplers, by their paths.

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
        is_torchs = isinstance(generator, torch.Generator)
        if is_torchs and all(generator is not other for other in known):
            known.append(generator)
            generators[f"{path}generator"] = generator
        for name in ("sampler", "batch_sampler"):
            if (inner := getattr(part, name, None)) is not None:
                waiting.append((f"{path}{name}.", inner))
    return generators


def states_of(generators: Mapping[str, Any]) -> dict[str, Any]:
    """The states of torch's generators by name, for `set_states`; JSON."""
    return {name: {"kind": _KIND, "state": _told(g)} for name, g in generators.items()}


def set_states(generators: Mapping[str, Any], states: Any) -> None:
    """Has those generators go on from `states` that are there, and of their kind."""
    for name in states.keys() & generators:
        if states[name]["kind"] == _KIND:
            import torch

            content = bytearray(base64.b64decode(states[name]["state"]))
            generators[name].set_state(torch.frombuffer(content, dtype=torch.uint8))


def _told(generator: Any) -> str:
    return base64.b64encode(generator.get_state().numpy().tobytes()).decode()
