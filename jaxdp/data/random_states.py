"""The states of random generators of torch, NumPy and Python.

Those of the global generators come in sets, one for whoever draws in turn. Those of
others are JSON.
"""

import base64
import contextlib
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from ..basics.json_checks import anything, by_name, fields

FORM: Final = by_name(fields({"kind": anything, "state": anything}))
"""Of what `states_of` gives."""


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


def states_of(generators: Mapping[str, Any]) -> dict[str, Any]:
    """The states of generators by name, for `set_states`; JSON."""
    return {name: _state_of(each) for name, each in generators.items()}


def set_states(generators: Mapping[str, Any], states: Any) -> None:
    """Has those generators go on from `states` that are there, and of the same kind.

    Raises a ValueError if these are no states of such; all generators are as before.
    """
    FORM(states, "generators")
    before = states_of(generators)
    there = [name for name in states if name in before]
    there = [name for name in there if before[name]["kind"] == states[name]["kind"]]
    try:
        for name in there:
            _set_state(generators[name], name, states[name]["state"])
    except ValueError:
        for name in there:
            _set_state(generators[name], name, before[name]["state"])
        raise


def _state_of(generator: Any) -> dict[str, Any]:
    kind, state = _told(generator)
    plain = json.dumps(state, default=lambda value: value.tolist())  # NumPy's numbers
    return {"kind": kind, "state": json.loads(plain)}


def _told(generator: Any) -> tuple[str, Any]:
    """What tells generators apart whose states differ in form; and the state."""
    if isinstance(generator, random.Random):
        return "random.Random", generator.getstate()
    if isinstance(generator, np.random.RandomState):
        state = generator.get_state(legacy=False)
        return f"RandomState of {state['bit_generator']}", state
    if isinstance(generator, np.random.BitGenerator):
        return type(generator).__name__, generator.state
    content = generator.get_state().numpy().tobytes()
    return "torch.Generator", base64.b64encode(content).decode()


def _set_state(generator: Any, name: str, state: Any) -> None:
    try:
        _check_places(state)
        if isinstance(generator, random.Random):
            version, numbers, normal = state
            generator.setstate((version, tuple(numbers), normal))
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(state)
        elif isinstance(generator, np.random.BitGenerator):
            generator.state = state
        else:
            import torch

            content = bytearray(base64.b64decode(state))
            generator.set_state(torch.frombuffer(content, dtype=torch.uint8))
        if _state_of(generator)["state"] != state:
            raise ValueError("another one came of it")
    except Exception as error:  # of whatever stands in the place of what was saved
        raise ValueError(
            f"the state of the generator {name!r} can't be loaded:"
            f" {type(error).__name__}: {error}."
        ) from error


def _check_places(value: Any) -> None:
    """Raises where NumPy and Python would take a state without a look."""
    if isinstance(value, dict):
        numbers = value | value["state"]
        is_fine = 0 <= numbers.get("pos", 0) <= 624
        is_fine = is_fine and 0 <= numbers.get("buffer_pos", 0) <= 4
    else:
        is_fine = isinstance(value, str) or type(value[2]) in (float, type(None))
    if not is_fine:
        raise ValueError("a position is out of range")
