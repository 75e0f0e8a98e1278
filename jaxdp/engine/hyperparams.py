"""What an optimizer keeps in its state so that it can be set between two steps.

`optax.inject_hyperparams` puts the arguments of an optimizer there. Setting one is to
write an array, and no step is compiled for it.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, GetAttrKey
from jaxtyping import PyTree

RATES: Final = ("learning_rate", "lr", "step_size")
"""How optimizers call their learning rate."""


class Hyperparam(NamedTuple):
    """One that can be read, and unless a schedule overwrites it, set."""

    name: str
    """As its optimizer calls it."""
    label: str
    """The keys of dictionaries on the way to it, as `optax.partition` has them."""
    place: int
    """Which of the state's leaves it is."""
    leaf: Any
    is_scheduled: bool


def find(state: PyTree) -> dict[str, Hyperparam]:
    """All hyperparameters in a state, by the names that they are set by.

    That is the optimizer's own name for it, if there is one such in the state. Several
    have a label before it: the key that `optax.partition` or `optax.named_chain` knows
    each by (`head/learning_rate`), or where that does not tell them apart their number
    (`0/learning_rate`).
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    scheduled = {
        (path[:place], path[place + 1])
        for path, _ in leaves
        for place, key in enumerate(path)
        if key == GetAttrKey("hyperparams_states")
    }
    by_name: dict[str, list[Hyperparam]] = {}
    for place, (path, leaf) in enumerate(leaves):
        match path:
            case (*owner, GetAttrKey("hyperparams"), DictKey(name)):
                label = "/".join(str(key.key) for key in owner if type(key) is DictKey)
                sets_itself = (tuple(owner), DictKey(name)) in scheduled
                one = Hyperparam(name, label, place, leaf, sets_itself)
                by_name.setdefault(name, []).append(one)
    return {
        name: hyperparam
        for group in by_name.values()
        for name, hyperparam in _named(group).items()
    }


def values_of(state: PyTree) -> Mapping[str, Any]:
    """The present hyperparameters, as `find` names them. Waits for the device."""
    arrays = {
        # waits for the device
        name: np.asarray(hyperparam.leaf)
        for name, hyperparam in find(state).items()
    }
    # on the host
    values = {name: a if a.ndim else a.item() for name, a in arrays.items()}
    return MappingProxyType(values)


def to_set(state: PyTree, values: Mapping[str, Any]) -> dict[int, np.ndarray]:
    """Which leaves of a state are to become what, to have these hyperparameters.

    Raises:
        ValueError: for a name that is not there, one that a schedule sets, and a value
            of another shape, or that is not finite.
        TypeError: for a value that is no number, or not of the kind of the present one.
    """
    present = find(state)
    return {
        _known(name, present).place: _checked(name, value, present[name].leaf)
        for name, value in values.items()
    }


def _named(group: list[Hyperparam]) -> dict[str, Hyperparam]:
    """Hyperparameters of one name, told apart."""
    if len(group) == 1:
        return {group[0].name: group[0]}
    labels = [hyperparam.label for hyperparam in group]
    if not all(labels) or len({*labels}) < len(labels):
        labels = [str(number) for number in range(len(group))]
    return {f"{label}/{x.name}": x for label, x in zip(labels, group, strict=True)}


def _known(name: str, found: Mapping[str, Hyperparam]) -> Hyperparam:
    """The hyperparameter of a name, or an error that says what there is."""
    if name not in found:
        alike = [key for key, hyperparam in found.items() if hyperparam.name == name]
        listed = ", ".join(map(repr, alike or found))
        has = f"has no {name!r}; there are {listed or 'none'}"
        if alike:
            has = f"has {len(alike)} named {name!r}: {listed}. Say which, as"
            has += f" set_hyperparams(**{{{alike[0]!r}: ...}})"
        raise ValueError(
            f"`set_hyperparams`: the optimizer's state {has}. Only what is in it can be"
            " set: numbers and arrays that optax.inject_hyperparams was given, for"
            " example optax.inject_hyperparams(optax.adam)(learning_rate=1e-3) instead"
            " of optax.adam(1e-3)."
        )
    if found[name].is_scheduled:
        raise ValueError(
            f"`set_hyperparams`: {name!r} is set by a schedule in every step,"
            " which would overwrite the new value. Give optax.inject_hyperparams"
            " a number instead of the schedule."
        )
    return found[name]


def _checked(name: str, value: Any, leaf: Any) -> np.ndarray:
    """`value` in the dtype of the present one."""
    array = np.asarray(value)  # waits for the device
    what = f"`set_hyperparams`: {name!r} is {leaf.dtype} of shape {leaf.shape}"
    is_floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    kinds = (jnp.floating, jnp.integer) if is_floating else (jnp.integer,)
    if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
        raise TypeError(
            f"{what}, and can't be set to {value!r} of type {type(value).__name__};"
            f" pass {'a number' if is_floating else 'an int'}."
        )
    if array.shape != leaf.shape:
        raise ValueError(f"{what}; got a value of shape {array.shape}.")

    with np.errstate(over="ignore"):
        new = array.astype(leaf.dtype)
    if is_floating and not np.isfinite(new.astype(np.float64)).all():
        raise ValueError(f"{what}, and must be finite; got {value!r}.")
    if not is_floating and not np.array_equal(new, array):
        raise ValueError(f"{what}, and {value!r} does not fit into it.")
    return new
