"""Maps the leaves of a model, by dotted names, to the tensors of a file."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..basics.tree import (
    compile_pattern,
    format_paths,
    get_node,
    is_key,
    stored_path,
    to_dotted,
)
from ..strategies.stack import Stack

_OPERATIONS: Final = {
    "T": "('T', *axes)",
    "split": "('split', parts, index) or ('split', parts, index, axis)",
    "squeeze": "('squeeze', *axes)",
    "expand": "('expand', *axes)",
}

_MANY_STEPS: Final = 1_000_000
"""Steps of a BatchNorm after which its running statistics need no correction."""


class Operation(NamedTuple):
    """An operation on a tensor of a file."""

    kind: str
    numbers: tuple[int, ...]

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Returns the result, a view of the array.

        Raises:
            ValueError, IndexError: if the shape does not allow it.
        """
        if self.kind == "T":
            return array.transpose(self.numbers or None)
        if self.kind == "split":
            count, part, axis = (*self.numbers, 0)[:3]
            return np.split(array, count, axis)[part]
        squeeze_or_expand = np.squeeze if self.kind == "squeeze" else np.expand_dims
        return squeeze_or_expand(array, self.numbers)

    def invert(self, array: np.ndarray) -> np.ndarray:
        """Returns the array that `apply` turns into this one; not for a split."""
        if self.kind == "T":
            return array.transpose(np.argsort(self.numbers) if self.numbers else None)
        opposite = "expand" if self.kind == "squeeze" else "squeeze"
        return Operation(opposite, self.numbers).apply(array)

    def __str__(self) -> str:
        numbers = ", ".join(map(str, self.numbers))
        return self.kind + (f"({numbers})" if numbers else "")


class Tensor(NamedTuple):
    """A tensor of a file, by name or pattern, and the operations on it, in order."""

    name: str
    operations: tuple[Operation, ...] = ()


class ModelLeaf(NamedTuple):
    """An array of a model or of its state, or the shape of one."""

    tree: str
    """`"model"` or `"state"`."""
    index: int
    """Its number among the leaves of that tree."""
    value: Any
    names: Mapping[str, tuple[int, ...]]
    """Maps names to indices of the first axes: one name for each block of a `Stack`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what a name stands for: a `Stack` block, or the full leaf."""
        return self.value.shape[len(next(iter(self.names.values()))) :]


class LeafMapping(NamedTuple):
    """A leaf with the tensors that fill it."""

    leaf: ModelLeaf
    parts: dict[tuple[int, ...], tuple[str, Tensor | None]]
    """By index of the first axes: a name and its tensor. None leaves it unchanged."""


class NormStatistics(NamedTuple):
    """The running statistics of a `BatchNorm`, as indices of leaves of a state."""

    norm: Any
    mean: int
    variance: int
    counter: int

    def make_final_counter(self) -> jax.Array:
        """Returns the counter of complete statistics, as those of a file are."""
        return jnp.array(False if self.norm.mode == "ema" else _MANY_STEPS)

    def get_correction(self, counter: jax.Array) -> Any:
        """Returns the number that inference divides the statistics by."""
        if self.norm.mode == "ema":
            return 1
        return jnp.where(counter == 0, 1, 1 - self.norm.momentum**counter)


def is_tensor(leaf: Any) -> bool:
    """Returns True for an array or its shape, but not for keys and Python numbers."""
    kinds = jax.Array | np.ndarray | jax.ShapeDtypeStruct
    return isinstance(leaf, kinds) and not is_key(leaf)


def list_leaves(model: PyTree, state: eqx.nn.State | None) -> list[ModelLeaf]:
    """Lists all arrays of a model and its state with their names."""
    leaves = []
    for index, (path, value) in enumerate(jax.tree_util.tree_leaves_with_path(model)):
        if is_tensor(value):
            leaves.append(ModelLeaf("model", index, value, _list_names(model, path)))
    if state is None:
        return leaves

    names: dict[str, int] = {}
    norms, numbers = find_norms(model, state), _number_leaves(state)
    for name, norm in norms.items():
        names[f"{name}.running_mean".lstrip(".")] = norm.mean
        names[f"{name}.running_var".lstrip(".")] = norm.variance
    for name, index in _find_nodes(eqx.nn.StateIndex, model).items():
        if name.rpartition(".")[0] not in norms:
            for path, number in jax.tree_util.tree_leaves_with_path(numbers.get(index)):
                within = to_dotted(stored_path(path))
                names[".".join(filter(None, [name, within]))] = number
    values = jax.tree.leaves(state)
    return leaves + [
        ModelLeaf("state", number, values[number], {name: ()})
        for name, number in names.items()
    ]


def find_norms(model: PyTree, state: eqx.nn.State | None) -> dict[str, NormStatistics]:
    """Finds the statistics of each `BatchNorm` of a model, by its name."""
    if state is None:
        return {}
    numbers, norms = _number_leaves(state), {}
    for name, norm in _find_nodes(eqx.nn.BatchNorm, model).items():
        is_ema = norm.mode == "ema"
        statistics = norm.ema_state_index if is_ema else norm.batch_state_index
        counter = norm.ema_first_time_index if is_ema else norm.batch_counter
        mean, variance = numbers.get(statistics)
        norms[name] = NormStatistics(norm, mean, variance, numbers.get(counter))
    return norms


def _number_leaves(state: eqx.nn.State) -> eqx.nn.State:
    """Returns a state with the number of each leaf in its place."""
    treedef = jax.tree.structure(state)
    return treedef.unflatten(range(treedef.num_leaves))


def _find_nodes(kind: type, model: PyTree) -> dict[str, Any]:
    nodes = jax.tree_util.tree_leaves_with_path(
        model, is_leaf=lambda node: isinstance(node, kind)
    )
    pairs = (pair for pair in nodes if isinstance(pair[1], kind))
    return {to_dotted(stored_path(path)): node for path, node in pairs}


def _list_names(model: PyTree, path: Sequence[Any]) -> dict[str, tuple[int, ...]]:
    """Lists a leaf's names: with a block's number for `stacked` in a `Stack`."""
    parts, sizes = [], []
    value = get_node(model, path)
    for end, key in enumerate(path):
        if isinstance(get_node(model, path[:end]), Stack):
            parts.append(None)
            sizes.append(value.shape[len(sizes)])
        else:
            parts.append(to_dotted(stored_path([key])))

    def name(index: tuple[int, ...]) -> str:
        numbers = iter(index)
        named = (str(next(numbers)) if part is None else part for part in parts)
        return ".".join(named) or "value"

    return {name(index): index for index in np.ndindex(*sizes)}


def map_leaves(
    names: Mapping[str, Any], leaves: Iterable[ModelLeaf]
) -> tuple[list[LeafMapping], list[tuple[str, ModelLeaf]]]:
    """Maps leaves to tensors, by the `names` of `load_weights`.

    Returns:
        The mappings, and each name that no pattern matches, with its leaf.

    Raises:
        TypeError, ValueError: for wrong patterns and values of `names`.
    """
    if not isinstance(names, Mapping):
        raise TypeError(
            "`names` must be a dict from names of leaves to names of tensors; got a"
            f" {type(names).__name__}."
        )
    tensors = {key: _parse_tensor(value, key) for key, value in names.items()}
    patterns = {key: compile_pattern(key) for key in names}
    mappings, unmatched, all_names = [], [], []
    unused = dict.fromkeys(names)
    for leaf in leaves:
        parts: dict[tuple[int, ...], tuple[str, Tensor | None]] = {}
        for name, index in leaf.names.items():
            all_names.append(name)
            key = _find_key(name, patterns)
            if key is None:
                unmatched.append((name, leaf))
                continue
            unused.pop(key, None)
            match = patterns[key].fullmatch(name)
            assert match is not None
            if (tensor := tensors[key]) is not None:
                filled = _fill_stars(tensor.name, match.groups(), key)
                tensor = tensor._replace(name=filled)
            parts[index] = name, tensor
        if len(parts) == len(leaf.names):
            mappings.append(LeafMapping(leaf, parts))
    for key in unused:
        raise ValueError(
            f"`names`[{key!r}] matches no leaf of the model; there are"
            f" {format_paths(all_names)}."
        )
    return mappings, unmatched


def _parse_tensor(value: Any, key: str) -> Tensor | None:
    if value is None or isinstance(value, str):
        return None if value is None else Tensor(value)
    if not isinstance(value, tuple) or not value or not isinstance(value[0], str):
        raise TypeError(
            f"`names`[{key!r}] must be the name of a tensor, a tuple of it and what is"
            f" done to it, such as ('c_attn.weight', 'T'), or None; got {value!r}."
        )
    return Tensor(value[0], tuple(_parse_operation(step, key) for step in value[1:]))


def _parse_operation(step: Any, key: str) -> Operation:
    kind: Any
    kind, *numbers = step if isinstance(step, tuple) and step else (step,)
    is_valid = isinstance(kind, str) and kind in _OPERATIONS
    is_valid = is_valid and all(isinstance(number, int) for number in numbers)
    if is_valid and kind == "split":
        is_valid = len(numbers) in (2, 3) and 0 <= numbers[1] < numbers[0]
    if not is_valid or kind != "T" and not numbers:
        raise ValueError(
            f"`names`[{key!r}] has {step!r}, which is none of"
            f" {', '.join(_OPERATIONS.values())}."
        )
    return Operation(kind, tuple(numbers))


def _find_key(name: str, patterns: Mapping[str, re.Pattern[str]]) -> str | None:
    """Returns the pattern that matches a name; a full name comes before patterns."""
    keys = [key for key, regex in patterns.items() if regex.fullmatch(name)]
    exact = [key for key in keys if "*" not in key]
    if len(exact or keys) > 1:
        raise ValueError(
            f"`names`: {' and '.join(map(repr, exact or keys))} both match {name}; one"
            " alone may. Write one so that it does not, or the whole name beside"
            " patterns."
        )
    return next(iter(exact or keys), None)


def _fill_stars(name: str, captured: Sequence[str | None], key: str) -> str:
    stars, values = r"\*\*?", iter(captured)
    count = len(re.findall(stars, name))
    if count and count != len(captured):
        raise ValueError(
            f"`names`[{key!r}] has {len(captured)} stars and {name!r} {count}; each"
            " star stands for what the one in its place in the other name does."
        )
    if not count:
        return name
    filled = re.sub(stars, lambda _: next(values) or "", name)
    return re.sub(r"\.+", ".", filled).strip(".")  # `**` may stand for no part
