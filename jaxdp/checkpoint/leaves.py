"""The leaves of a `TrainState`, under the names that a checkpoint has for them."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..basics.tree import is_key, plain_path, stored_path
from ..step import TrainState, Weights

WEIGHTS: Final = Weights._fields

EVALUATED: Final = "evaluated: "
"""Before the names of leaves that are evaluated and in no state."""

Named = dict[str, Any]
"""`{"field: path": leaf}`: readable by anyone, whatever the classes in the tree."""


def name_leaves(state: TrainState) -> Named:
    """The arrays of a state, PRNG keys as the integers that they are made of."""
    return {name: plain(leaf) for name, leaf in _with_names(state)}


def _with_names(state: TrainState) -> Iterator[tuple[str, Any]]:
    for field, tree in state._asdict().items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            yield _name(field, path), leaf


def frozen_leaves(state: TrainState) -> Named:
    """The floating-point arrays that are not trained, by name."""
    named = name_leaves(state._replace(params=None, model_state=None, opt_state=None))
    return {
        name: leaf
        for name, leaf in with_elements(named).items()
        if name.startswith("buffers: ") and jnp.issubdtype(leaf.dtype, jnp.inexact)
    }


def of_weights(named: Mapping[str, Any]) -> Named:
    """Only those that evaluation reads."""
    return {n: leaf for n, leaf in named.items() if n.partition(": ")[0] in WEIGHTS}


def unname_leaves(named: Named, like: TrainState) -> TrainState:
    """The inverse of `name_leaves`, in the structure of `like`."""

    def fill(field: str, tree: PyTree) -> PyTree:
        def find(path: Any, leaf: Any) -> Any:
            stored = named.get(_name(field, path))
            return leaf if stored is None else unplain(stored, leaf)  # no elements

        return jax.tree_util.tree_map_with_path(find, tree)

    return TrainState(**{field: fill(field, t) for field, t in like._asdict().items()})


def _name(field: str, path: Any) -> str:
    return f"{field}: {stored_path(path) or 'value'}"


def shown(named: Mapping[str, str]) -> dict[str, str]:
    """Texts by the names of leaves, as users know them: `params: generator.bias`."""
    parts = [(name.partition(": "), text) for name, text in named.items()]
    return {f"{field}{colon}{plain_path(p)}": text for (field, colon, p), text in parts}


def arrays_of(state: TrainState) -> Named:
    """The arrays that a checkpoint of `state` would have, by name."""
    return with_elements(name_leaves(state))


def evaluated_leaves(
    state: TrainState, evaluated: TrainState
) -> tuple[dict[str, str], Named]:
    """Where a checkpoint has the weights that are evaluated, by the names of weights.

    Only of those that are others than the ones trained, an average say. The second is
    what is to be stored besides, because no leaf of the state has it.
    """
    names = {id(leaf): name for name, leaf in _with_names(state)}
    where, others = {}, {}
    for field in WEIGHTS:
        trained = jax.tree_util.tree_leaves_with_path(getattr(state, field))
        seen = jax.tree.leaves(getattr(evaluated, field))
        for (path, leaf), other in zip(trained, seen, strict=True):
            if other is leaf:
                continue
            name = _name(field, path)
            where[name] = names.get(id(other)) or EVALUATED + name.replace(": ", ".", 1)
            if id(other) not in names:
                others[where[name]] = plain(other)
    return where, others


def with_elements(named: Named) -> Named:
    """Without arrays of size 0, which Orbax can't save and nobody needs."""
    return {name: leaf for name, leaf in named.items() if 0 not in leaf.shape}


def nested(named: Named) -> dict[str, Named]:
    """`{field: {path: leaf}}`, as Orbax writes them."""
    fields: dict[str, Named] = {}
    for name, leaf in named.items():
        field, _, path = name.partition(": ")
        fields.setdefault(field, {})[path] = leaf
    return fields


def flat(fields: Mapping[str, Named]) -> Named:
    """The inverse of `nested`."""
    return {
        f"{field}: {path}": leaf
        for field, leaves in fields.items()
        for path, leaf in leaves.items()
    }


def shapes(named: Named) -> dict[str, str]:
    """What `meta["leaves"]` says of the leaves, by name."""
    return {name: shape_text(leaf) for name, leaf in named.items()}


def shape_text(leaf: Any) -> str:
    """How an array is described: `float32(16, 4)`."""
    return f"{leaf.dtype}{tuple(leaf.shape)}"


def dtype_in(text: str) -> Any:
    """The dtype in what `shape_text` gave."""
    return jnp.dtype(text.partition("(")[0])


def shape_in(text: str) -> tuple[int, ...]:
    """The shape in what `shape_text` gave."""
    sizes = text.rstrip(")").partition("(")[2].split(",")
    return tuple(int(size) for size in sizes if size.strip())


def differences(
    wanted: Mapping[str, str], stored: Mapping[str, str], who: str = "trainer"
) -> list[str]:
    """A line for every leaf that `who` wants and a checkpoint has not, or otherwise."""
    return [
        f"  {name}: the checkpoint has {stored.get(name, 'nothing')}, the {who}"
        f" {wanted.get(name, 'nothing')}"
        for name in sorted(wanted.keys() | stored.keys())
        if wanted.get(name) != stored.get(name)
    ]


def first_lines(lines: list[str]) -> str:
    """The first twenty lines, and how many there are beside them."""
    more = f"\n  and {len(lines) - 20} more" if len(lines) > 20 else ""
    return "\n".join(lines[:20]) + more


def plain(leaf: Any) -> Any:
    """A typed PRNG key as the integers it is made of; other leaves as they are."""
    if not is_key(leaf):
        return leaf
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    return jax.eval_shape(jax.random.key_data, leaf)


def unplain(stored: Any, like: Any) -> Any:
    """The inverse of `plain`."""
    if not is_key(like):
        return stored
    impl = jax.random.key_impl(jnp.empty((), like.dtype))  # `like` may be a shape
    return jax.random.wrap_key_data(stored, impl=impl)
