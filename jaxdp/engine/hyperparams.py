"""What an optimizer keeps in its state so that it can be set between two steps.

`optax.inject_hyperparams` puts the arguments of an optimizer there. Setting one is to
write an array, and no step is compiled for it.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..basics.tree import leaf_path

RATES: Final = ("learning_rate", "lr", "step_size")
"""How optimizers call their learning rate."""

_HOW: Final = (
    "only what is in the optimizer's state can be set, for example"
    " optax.inject_hyperparams(optax.adam)(learning_rate=1e-3) instead of"
    " optax.adam(1e-3)"
)


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
    places = {path: place for place, (path, _) in enumerate(leaves)}
    found: dict[str, list[Hyperparam]] = {}
    for path, node in _injected(state):
        scheduled = getattr(node, "hyperparams_states", {})
        keys = [key for key in path if isinstance(key, jax.tree_util.DictKey)]
        label = "/".join(str(key.key) for key in keys)
        for name in node.hyperparams:
            end = jax.tree_util.GetAttrKey("hyperparams"), jax.tree_util.DictKey(name)
            if (place := places.get((*path, *end))) is not None:
                one = Hyperparam(
                    name, label, place, leaves[place][1], name in scheduled
                )
                found.setdefault(name, []).append(one)
    return {
        name: each for group in found.values() for name, each in _named(group).items()
    }


def values_of(state: PyTree) -> Mapping[str, Any]:
    """The present hyperparameters, as `find` names them. Waits for the device."""
    arrays = {name: np.asarray(each.leaf) for name, each in find(state).items()}
    values = {name: a if a.ndim else a.item() for name, a in arrays.items()}
    return MappingProxyType(values)


def to_set(state: PyTree, values: Mapping[str, Any]) -> dict[int, np.ndarray]:
    """Which leaves of a state are to become what, to have these hyperparameters.

    Raises:
        ValueError: for a name that is not there, one that a schedule sets, and a value
            of another shape, or that is not finite.
        TypeError: for a value that is no number, or not of the kind of the present one.
    """
    found = find(state)
    return {
        _known(name, found).place: _checked(name, value, found[name].leaf)
        for name, value in values.items()
    }


def read_only(state: PyTree) -> PyTree:
    """`state`, with hyperparameters that can't be assigned to.

    The dictionaries of hyperparameters become `ReadOnly`; nothing else changes.
    """

    def frozen(node: Any) -> Any:
        if not _is_injected(node):
            return node
        inner = jax.tree.map(
            frozen, node, is_leaf=lambda n: n is not node and _is_injected(n)
        )
        return inner._replace(hyperparams=ReadOnly(inner.hyperparams))

    return jax.tree.map(frozen, state, is_leaf=_is_injected)


def _refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
    raise TypeError(
        "the hyperparameters in `trainer.state` can't be assigned to, because the"
        " optimizer's own are on the devices and would not change. Call"
        " trainer.set_hyperparams(name=value), or take a copy by dict(...)."
    )


@jax.tree_util.register_pytree_with_keys_class
class ReadOnly(dict[str, Any]):
    """A dictionary that refuses to be written to; a pytree like any other."""

    __setitem__ = __delitem__ = __ior__ = _refuse  # pyright: ignore
    clear = pop = popitem = setdefault = update = _refuse  # pyright: ignore

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # a copy is its owner's to write to

    def tree_flatten_with_keys(self) -> tuple[list[Any], tuple[str, ...]]:
        names = sorted(self)
        keyed = [(jax.tree_util.DictKey(name), self[name]) for name in names]
        return keyed, tuple(names)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], leaves: Any) -> "ReadOnly":
        return cls(zip(names, leaves, strict=True))


def _is_injected(node: Any) -> bool:
    is_state = isinstance(node, tuple) and hasattr(node, "_replace")
    return is_state and isinstance(getattr(node, "hyperparams", None), Mapping)


def _injected(tree: PyTree, start: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """The states with hyperparameters, those inside of others included, by path."""
    nodes = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda node: node is not tree and _is_injected(node)
    )
    for path, node in nodes:
        if _is_injected(node):
            yield (*start, *path), node
            yield from _injected(node, (*start, *path))


def _named(group: list[Hyperparam]) -> dict[str, Hyperparam]:
    """Those of one name, told apart."""
    if len(group) == 1:
        return {group[0].name: group[0]}
    labels = [each.label for each in group]
    if not all(labels) or len({*labels}) < len(labels):
        labels = [str(number) for number in range(len(group))]
    return {f"{label}/{x.name}": x for label, x in zip(labels, group, strict=True)}


def _known(name: str, found: Mapping[str, Hyperparam]) -> Hyperparam:
    """The hyperparameter of a name, or an error that says what there is."""
    if not found:
        raise ValueError(
            f"`set_hyperparams`: the optimizer's state has no {name!r}, nor any other"
            f" hyperparameter; {_HOW}."
        )
    if name not in found:
        alike = [key for key, each in found.items() if each.name == name]
        listed = ", ".join(map(repr, alike or found))
        if alike:
            keywords = ", ".join(f"{key!r}: ..." for key in alike)
            raise ValueError(
                f"`set_hyperparams`: the optimizer's state has {len(alike)} named"
                f" {name!r}: {listed}. Say which, as set_hyperparams(**{{{keywords}}})."
            )
        raise ValueError(
            f"`set_hyperparams`: the optimizer's state has no {name!r}; there are"
            f" {listed}. An argument that optax.inject_hyperparams takes for static, as"
            " bools and strings are, can't be set."
        )
    if found[name].is_scheduled:
        raise ValueError(
            f"`set_hyperparams`: {name!r} is set by a schedule in every step, and what"
            " was set would be overwritten by the next. Give"
            " optax.inject_hyperparams a number instead of the schedule."
        )
    return found[name]


def _checked(name: str, value: Any, leaf: Any) -> np.ndarray:
    """`value` in the dtype of the present one."""
    array = np.asarray(value)
    what = f"`set_hyperparams`: {name!r} is {leaf.dtype} of shape {leaf.shape}"
    is_number = jnp.issubdtype(array.dtype, jnp.number)
    kinds = (jnp.floating, jnp.integer) if _is_floating(leaf) else (jnp.integer,)
    if not is_number or not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
        raise TypeError(
            f"{what}, and can't be set to {value!r} of type {type(value).__name__};"
            f" pass {'a number' if _is_floating(leaf) else 'an int'}."
        )
    if array.shape != leaf.shape:
        raise ValueError(f"{what}; got a value of shape {array.shape}.")
    with np.errstate(over="ignore"):
        new = array.astype(leaf.dtype)
    if _is_floating(leaf):
        if not np.isfinite(new.astype(np.float64)).all():
            raise ValueError(f"{what}, and must be finite; got {value!r}.")
    elif not np.array_equal(new, array):
        raise ValueError(f"{what}, and {value!r} does not fit into it.")
    return new


def _is_floating(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def written_to(state: PyTree, leaves: list[Any]) -> str | None:
    """Where a state has other leaves than those that it was made of, or None."""
    now = jax.tree_util.tree_leaves_with_path(state)
    for (path, leaf), own in zip(now, leaves, strict=False):
        if leaf is not own:
            return leaf_path(path)
    return None if len(now) == len(leaves) else "a leaf that was added or removed"
