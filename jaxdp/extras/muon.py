"""Muon for parameters that are split over devices."""

import collections
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, PyTree
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from ..basics.arguments import checks_arguments
from ..basics.tree import get_node, mark_leaves
from ..strategies.stack import Stack

_AXES: Final = MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)
"""The axes of a weight of `eqx.nn.Linear`, `(out_features, in_features)`."""


@checks_arguments
def muon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    adam: Iterable[str] = (),
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    beta: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    consistent_rms: float | None = None,
) -> optax.GradientTransformation:
    """Muon, which orthogonalizes the momentum of matrices; Adam for all else.

    The numbers are those of `optax.contrib.muon`, given the same axes of the same
    leaves. A leaf with two axes is a matrix, and so is each block of a leaf in a
    `jaxdp.Stack`. Embeddings, vectors, convolutions and what `adam` names get Adam.

    Where several devices hold the state, each orthogonalizes its share of the matrices:
    those of one shape are counted together. Under `FSDP` this sends a matrix to its
    device and the result back, instead of gathering all matrices on all devices.

    Args:
        learning_rate: a number or a schedule.
        adam: patterns of the paths of more leaves for Adam, such as `"head"`.
        adam_learning_rate: default: `learning_rate`.
        beta: the decay of the momentum.
        nesterov: whether the momentum looks ahead, as `optax.contrib.muon`'s does; for
            Adam, too.
        ns_steps: Newton-Schulz iterations.
        eps: added to norms before a division by them.
        weight_decay: of matrices, times the learning rate.
        consistent_rms: updates of matrices have this root mean square, in the place of
            Muon's own scale; 0.2 is about Adam's (arXiv:2502.16982).

    Returns:
        An optimizer, for a `Trainer` or any other loop.
    """
    patterns = [adam] if isinstance(adam, str) else list(adam)
    optimizer = optax.chain(
        _momentum(beta, nesterov),
        optax.stateless(lambda updates, _: _orthogonalize(updates, ns_steps, eps)),
        optax.stateless(lambda updates, _: _scale_updates(updates, consistent_rms)),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )
    others = optax.adamw(
        learning_rate if adam_learning_rate is None else adam_learning_rate,
        eps=eps,
        weight_decay=0.0,
        nesterov=nesterov,
    )
    return optax.partition(
        {"muon": optimizer, "adam": others}, lambda params: _labels(params, patterns)
    )


def _labels(params: PyTree, patterns: Sequence[str]) -> PyTree:
    """Returns for each leaf which of the two optimizers updates it."""

    def label(path: Any, leaf: Array, is_named: bool) -> str:
        is_for_muon = not is_named and _is_matrix(params, path, leaf)
        return "muon" if is_for_muon else "adam"

    named = mark_leaves("`adam`", patterns, params)
    return jax.tree_util.tree_map_with_path(label, params, named)


def _is_matrix(params: PyTree, path: Any, leaf: Array) -> bool:
    """Returns True if a leaf has two axes, without those of the stacks around it."""
    nodes = [get_node(params, path[:length]) for length in range(len(path))]
    stacks = sum(isinstance(node, Stack) for node in nodes)
    is_embedding = any(isinstance(node, eqx.nn.Embedding) for node in nodes)
    return not is_embedding and leaf.ndim - stacks == 2


class _Momentum(NamedTuple):
    count: Any
    """int32 `()`."""
    mean: PyTree


def _momentum(beta: float, nesterov: bool) -> optax.GradientTransformation:
    """Returns the momentum of `optax.contrib.muon`, whose bias is corrected."""

    def init(params: PyTree) -> _Momentum:
        return _Momentum(jnp.int32(0), optax.tree.zeros_like(params))

    def update(updates: PyTree, state: Any, params: Any = None) -> Any:
        mean = optax.tree.update_moment(updates, state.mean, beta, 1)
        count = optax.safe_increment(state.count)
        corrected = optax.tree.bias_correction
        if not nesterov:
            return corrected(mean, beta, count), _Momentum(count, mean)
        ahead = jax.tree.map(
            lambda mean, grad: beta * mean + (1 - beta) * grad,
            corrected(mean, beta, optax.safe_increment(count)),
            corrected(updates, beta, count),
        )
        return ahead, _Momentum(count, mean)

    return optax.GradientTransformation(init, update)


def _orthogonalize(updates: PyTree, ns_steps: int, eps: float) -> PyTree:
    """Orthogonalizes all matrices, those of one shape and dtype at once."""
    leaves, treedef = jax.tree.flatten(updates)
    alike = collections.defaultdict(list)
    for place, leaf in enumerate(leaves):
        alike[leaf.shape[-2:], leaf.dtype].append(place)

    # The transformation of optax, without momentum; its state is not used.
    newton_schulz = scale_by_muon(
        ns_steps=ns_steps,
        beta=0.0,
        eps=eps,
        nesterov=False,
        weight_dimension_numbers=_AXES,
    )

    def orthogonalize(matrices: Array) -> Array:
        state = newton_schulz.init(matrices)
        orthogonal: Any = newton_schulz.update(matrices, state)[0]
        return orthogonal

    for (shape, _), places in alike.items():
        stacks = [leaves[place].reshape(-1, *shape) for place in places]
        stacks = _distribute_over_devices(orthogonalize, stacks)
        for place, stack in zip(places, stacks, strict=True):
            leaves[place] = stack.reshape(leaves[place].shape)
    return treedef.unflatten(leaves)


def _distribute_over_devices(
    function: Callable[[Array], Array], stacks: Sequence[Array]
) -> list[Array]:
    """Applies `function` to stacks `(number, m, n)`, each matrix on one device.

    By hand: XLA would move the gradient and the momentum, not only their sum.
    """
    mesh = jax.typeof(stacks[0]).sharding.mesh
    ends = np.cumsum([len(stack) for stack in stacks])
    shape, names, count = stacks[0].shape, mesh.axis_names, mesh.size

    def concatenate(*stacks: Array) -> Array:
        """Concatenates all matrices, padded by zeros to a multiple of the devices."""
        return jnp.pad(
            jnp.concatenate(stacks), [(0, -int(ends[-1]) % count), (0, 0), (0, 0)]
        )

    def apply_to_parts(*stacks: Array) -> list[Array]:
        """Runs on one device, which has a part of each matrix."""
        exchange = functools.partial(jax.lax.all_to_all, axis_name=names, tiled=True)
        own = exchange(concatenate(*stacks), split_axis=0, concat_axis=axis)
        parts = exchange(function(own), split_axis=axis, concat_axis=0)
        return jnp.split(parts, ends)[:-1]

    def apply_at_once(*stacks: Array) -> list[Array]:
        return jnp.split(function(jnp.concatenate(stacks)), ends)[:-1]

    # Inside of a `shard_map`, each device has all matrices already.
    if mesh.empty or {*mesh.axis_types} != {AxisType.Auto}:
        return apply_at_once(*stacks)
    # The split of FSDP. Matrices with another split are moved; replicated ones are not.
    axis = next((axis for axis in (1, 2) if shape[axis] % count == 0), None)

    @custom_vmap
    def divide(*stacks: Array) -> list[Array]:
        if axis is None:
            on_its_own = _shard_map(function, mesh, PartitionSpec(names))
            return jnp.split(on_its_own(concatenate(*stacks)), ends)[:-1]
        layout = PartitionSpec(*[None] * axis, names)
        return _shard_map(apply_to_parts, mesh, layout)(*stacks)

    @divide.def_vmap
    def map_replicas(size: int, is_mapped: Sequence[bool], *stacks: Array) -> Any:
        # The updates of replicas and members stay on the devices of these.
        axes = [0 if mapped else None for mapped in is_mapped]
        updates = jax.vmap(apply_at_once, axes, axis_size=size)(*stacks)
        return updates, [True] * len(stacks)

    return divide(*stacks)


def _shard_map(function: Any, mesh: Any, layout: PartitionSpec) -> Any:
    return jax.shard_map(function, mesh=mesh, in_specs=layout, out_specs=layout)


def _scale_updates(updates: PyTree, consistent_rms: float | None) -> PyTree:
    """Scales orthogonal matrices to the size of an update."""

    def scale(leaf: Array) -> Array:
        fan_out, fan_in = leaf.shape[-2:]
        if consistent_rms is not None:
            return math.sqrt(max(fan_in, fan_out)) * consistent_rms * leaf
        return math.sqrt(max(1, fan_out / fan_in)) * leaf

    return jax.tree.map(scale, updates)
