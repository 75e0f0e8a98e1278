"""The hyperparameters that an optimizer's state holds, so that they can be set.

`optax.inject_hyperparams` stores its arguments there. To set one is to write an array;
no step is compiled for it.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, GetAttrKey
from jaxtyping import PyTree

LEARNING_RATES: Final = ("learning_rate", "lr", "step_size")
"""The names that optimizers have for their learning rate."""


class Hyperparam(NamedTuple):
    """A leaf that can be read, and can be set unless a schedule overwrites it."""

    name: str
    """The optimizer's name for it."""
    label: str
    """The dictionary keys of its path, as `optax.partition` has them."""
    index: int
    """Among the leaves of the state."""
    leaf: Any
    is_scheduled: bool


def find_hyperparams(state: PyTree) -> dict[str, Hyperparam]:
    """Returns all hyperparameters in a state, by the names that set them.

    The name is the optimizer's own if it is unique. Hyperparameters of the same name
    have a label before it: the key of `optax.partition` or `optax.named_chain`
    (`head/learning_rate`), or a number if there are no such keys (`0/learning_rate`).
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    scheduled = {
        (path[:place], path[place + 1])
        for path, _ in leaves
        for place, key in enumerate(path)
        if key == GetAttrKey("hyperparams_states")
    }
    by_name: dict[str, list[Hyperparam]] = {}
    for index, (path, leaf) in enumerate(leaves):
        match path:
            case (*owner, GetAttrKey("hyperparams"), DictKey(name)):
                label = "/".join(str(key.key) for key in owner if type(key) is DictKey)
                is_scheduled = (tuple(owner), DictKey(name)) in scheduled
                entry = Hyperparam(name, label, index, leaf, is_scheduled)
                by_name.setdefault(name, []).append(entry)
    hyperparams = {}
    for name, group in by_name.items():
        labels = [hyperparam.label for hyperparam in group]
        if not all(labels) or len({*labels}) < len(labels):
            labels = [str(number) for number in range(len(group))]
        for label, hyperparam in zip(labels, group, strict=True):
            unique = name if len(group) == 1 else f"{label}/{name}"
            hyperparams[unique] = hyperparam
    return hyperparams


def fetch_hyperparams(state: PyTree) -> Mapping[str, Any]:
    """Returns the values by the names of `find_hyperparams`. Waits for the device."""
    hyperparams = find_hyperparams(state).items()
    # waits for the device
    arrays = {name: np.asarray(hyperparam.leaf) for name, hyperparam in hyperparams}
    values = {name: a if a.ndim else a.item() for name, a in arrays.items()}
    return MappingProxyType(values)


def convert_hyperparams(
    state: PyTree, values: Mapping[str, Any]
) -> dict[int, np.ndarray]:
    """Returns the new leaves of a state, by index, for these hyperparameters.

    Raises:
        ValueError: for an unknown name, one that a schedule sets, and a value that is
            no number, or has another shape or kind than the current value.
    """
    current, leaves = find_hyperparams(state), {}
    for name, value in values.items():
        if name not in current:
            names = ", ".join(map(repr, current)) or "none"
            rates = [n for n in LEARNING_RATES if n in current]
            if name in LEARNING_RATES and rates:
                names += f"; for {name!r} write {rates[0]!r}"
            raise ValueError(
                f"`set_hyperparams`: the optimizer's state has no {name!r}; there are"
                f" {names}. Only numbers and arrays that optax.inject_hyperparams was"
                " given are in it, as in"
                " optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)."
            )
        if current[name].is_scheduled:
            raise ValueError(
                f"`set_hyperparams`: {name!r} is set by a schedule in every step,"
                " which would overwrite the new value. Give optax.inject_hyperparams"
                " a number instead of the schedule."
            )
        leaves[current[name].index] = _convert(name, value, current[name].leaf)
    return leaves


def _convert(name: str, value: Any, leaf: Any) -> np.ndarray:
    """Returns `value` in the dtype and shape of the current leaf."""
    array = np.asarray(value)  # waits for the device
    if not array.ndim:  # one value for each member of an ensemble
        array = np.broadcast_to(array, leaf.shape)
    kinds = jnp.integer, jnp.floating
    is_real = any(jnp.issubdtype(array.dtype, kind) for kind in kinds)
    new = array.astype(leaf.dtype) if is_real else array
    is_rounded = jnp.issubdtype(leaf.dtype, jnp.integer) and (new != array).any()
    if not is_real or is_rounded or new.shape != leaf.shape:
        raise ValueError(
            f"`set_hyperparams`: {name!r} is {leaf.dtype} of shape {leaf.shape}, and"
            f" can't be set to {value!r}."
        )
    return new
