"""Sets of states for the global generators of torch, NumPy and Python."""

import base64
import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np


class Generators:
    """A set of states for the global generators of torch, NumPy and Python.

    Args:
        seed: where the set starts; without it, at the current states.
        torch_alone: whether nothing draws from the others, which take a while to save.
    """

    def __init__(self, seed: int | None = None, *, torch_alone: bool = False):
        self._seed = seed
        self._torch_alone = torch_alone
        self.states: tuple[Any, ...] | None = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Puts this set in place, and the user's back afterwards."""
        users = _generator_states(self._torch_alone)
        if self.states is not None:
            _set_generator_states(self.states)
        elif self._seed is not None:
            seed_generators(self._seed, self._torch_alone)
        try:
            yield
        finally:
            self.states = _generator_states(self._torch_alone)
            _set_generator_states(users)

    def go_on_from(self, states: Any) -> None:
        """Has the set start where a checkpoint says that another one was.

        Raises:
            ValueError: if these are no such states.
        """
        users = _generator_states()
        try:
            _check_numpys(*states[1:2])
            _set_generator_states(states)
        except Exception as error:  # of whatever stands in the place of what was saved
            raise ValueError(
                "the states of the global random generators in the checkpoint can't be"
                f" taken up: {type(error).__name__}: {error}. Take another checkpoint."
            ) from error
        finally:
            _set_generator_states(users)
        self.states = states


def _check_numpys(state: Any = None) -> None:
    """NumPy takes the place for one in its array without a look."""
    if state is None:
        return
    kind, keys, place, has_gauss, _ = state
    is_inside = type(place) is int and 0 <= place <= len(keys) and has_gauss in (0, 1)
    if kind != "MT19937" or not is_inside:
        raise ValueError("NumPy's has another form")


def state_as_text(state: Any) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def state_from_text(text: str) -> Any:
    import torch

    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _generator_states(torch_alone: bool = False) -> tuple[Any, ...]:
    import torch

    if torch_alone:
        return (torch.get_rng_state(),)
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _set_generator_states(states: tuple[Any, ...]) -> None:
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
