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

from ..basics.json_checks import anything, by_name, fields

FORM: Final = by_name(fields({"kind": anything, "state": anything}))
"""Of what `states_of` gives; of 0.2, which had generators of other kinds, too."""

_KIND: Final = "torch.Generator"


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

    def go_on_from(self, states: Any) -> None:
        """Has the set start where another one was, or raises a ValueError."""
        users = _global_states()
        try:
            kind, keys, place, has_gauss, _ = states[1]
            # NumPy takes these without a look, and would read outside of the keys.
            is_inside = type(place) is int and 0 <= place <= len(keys)
            if kind != "MT19937" or not is_inside or has_gauss not in (0, 1):
                raise ValueError("NumPy's has another form")
            _set_global_states(states)
        except Exception as error:  # of whatever stands in the place of what was saved
            raise ValueError(
                "the states of the global random generators in the checkpoint"
                f" can't be loaded: {type(error).__name__}: {error}. Use another"
                " checkpoint."
            ) from error
        finally:
            _set_global_states(users)
        self.states = states


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
    found: dict[str, Any] = {}
    known = [torch.default_generator]  # which is seeded for every epoch
    waiting: list[tuple[str, Any]] = [("", loader)]
    while waiting:
        path, part = waiting.pop(0)
        generator = getattr(part, "generator", None)
        is_torchs = isinstance(generator, torch.Generator)
        if is_torchs and all(generator is not other for other in known):
            known.append(generator)
            found[f"{path}generator"] = generator
        for name in ("sampler", "batch_sampler"):
            if (inner := getattr(part, name, None)) is not None:
                waiting.append((f"{path}{name}.", inner))
    return found


def states_of(generators: Mapping[str, Any]) -> dict[str, Any]:
    """The states of torch's generators by name, for `set_states`; JSON."""
    return {name: {"kind": _KIND, "state": _told(g)} for name, g in generators.items()}


def set_states(generators: Mapping[str, Any], states: Any) -> None:
    """Has those generators go on from `states` that are there, and of their kind.

    Raises a ValueError if these are no states of such; all generators are as before.
    """
    FORM(states, "generators")
    before = {name: _told(generator) for name, generator in generators.items()}
    there = [n for n in states if n in before and states[n]["kind"] == _KIND]
    try:
        for name in there:
            _set_state(generators[name], name, states[name]["state"])
    except ValueError:
        for name in there:
            _set_state(generators[name], name, before[name])
        raise


def _told(generator: Any) -> str:
    return base64.b64encode(generator.get_state().numpy().tobytes()).decode()


def _set_state(generator: Any, name: str, state: Any) -> None:
    import torch

    try:
        content = bytearray(base64.b64decode(state))
        generator.set_state(torch.frombuffer(content, dtype=torch.uint8))
        if _told(generator) != state:
            raise ValueError("another one came of it")
    except Exception as error:  # of whatever stands in the place of what was saved
        raise ValueError(
            f"the state of the generator {name!r} can't be loaded:"
            f" {type(error).__name__}: {error}."
        ) from error
