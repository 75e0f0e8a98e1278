"""Leaves of a model by dotted names, patterns of them, and what a file calls them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..basics.tree import get_node, is_key, stored_path, to_dotted
from ..strategies.stack import Stack

INDEX: Final = ".safetensors.index.json"
"""How the name of an index of several files ends."""

_OPERATIONS: Final = {
    "T": "('T', *axes)",
    "split": "('split', parts, index) or ('split', parts, index, axis)",
    "squeeze": "('squeeze', *axes)",
    "expand": "('expand', *axes)",
}

_FINISHED: Final = 1_000_000
"""Steps of a BatchNorm after which its running statistics need no correction."""


class Operation(NamedTuple):
    """What is done to a tensor of a file."""

    kind: str
    numbers: tuple[int, ...]

    def applied(self, array: np.ndarray) -> np.ndarray:
        """What it makes of an array: a view.

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

    def undone(self, array: np.ndarray) -> np.ndarray:
        """What it makes this array of; not of parts."""
        if self.kind == "T":
            return array.transpose(np.argsort(self.numbers) if self.numbers else None)
        opposite = "expand" if self.kind == "squeeze" else "squeeze"
        return Operation(opposite, self.numbers).applied(array)

    def __str__(self) -> str:
        numbers = ", ".join(map(str, self.numbers))
        return self.kind + (f"({numbers})" if numbers else "")


class Tensor(NamedTuple):
    """A tensor of a file, by name or pattern, and what is done to it, in order."""

    name: str
    operations: tuple[Operation, ...] = ()

    def __str__(self) -> str:
        return ", ".join([self.name, *map(str, self.operations)])


class Leaf(NamedTuple):
    """An array of a model or of its state, or its shape."""

    where: str
    """"model", or "state"."""
    place: int
    """Its number among the leaves there."""
    value: Any
    names: Mapping[str, tuple[int, ...]]
    """By names: the index of what is so called in its first axes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what each name means."""
        return self.value.shape[len(next(iter(self.names.values()))) :]


class Statistics(NamedTuple):
    """Where a state has the running statistics of a `BatchNorm`, by leaf."""

    norm: Any
    mean: int
    variance: int
    counter: int

    def finished(self) -> jax.Array:
        """The counter where the statistics are complete, as those of a file are."""
        return jnp.array(False if self.norm.mode == "ema" else _FINISHED)

    def correction(self, counter: jax.Array) -> Any:
        """What the statistics are divided by in inference."""
        if self.norm.mode == "ema":
            return 1
        return jnp.where(counter == 0, 1, 1 - self.norm.momentum**counter)


def is_tensor(leaf: Any) -> bool:
    """Whether a leaf is an array, or the shape of one; no key, no number."""
    kinds = jax.Array | np.ndarray | jax.ShapeDtypeStruct
    return isinstance(leaf, kinds) and not is_key(leaf)


def leaves_of(model: PyTree, state: eqx.nn.State | None) -> list[Leaf]:
    """All arrays, with the names that patterns are compared with."""
    leaves = []
    for place, (path, value) in enumerate(jax.tree_util.tree_leaves_with_path(model)):
        if is_tensor(value):
            leaves.append(Leaf("model", place, value, _names(model, path)))
    if state is None:
        return leaves

    values, places = jax.tree.leaves(state), numbered(state)
    norms = _nodes(eqx.nn.BatchNorm, model)
    for name, norm in norms.items():
        held = statistics_of(norm, places)
        pairs = ("running_mean", held.mean), ("running_var", held.variance)
        for what, place in pairs:
            whole = f"{name}.{what}".lstrip(".")
            leaves.append(Leaf("state", place, values[place], {whole: ()}))
    for name, index in _nodes(eqx.nn.StateIndex, model).items():
        if name.rpartition(".")[0] in norms:
            continue
        for path, place in jax.tree_util.tree_leaves_with_path(places.get(index)):
            whole = ".".join(filter(None, [name, to_dotted(stored_path(path))]))
            leaves.append(Leaf("state", place, values[place], {whole: ()}))
    return leaves


def numbered(state: eqx.nn.State) -> eqx.nn.State:
    """A state with the number of each leaf in its place."""
    treedef = jax.tree.structure(state)
    return treedef.unflatten(range(treedef.num_leaves))


def statistics_of(norm: Any, places: eqx.nn.State) -> Statistics:
    """Where a `BatchNorm` has its state, by a state that is `numbered`."""
    is_ema = norm.mode == "ema"
    of_norm = norm.ema_state_index if is_ema else norm.batch_state_index
    counter = norm.ema_first_time_index if is_ema else norm.batch_counter
    mean, variance = places.get(of_norm)
    return Statistics(norm, mean, variance, places.get(counter))


def norms_in(model: PyTree, state: eqx.nn.State | None) -> list[Statistics]:
    """Where a state has what belongs to each `BatchNorm` of a model."""
    if state is None:
        return []
    places = numbered(state)
    norms = _nodes(eqx.nn.BatchNorm, model).values()
    return [statistics_of(norm, places) for norm in norms]


def _nodes(kind: type, model: PyTree) -> dict[str, Any]:
    nodes = jax.tree_util.tree_leaves_with_path(
        model, is_leaf=lambda node: isinstance(node, kind)
    )
    of_kind = (pair for pair in nodes if isinstance(pair[1], kind))
    return {to_dotted(stored_path(path)): node for path, node in of_kind}


def _names(model: PyTree, path: Sequence[Any]) -> dict[str, tuple[int, ...]]:
    """A leaf's names: with a number for `stacked`, one for each block of a `Stack`."""
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


def parsed(value: Any, key: str) -> Tensor | None:
    """What `names` has for a pattern of leaves, checked.

    Raises:
        TypeError, ValueError: for what is neither a name nor a name with operations.
    """
    if value is None or isinstance(value, str):
        return None if value is None else Tensor(value)
    if not isinstance(value, tuple) or not value or not isinstance(value[0], str):
        raise TypeError(
            f"`names`[{key!r}] must be the name of a tensor, a tuple of it and what is"
            f" done to it, such as ('c_attn.weight', 'T'), or None; got {value!r}."
        )
    return Tensor(value[0], tuple(_operation(step, key) for step in value[1:]))


def _operation(step: Any, key: str) -> Operation:
    given: tuple[Any, ...] = step if isinstance(step, tuple) and step else (step,)
    kind, numbers = given[0], given[1:]
    known = isinstance(kind, str) and kind in _OPERATIONS
    fits = all(isinstance(number, int) for number in numbers)
    count = len(numbers)
    if known and kind == "split":
        fits = fits and count in (2, 3) and 0 <= numbers[1] < numbers[0]
    elif known and kind != "T":
        fits = fits and count > 0
    if not known or not fits:
        raise ValueError(
            f"`names`[{key!r}] has {step!r}, which is none of"
            f" {', '.join(_OPERATIONS.values())}."
        )
    return Operation(kind, numbers)


class Wanted(NamedTuple):
    """What `names` says of one leaf."""

    leaf: Leaf
    parts: dict[tuple[int, ...], tuple[str, Tensor | None]]
    """By index in its first axes: its name, and its tensor; None stays as it is."""


def resolved(
    names: Mapping[str, Any], leaves: Iterable[Leaf]
) -> tuple[list[Wanted], list[tuple[str, Leaf]]]:
    """What each leaf is to be filled with, and what no name fills, with its leaf.

    Raises:
        TypeError, ValueError: for patterns and values of `names` that mean nothing.
    """
    if not isinstance(names, Mapping):
        raise TypeError(
            "`names` must be a dict from names of leaves to names of tensors; got a"
            f" {type(names).__name__}."
        )
    tensors = {key: parsed(value, key) for key, value in names.items()}
    patterns = {key: pattern(to_dotted(key)) for key in names}
    used: set[str] = set()
    wanted, unnamed = [], []
    everything = []
    for leaf in leaves:
        parts: dict[tuple[int, ...], tuple[str, Tensor | None]] = {}
        for name, index in leaf.names.items():
            everything.append(name)
            key = _only_match(name, patterns)
            if key is None:
                unnamed.append((name, leaf))
                continue
            used.add(key)
            tensor, match = tensors[key], patterns[key].fullmatch(name)
            assert match is not None
            if tensor is not None:
                filled = _substituted(tensor.name, match.groups(), key)
                tensor = tensor._replace(name=filled)
            parts[index] = name, tensor
        if len(parts) == len(leaf.names):
            wanted.append(Wanted(leaf, parts))
    for key in names:
        if key not in used:
            listed = ", ".join(
                row[0] for row in grouped((n, "", "") for n in everything)
            )
            raise ValueError(
                f"`names`[{key!r}] matches no leaf of the model; those are {listed}."
            )
    return wanted, unnamed


def pattern(text: str) -> re.Pattern[str]:
    """`*` is a part of a name without dots, `**` any part."""
    pieces = re.split(r"(\*+)", text)
    stars = {"*": "([^.]+)", "**": "(.+)"}
    return re.compile("".join(stars.get(piece) or re.escape(piece) for piece in pieces))


def _only_match(name: str, patterns: Mapping[str, re.Pattern[str]]) -> str | None:
    keys = [key for key, regex in patterns.items() if regex.fullmatch(name)]
    exact = [key for key in keys if "*" not in key]
    if len(exact or keys) > 1:
        raise ValueError(
            f"`names`: {' and '.join(map(repr, exact or keys))} both match {name}; one"
            " alone may. Write one so that it does not, or the whole name beside"
            " patterns."
        )
    return next(iter(exact or keys), None)


def _substituted(name: str, captured: Sequence[str], key: str) -> str:
    pieces = re.split(r"\*+", name)
    if len(pieces) == 1:
        return name
    if len(pieces) - 1 != len(captured):
        raise ValueError(
            f"`names`[{key!r}] has {len(captured)} stars and {name!r}"
            f" {len(pieces) - 1}; each star stands for what the one in its place in the"
            " other name does."
        )
    return pieces[0] + "".join(
        part + piece for part, piece in zip(captured, pieces[1:], strict=True)
    )


def grouped(rows: Iterable[tuple[str, str, str]]) -> list[tuple[str, str, str, int]]:
    """Rows of texts, those as one that differ in numbers of names alone: in `*`.

    With how many rows each stands for.
    """
    groups: dict[tuple[str, str, str], list[tuple[str, str, str]]] = {}
    for row in rows:
        first, second = (_NUMBER.sub("*", text) for text in row[:2])
        groups.setdefault((first, second, row[2]), []).append(row)
    return [
        (_common([a for a, _, _ in rows]), _common([b for _, b, _ in rows]), text, n)
        for (_, _, text), rows in groups.items()
        for n in [len(rows)]
    ]


_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.|\s|$)")


def _common(names: Sequence[str]) -> str:
    """Names that differ in numbers as one, with `*` for the numbers that differ."""
    columns = zip(*[re.split(r"([.\s])", name) for name in names], strict=True)
    return "".join(part[0] if len({*part}) == 1 else "*" for part in columns)
