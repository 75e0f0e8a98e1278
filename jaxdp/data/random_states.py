"""The states of random generators of torch, NumPy and Python.

Those of the global generators come in sets, one for whoever draws in turn. Those of
others are JSON, and are tried before a generator takes them up.
"""

import base64
import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np

_NUMPYS: Final = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
_LEGACY: Final = "RandomState of "
_TORCHS: Final = "torch.Generator"


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


class _Access(NamedTuple):
    """How the state of a generator is read and set; a torch generator's as text."""

    kind: str
    get: Callable[[], Any]
    set: Callable[[Any], Any]


def _access(generator: Any) -> _Access:
    if isinstance(generator, random.Random):
        return _Access("random.Random", generator.getstate, generator.setstate)
    if isinstance(generator, np.random.RandomState):
        kind = generator.get_state(legacy=False)["bit_generator"]
        return _Access(
            _LEGACY + kind,
            lambda: generator.get_state(legacy=False),
            generator.set_state,
        )
    if isinstance(generator, np.random.BitGenerator):
        return _Access(
            type(generator).__name__,
            lambda: generator.state,
            lambda state: setattr(generator, "state", state),
        )
    return _Access(
        _TORCHS,
        lambda: state_as_text(generator.get_state()),
        lambda text: generator.set_state(state_from_text(text)),
    )


def kind_of(generator: Any) -> str:
    """Tells generators apart whose states differ in form."""
    return _access(generator).kind


def state_of(generator: Any) -> dict[str, Any]:
    """The state of one generator, for `set_state`; JSON."""
    access = _access(generator)
    return {"kind": access.kind, "state": _json(access.get())}


def set_state(generator: Any, state: dict[str, Any]) -> None:
    """Has a generator go on from what `state_of` gave, past `try_state`."""
    access = _access(generator)
    access.set(_like(access.get(), state["state"]))


def try_state(state: dict[str, Any], name: str, generator: Any = None) -> None:
    """Raises unless another generator takes `state` up, and tells it again.

    Args:
        state: of the form that `state_of` gives.
        name: of the generator, for messages.
        generator: the one that is to go on from there, if it is known.
    """
    if (other := _another(state["kind"], generator)) is None:
        return
    value, told = state["state"], None
    try:
        _check_places(value)
        set_state(other, state)
        told = _json(_access(other).get())
    except Exception as error:  # of whatever stands in the place of what was saved
        reason = f"{type(error).__name__}: {error}"
    else:
        reason = "another one came of it"
    if told is None or told != value:
        raise ValueError(
            f"the state of the generator {name!r} can't be taken up: {reason}."
        )


def _another(kind: Any, generator: Any) -> Any:
    """A generator of that kind to try a state on; None if it takes one to know."""
    if not isinstance(kind, str):
        raise ValueError(f"a generator must be of a kind that is text; got {kind!r}.")
    if kind == "random.Random":
        return random.Random(0)
    if kind in _NUMPYS:
        return getattr(np.random, kind)(0)
    if (legacy := kind.removeprefix(_LEGACY)) in _NUMPYS:
        return np.random.RandomState(getattr(np.random, legacy)(0))
    if generator is not None and kind == _TORCHS:
        return type(generator)(generator.device)
    return copy.deepcopy(generator)


def _check_places(value: Any) -> None:
    """Raises where NumPy and Python would take a state without a look."""
    if isinstance(value, dict):
        numbers = value | value["state"]
        is_fine = 0 <= numbers.get("pos", 0) <= 624
        is_fine = is_fine and 0 <= numbers.get("buffer_pos", 0) <= 4
    else:
        is_fine = isinstance(value, str) or type(value[2]) in (float, type(None))
    if not is_fine:
        raise ValueError("a place is outside of the numbers")


def _like(template: Any, value: Any) -> Any:
    """`value`, which is JSON, as the generator takes it."""
    if isinstance(template, dict):
        return {key: _like(each, value[key]) for key, each in template.items()}
    if isinstance(template, np.ndarray):
        return np.asarray(value, template.dtype)
    if isinstance(template, tuple):
        return value[0], tuple(value[1]), value[2]
    return value


def _json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json(each) for key, each in value.items()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple):
        return [_json(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value
