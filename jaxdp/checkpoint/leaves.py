"""The leaves of a `TrainState` by the names that they have in a checkpoint."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..basics.tree import is_key, plain_path, stored_path
from ..step import TrainState, Weights

WEIGHTS: Final = Weights._fields

EVALUATED: Final = "evaluated: "
"""The prefix of evaluated leaves that the state does not contain."""

Named = dict[str, Any]
"""`{"field: path": leaf}`, independent of the classes in the tree."""


def name_leaves(state: TrainState) -> Named:
    """Returns the arrays of a state by name, PRNG keys as their integers."""
    return {name: key_to_data(leaf) for name, leaf in _iterate_named(state)}


def _iterate_named(state: TrainState) -> Iterator[tuple[str, Any]]:
    for field, tree in state._asdict().items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            yield _name(field, path), leaf


def get_frozen_leaves(state: TrainState) -> Named:
    """Returns the floating-point arrays that are not trained, by name."""
    named = name_leaves(state._replace(params=None, model_state=None, opt_state=None))
    return {
        name: leaf
        for name, leaf in drop_empty_leaves(named).items()
        if name.startswith("buffers: ") and jnp.issubdtype(leaf.dtype, jnp.inexact)
    }


def select_weights(named: Mapping[str, Any]) -> Named:
    """Returns the leaves that evaluation reads."""
    return {n: leaf for n, leaf in named.items() if n.partition(": ")[0] in WEIGHTS}


def unname_leaves(named: Named, like: TrainState) -> TrainState:
    """Inverts `name_leaves`, in the structure of `like`."""

    def fill(field: str, tree: PyTree) -> PyTree:
        def find(path: Any, leaf: Any) -> Any:
            stored = named.get(_name(field, path))
            return leaf if stored is None else data_to_key(stored, leaf)  # no elements

        return jax.tree_util.tree_map_with_path(find, tree)

    return TrainState(**{field: fill(field, t) for field, t in like._asdict().items()})


def _name(field: str, path: Any) -> str:
    return f"{field}: {stored_path(path) or 'value'}"


def use_public_names(named: Mapping[str, str]) -> dict[str, str]:
    """Renames leaves to the paths that users write: `params: generator.bias`."""
    parts = [(name.partition(": "), text) for name, text in named.items()]
    return {f"{field}{colon}{plain_path(p)}": text for (field, colon, p), text in parts}


def locate_evaluated(
    state: TrainState, evaluated: TrainState
) -> tuple[dict[str, str], Named]:
    """Maps weights to the leaves that hold their evaluated values, such as averages.

    Returns:
        The names of these leaves by the names of weights, where they differ from the
        trained ones; and the leaves that no state contains, to be stored as well.
    """
    names = {id(leaf): name for name, leaf in _iterate_named(state)}
    where, others = {}, {}
    for field in WEIGHTS:
        trained = jax.tree_util.tree_leaves_with_path(getattr(state, field))
        others_of_field = jax.tree.leaves(getattr(evaluated, field))
        for (path, leaf), other in zip(trained, others_of_field, strict=True):
            if other is leaf:
                continue
            name = _name(field, path)
            where[name] = names.get(id(other)) or EVALUATED + name.replace(": ", ".", 1)
            if id(other) not in names:
                others[where[name]] = key_to_data(other)
    return where, others


def drop_empty_leaves(named: Named) -> Named:
    """Drops arrays of size 0, which Orbax can't save."""
    return {name: leaf for name, leaf in named.items() if 0 not in leaf.shape}


def nest_by_field(named: Named) -> dict[str, Named]:
    """Returns `{field: {path: leaf}}`, the structure that Orbax writes."""
    fields: dict[str, Named] = {}
    for name, leaf in named.items():
        field, _, path = name.partition(": ")
        fields.setdefault(field, {})[path] = leaf
    return fields


def flatten_fields(fields: Mapping[str, Named]) -> Named:
    """Inverts `nest_by_field`."""
    return {
        f"{field}: {path}": leaf
        for field, leaves in fields.items()
        for path, leaf in leaves.items()
    }


def describe_shapes(named: Named) -> dict[str, str]:
    """Returns the descriptions of leaves for `meta["leaves"]`, by name."""
    return {name: describe_shape(leaf) for name, leaf in named.items()}


def describe_shape(leaf: Any) -> str:
    """Describes an array: `float32(16, 4)`."""
    return f"{leaf.dtype}{tuple(leaf.shape)}"


def parse_dtype(text: str) -> Any:
    """Returns the dtype in a text of `describe_shape`."""
    return jnp.dtype(text.partition("(")[0])


def parse_shape(text: str) -> tuple[int, ...]:
    """Returns the shape in a text of `describe_shape`."""
    sizes = text.rstrip(")").partition("(")[2].split(",")
    return tuple(int(size) for size in sizes if size.strip())


def list_differences(
    wanted: Mapping[str, str], stored: Mapping[str, str], who: str = "trainer"
) -> list[str]:
    """Returns a line for every leaf that differs between `who` and a checkpoint."""
    return [
        f"  {name}: the checkpoint has {stored.get(name, 'nothing')}, the {who}"
        f" {wanted.get(name, 'nothing')}"
        for name in sorted(wanted.keys() | stored.keys())
        if wanted.get(name) != stored.get(name)
    ]


def join_first_lines(lines: list[str]) -> str:
    """Joins the first twenty lines, and says how many more there are."""
    more = f"\n  and {len(lines) - 20} more" if len(lines) > 20 else ""
    return "\n".join(lines[:20]) + more


def key_to_data(leaf: Any) -> Any:
    """Converts a typed PRNG key to its integers; returns other leaves as they are."""
    if not is_key(leaf):
        return leaf
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    return jax.eval_shape(jax.random.key_data, leaf)


def data_to_key(stored: Any, like: Any) -> Any:
    """Inverts `key_to_data`."""
    if not is_key(like):
        return stored
    impl = jax.random.key_impl(jnp.empty((), like.dtype))  # `like` may be a shape
    return jax.random.wrap_key_data(stored, impl=impl)
