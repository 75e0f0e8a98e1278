"""Gradients by each device from its own rows, inside a step over global arrays."""

import copy
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import equinox as eqx
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ..basics.tree import find_nodes, leaf_path, map_nodes
from ..step import (
    AxisCollectives,
    Collectives,
    Group,
    OnRows,
    Results,
    Weights,
)
from .base import draws_by_row
from .gathering import Gatherers, by_parts, only, without
from .meshes import names_of, without_mesh

NO_GATHERERS: Final = Gatherers()

Spec = Callable[[str, Any], PartitionSpec]
"""How the leaf at a path is split."""


class ByRows(Collectives):
    """Lets devices work on their rows alone, for a step that sees global arrays.

    Where all functions are written for one example, `over_rows` is a `jax.shard_map`:
    parameters are gathered before it, and gradients reduced after it, once, straight to
    the shards that are kept (`psum_scatter`). XLA would reduce the gradients of each
    micro-batch, and of each turn of a loop in the model. Where something is written for
    a batch, XLA partitions the whole computation.

    The rest, such as the optimizer, is outside: it sees global arrays, so that a global
    norm is one.

    Args:
        mesh: of Auto axes.
        row_axes: those of its axes that rows are split over.
        held: how parameters are split between steps.
        updated: how their gradients and optimizer states are.
        apart: whether devices work on their rows alone.
        find_gatherers: of a model's arrays, which modules gather their own parameters.
            All others are gathered before.
    """

    def __init__(
        self,
        mesh: Mesh,
        row_axes: tuple[str, ...],
        held: Spec,
        updated: Spec,
        *,
        apart: bool,
        find_gatherers: Callable[[PyTree], Gatherers] = lambda _: NO_GATHERERS,
    ):
        self.mesh = mesh
        self.row_axes = row_axes
        self.held = held
        self.updated = updated
        self.apart, self.find_gatherers = apart, find_gatherers
        # Of the step at hand.
        self._gatherers = NO_GATHERERS
        self._shards: dict[str, PartitionSpec] = {}

    def over_rows(
        self, function: OnRows, inputs: Any, groups: Sequence[Group], results: Results
    ) -> Any:
        this_step = self._knowing(inputs)
        if not self.apart or not draws_by_row():
            return function(this_step, inputs, groups)
        try:
            return this_step._mapped(function, inputs, groups, results)
        except Exception:
            function(this_step, inputs, groups)  # whose error has the batch's shapes
            raise

    def arrange(self, model: PyTree) -> PyTree:
        return self._gatherers.arranged(model, self._shards, self.row_axes, self.mesh)

    def gather(self, params: PyTree) -> PyTree:
        return self._constrained(params, self._used(self._shards))

    def sum_gradients(self, gradients: PyTree) -> PyTree:
        return self.like_gradients(gradients)

    def like_gradients(self, params: PyTree) -> PyTree:
        return self._constrained(params, self.updated)

    def _constrained(self, tree: PyTree, spec: Spec) -> PyTree:
        def constrain(path: Any, leaf: Any) -> Any:
            sharding = NamedSharding(self.mesh, spec(leaf_path(path), leaf))
            return jax.lax.with_sharding_constraint(leaf, sharding)

        return jax.tree_util.tree_map_with_path(constrain, tree)

    def _knowing(self, inputs: Any) -> "ByRows":
        """This, for a step of these inputs, whose modules may gather."""
        weights, *_ = find_nodes(Weights, inputs)
        model = eqx.combine(weights.params, weights.buffers)
        knowing = copy.copy(self)
        gatherers = self.find_gatherers(model)
        knowing._shards = self._split_in(model, gatherers)
        knowing._gatherers = gatherers if knowing._shards else NO_GATHERERS
        return knowing

    def _mapped(
        self, function: OnRows, inputs: Any, groups: Sequence[Group], results: Results
    ) -> Any:
        """`function` on each device's rows, and its gradients summed.

        The `_shards`, which modules gather for themselves, stay split, and so do their
        gradients.
        """
        weights, *_ = find_nodes(Weights, inputs)
        shards = self._shards
        trained = self._split_in(weights.params, self._gatherers)
        num_shards = math.prod(self.mesh.shape[name] for name in self.row_axes)
        roles = results if isinstance(results, tuple) else (results,)
        rows, whole = PartitionSpec(self.row_axes), PartitionSpec()
        arrange = functools.partial(
            self._gatherers.arranged, specs=shards, axes=self.row_axes
        )
        own_rows = _OwnRows(self.row_axes, num_shards, arrange, shards)

        def on_one_device(inputs: Any, groups: Sequence[Group]) -> tuple[Any, ...]:
            values = function(own_rows, inputs, groups)
            values = values if isinstance(results, tuple) else (values,)
            return tuple(
                _stacked(part, shards) if role == "gradients" else part
                for role, part in zip(roles, values, strict=True)
            )

        # Over other axes XLA splits them.
        own_shards, own_trained = (
            {name: only(self.row_axes, spec) for name, spec in specs.items()}
            for specs in (shards, trained)
        )
        is_alone = {*self.mesh.axis_names} == {*self.row_axes}
        spec_of = {"gradients": (rows, own_trained), "rows": rows, "replicated": whole}
        values = jax.shard_map(
            without_mesh(on_one_device) if is_alone else on_one_device,
            mesh=self.mesh,
            in_specs=(
                _specs_of(inputs, own_shards),
                [Group(PartitionSpec(None, self.row_axes), whole, whole)] * len(groups),
            ),
            out_specs=tuple(spec_of[role] for role in roles),
            axis_names=set(self.row_axes),
            check_vma=False,
        )(self._as_used(inputs, shards), list(groups))
        values = tuple(
            self._summed(*part) if role == "gradients" else part
            for role, part in zip(roles, values, strict=True)
        )
        return values if isinstance(results, tuple) else values[0]

    def _split_in(
        self, params: PyTree, gatherers: Gatherers
    ) -> dict[str, PartitionSpec]:
        """How those leaves are split that stay so over the rows' axes, by name."""
        specs: dict[str, PartitionSpec] = {}
        if not gatherers.paths:
            return specs
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            name = leaf_path(path)
            spec = self.held(name, leaf)
            if gatherers.gather(name, spec, self.row_axes):
                specs[name] = spec
        return specs

    @jax.named_scope("parameters")
    def _as_used(self, inputs: Any, shards: Mapping[str, Any]) -> Any:
        """Inputs with whole weights, but for `shards`."""

        def gathered(weights: Weights) -> Weights:
            params = self._constrained(weights.params, self._used(shards))
            buffers = self._constrained(weights.buffers, self._used(shards))
            return weights._replace(params=params, buffers=buffers)

        return map_nodes(Weights, gathered, inputs)

    def _used(self, shards: Mapping[str, Any]) -> Spec:
        """How leaves are split in a step: over other axes, but for its `shards`."""

        def spec(path: str, leaf: Any) -> PartitionSpec:
            held = self.held(path, leaf)
            return held if path in shards else without(self.row_axes, held)

        return spec

    @jax.named_scope("gradients")
    def _summed(self, stacked: PyTree, shards: Mapping[str, Any]) -> PyTree:
        """What `_stacked` gave, summed over the devices, and held as `updated`."""
        leaves, treedef = jax.tree_util.tree_flatten_with_path(stacked)
        specs = [
            self.updated(leaf_path(path), jax.ShapeDtypeStruct(x.shape[1:], x.dtype))
            for path, x in leaves
        ]
        # Split over other axes before, and over those of the rows after.
        others = [without(self.row_axes, spec) for spec in specs]
        targets = [
            spec if self._ends_in_row_axes(spec) else other
            for spec, other in zip(specs, others, strict=True)
        ]

        def reduce(stacks: list[Any]) -> list[Any]:
            return [
                self._reduced(stack[0], target)
                for stack, target in zip(stacks, targets, strict=True)
            ]

        summed = jax.shard_map(
            reduce,
            mesh=self.mesh,
            in_specs=([PartitionSpec(self.row_axes, *other) for other in others],),
            out_specs=targets,
            check_vma=False,
        )([leaf for _, leaf in leaves])

        # Those of shards come in at their places.
        def filled(path: Any, leaf: Any) -> Any:
            return shards.get(leaf_path(path)) if leaf is None else leaf

        whole = jax.tree_util.tree_map_with_path(
            filled, treedef.unflatten(summed), is_leaf=lambda leaf: leaf is None
        )
        return self.like_gradients(whole)

    def _reduced(self, gradient: Any, target: PartitionSpec) -> Any:
        """The shard that `target` leaves here of a sum over the rows' devices."""
        left = list(self.row_axes)
        for axis, names in enumerate(target):
            ours = tuple(name for name in names_of(names) if name in self.row_axes)
            if ours:
                gradient = jax.lax.psum_scatter(
                    gradient, ours, scatter_dimension=axis, tiled=True
                )
                left = [name for name in left if name not in ours]
        return jax.lax.psum(gradient, tuple(left)) if left else gradient

    def _ends_in_row_axes(self, spec: PartitionSpec) -> bool:
        """Whether each array axis is split by other mesh axes first, if by any.

        Only then are the shards of a shard those that `spec` means.
        """
        for names in map(names_of, spec):
            ours = [name in self.row_axes for name in names]
            if ours != sorted(ours):
                return False
        return True


class _OwnRows(AxisCollectives):
    """The collectives of a device that works on its rows alone.

    It has full parameters; but of those that some modules gather, its shards.
    """

    def __init__(
        self,
        axes: tuple[str, ...],
        num_shards: int,
        arrange: Callable[[PyTree], PyTree],
        shards: Mapping[str, PartitionSpec],
    ):
        super().__init__(axes, num_shards)
        self._axes = axes
        self._arrange, self.shards = arrange, shards

    def arrange(self, model: PyTree) -> PyTree:
        return self._arrange(model)

    def sum_gradients(self, gradients: PyTree) -> PyTree:
        """Sums gradients of shards over the devices that have the same ones. `ByRows`
        sums the others, and knows where they go."""

        def summed(path: Any, leaf: Any) -> Any:
            if (spec := self.shards.get(leaf_path(path))) is None:
                return leaf
            done = set(itertools.chain(*map(names_of, spec)))
            left = tuple(name for name in self._axes if name not in done)
            reduce = functools.partial(jax.lax.psum, axis_name=left)
            others = without(self._axes, spec)
            return by_parts(reduce, others)(leaf) if left else leaf

        return jax.tree_util.tree_map_with_path(summed, gradients)


def _stacked(
    gradients: PyTree, shards: Mapping[str, Any]
) -> tuple[PyTree, dict[str, Any]]:
    """A device's gradients, not yet summed: its layer of a stack. And those of shards,
    which are, by name."""
    apart: dict[str, Any] = {}

    def stack(path: Any, leaf: Any) -> Any:
        if (name := leaf_path(path)) not in shards:
            return leaf[None]
        apart[name] = leaf
        return None

    return jax.tree_util.tree_map_with_path(stack, gradients), apart


def _specs_of(inputs: Any, shards: Mapping[str, PartitionSpec]) -> Any:
    """How inputs are split: not at all, but for the `shards` of weights."""

    whole = PartitionSpec()

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        return shards.get(leaf_path(path), whole)

    def specs(weights: Weights) -> Weights:
        params = jax.tree_util.tree_map_with_path(spec, weights.params)
        buffers = jax.tree_util.tree_map_with_path(spec, weights.buffers)
        return Weights(params, buffers, whole, whole, whole)

    return map_nodes(Weights, specs, inputs, others=lambda _: whole)
