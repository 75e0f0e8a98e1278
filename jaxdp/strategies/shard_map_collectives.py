"""Data parallelism by `jax.shard_map`, inside a step over global arrays."""

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
from .base import is_rng_row_independent
from .fsdp_units import FSDPUnits, drop_axes, keep_axes, map_local_shards
from .meshes import clear_ambient_mesh, get_axis_names

NO_UNITS: Final = FSDPUnits()

Spec = Callable[[str, Any], PartitionSpec]
"""`(path, leaf)` to the split of the leaf."""


class ShardMapCollectives(Collectives):
    """Runs the rows of a step on their devices; the step itself sees global arrays.

    Where all functions are written for one example, `over_rows` is a `jax.shard_map`.
    Parameters are gathered before it. Gradients are reduced after it, once, directly
    to the shards of `update_spec` (`psum_scatter`); XLA would reduce those of each
    micro-batch, and of each iteration of a loop in the model. Where something is
    written for a batch, XLA partitions the full computation.

    The optimizer runs outside of `over_rows`, on global arrays, so that a norm over all
    parameters is right.

    Args:
        mesh: a mesh of Auto axes.
        row_axes: the axes of the mesh that rows are split over.
        param_spec: the split of parameters between steps.
        update_spec: the split of their gradients and optimizer states.
        is_apart: whether each device works on its own rows alone.
        find_units: finds the modules of a model that gather their own parameters. All
            other parameters are gathered before the rows.
    """

    def __init__(
        self,
        mesh: Mesh,
        row_axes: tuple[str, ...],
        param_spec: Spec,
        update_spec: Spec,
        *,
        is_apart: bool,
        find_units: Callable[[PyTree], FSDPUnits] = lambda _: NO_UNITS,
    ):
        self.mesh = mesh
        self.row_axes = row_axes
        self.param_spec = param_spec
        self.update_spec = update_spec
        self.is_apart, self.find_units = is_apart, find_units
        # Set for one step by `_bind_step`.
        self._units = NO_UNITS
        self._shards: dict[str, PartitionSpec] = {}

    def over_rows(
        self, function: OnRows, inputs: Any, groups: Sequence[Group], results: Results
    ) -> Any:
        this_step = self._bind_step(inputs)
        if not self.is_apart or not is_rng_row_independent():
            return function(this_step, inputs, groups)
        try:
            return this_step._run_shard_map(function, inputs, groups, results)
        except Exception:
            function(this_step, inputs, groups)  # its error has the batch's shapes
            raise

    def arrange(self, model: PyTree) -> PyTree:
        return self._units.wrap_modules(model, self._shards, self.row_axes, self.mesh)

    def gather(self, params: PyTree) -> PyTree:
        return self._constrain(params, self._make_used_spec(self._shards))

    def sum_gradients(self, gradients: PyTree) -> PyTree:
        return self.like_gradients(gradients)

    def like_gradients(self, params: PyTree) -> PyTree:
        return self._constrain(params, self.update_spec)

    def _constrain(self, tree: PyTree, spec: Spec) -> PyTree:
        def constrain(path: Any, leaf: Any) -> Any:
            sharding = NamedSharding(self.mesh, spec(leaf_path(path), leaf))
            return jax.lax.with_sharding_constraint(leaf, sharding)

        return jax.tree_util.tree_map_with_path(constrain, tree)

    def _bind_step(self, inputs: Any) -> "ShardMapCollectives":
        """Returns a copy for a step of these inputs, which knows their units."""
        weights, *_ = find_nodes(Weights, inputs)
        model = eqx.combine(weights.params, weights.buffers)
        bound = copy.copy(self)
        units = self.find_units(model)
        bound._shards = self._find_shard_specs(model, units)
        bound._units = units if bound._shards else NO_UNITS
        return bound

    def _run_shard_map(
        self, function: OnRows, inputs: Any, groups: Sequence[Group], results: Results
    ) -> Any:
        """Runs `function` on each device's rows, and sums its gradients.

        The `_shards`, which modules gather in their calls, and the gradients of these
        stay split.
        """
        weights, *_ = find_nodes(Weights, inputs)
        shards = self._shards
        trained = self._find_shard_specs(weights.params, self._units)
        num_shards = math.prod(self.mesh.shape[name] for name in self.row_axes)
        roles = results if isinstance(results, tuple) else (results,)
        rows, whole = PartitionSpec(self.row_axes), PartitionSpec()
        arrange = functools.partial(
            self._units.wrap_modules, specs=shards, axes=self.row_axes
        )
        own_rows = _DeviceCollectives(self.row_axes, num_shards, arrange, shards)

        def on_one_device(inputs: Any, groups: Sequence[Group]) -> tuple[Any, ...]:
            values = function(own_rows, inputs, groups)
            values = values if isinstance(results, tuple) else (values,)
            return tuple(
                _stack_gradients(part, shards) if role == "gradients" else part
                for role, part in zip(roles, values, strict=True)
            )

        # XLA splits arrays over the other axes.
        own_shards, own_trained = (
            {name: keep_axes(self.row_axes, spec) for name, spec in specs.items()}
            for specs in (shards, trained)
        )
        is_alone = {*self.mesh.axis_names} == {*self.row_axes}
        spec_of = {"gradients": (rows, own_trained), "rows": rows, "replicated": whole}
        values = jax.shard_map(
            clear_ambient_mesh(on_one_device) if is_alone else on_one_device,
            mesh=self.mesh,
            in_specs=(
                _make_input_specs(inputs, own_shards),
                [Group(PartitionSpec(None, self.row_axes), whole, whole)] * len(groups),
            ),
            out_specs=tuple(spec_of[role] for role in roles),
            axis_names=set(self.row_axes),
            check_vma=False,
        )(self._gather_weights(inputs, shards), list(groups))
        values = tuple(
            self._reduce_stacks(*part) if role == "gradients" else part
            for role, part in zip(roles, values, strict=True)
        )
        return values if isinstance(results, tuple) else values[0]

    def _find_shard_specs(
        self, params: PyTree, units: FSDPUnits
    ) -> dict[str, PartitionSpec]:
        """Returns by name the specs of leaves that stay split over row axes."""
        specs: dict[str, PartitionSpec] = {}
        if not units.paths:
            return specs
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            name = leaf_path(path)
            spec = self.param_spec(name, leaf)
            if units.gather(name, spec, self.row_axes):
                specs[name] = spec
        return specs

    @jax.named_scope("parameters")
    def _gather_weights(self, inputs: Any, shards: Mapping[str, Any]) -> Any:
        """Returns inputs with full weights, but for `shards`."""

        def gather_one(weights: Weights) -> Weights:
            params = self._constrain(weights.params, self._make_used_spec(shards))
            buffers = self._constrain(weights.buffers, self._make_used_spec(shards))
            return weights._replace(params=params, buffers=buffers)

        return map_nodes(Weights, gather_one, inputs)

    def _make_used_spec(self, shards: Mapping[str, Any]) -> Spec:
        """Returns specs within a step: only `shards` are split over the rows' axes."""

        def spec(path: str, leaf: Any) -> PartitionSpec:
            param_spec = self.param_spec(path, leaf)
            return (
                param_spec if path in shards else drop_axes(self.row_axes, param_spec)
            )

        return spec

    @jax.named_scope("gradients")
    def _reduce_stacks(self, stacked: PyTree, shards: Mapping[str, Any]) -> PyTree:
        """Sums gradients of `_stack_gradients` over devices, split by `update_spec`."""
        leaves, treedef = jax.tree_util.tree_flatten_with_path(stacked)
        specs = [
            self.update_spec(
                leaf_path(path), jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
            )
            for path, x in leaves
        ]
        # Arrays are split over other axes before the sum, over row axes after it.
        others = [drop_axes(self.row_axes, spec) for spec in specs]
        targets = [
            spec if self._ends_in_row_axes(spec) else other
            for spec, other in zip(specs, others, strict=True)
        ]

        def reduce(stacks: list[Any]) -> list[Any]:
            return [
                self._reduce_to_shard(stack[0], target)
                for stack, target in zip(stacks, targets, strict=True)
            ]

        summed = jax.shard_map(
            reduce,
            mesh=self.mesh,
            in_specs=([PartitionSpec(self.row_axes, *other) for other in others],),
            out_specs=targets,
            check_vma=False,
        )([leaf for _, leaf in leaves])

        # Shards, summed already, return to their places in the tree.
        def fill_shard(path: Any, leaf: Any) -> Any:
            return shards.get(leaf_path(path)) if leaf is None else leaf

        whole = jax.tree_util.tree_map_with_path(
            fill_shard, treedef.unflatten(summed), is_leaf=lambda leaf: leaf is None
        )
        return self.like_gradients(whole)

    def _reduce_to_shard(self, gradient: Any, target: PartitionSpec) -> Any:
        """Sums over the rows' devices, to this device's shard by `target`."""
        remaining = list(self.row_axes)
        for axis, names in enumerate(target):
            row_names = tuple(
                name for name in get_axis_names(names) if name in self.row_axes
            )
            if row_names:
                gradient = jax.lax.psum_scatter(
                    gradient, row_names, scatter_dimension=axis, tiled=True
                )
                remaining = [name for name in remaining if name not in row_names]
        return jax.lax.psum(gradient, tuple(remaining)) if remaining else gradient

    def _ends_in_row_axes(self, spec: PartitionSpec) -> bool:
        """Returns True if row axes come last wherever they split an array axis.

        Only in this order is a shard of a shard the one that `spec` stands for.
        """
        for names in map(get_axis_names, spec):
            row_names = [name in self.row_axes for name in names]
            if row_names != sorted(row_names):
                return False
        return True


class _DeviceCollectives(AxisCollectives):
    """The collectives of one device, which works on its own rows.

    Its parameters are full, but for the `shards` that units gather in their calls.
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
        """Sums gradients of shards over the devices that have the same ones.

        `ShardMapCollectives` sums the others, into the layout of updates."""

        def sum_leaf(path: Any, leaf: Any) -> Any:
            if (spec := self.shards.get(leaf_path(path))) is None:
                return leaf
            done = set(itertools.chain(*map(get_axis_names, spec)))
            remaining = tuple(name for name in self._axes if name not in done)
            reduce = functools.partial(jax.lax.psum, axis_name=remaining)
            others = drop_axes(self._axes, spec)
            return map_local_shards(reduce, others)(leaf) if remaining else leaf

        return jax.tree_util.tree_map_with_path(sum_leaf, gradients)


def _stack_gradients(
    gradients: PyTree, shards: Mapping[str, Any]
) -> tuple[PyTree, dict[str, Any]]:
    """Stacks gradients that are not summed yet; returns those of shards by name."""
    is_apart: dict[str, Any] = {}

    def stack(path: Any, leaf: Any) -> Any:
        if (name := leaf_path(path)) not in shards:
            return leaf[None]
        is_apart[name] = leaf
        return None

    return jax.tree_util.tree_map_with_path(stack, gradients), is_apart


def _make_input_specs(inputs: Any, shards: Mapping[str, PartitionSpec]) -> Any:
    """Returns the specs of inputs: only the `shards` of weights are split."""

    whole = PartitionSpec()

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        return shards.get(leaf_path(path), whole)

    def specs(weights: Weights) -> Weights:
        params = jax.tree_util.tree_map_with_path(spec, weights.params)
        buffers = jax.tree_util.tree_map_with_path(spec, weights.buffers)
        return Weights(params, buffers, whole, whole, whole)

    return map_nodes(Weights, specs, inputs, others=lambda _: whole)
