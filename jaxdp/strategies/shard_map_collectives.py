"""Data parallelism by `jax.shard_map`, inside a step over global arrays."""

import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import equinox as eqx
import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from ..basics.tree import find_nodes, leaf_path, map_nodes
from ..step import (
    AxisCollectives,
    Collectives,
    Group,
    OnRows,
    Results,
    Weights,
)
from .base import DataParallel
from .fsdp_units import FSDPUnits
from .meshes import clear_ambient_mesh, get_axis_names

NO_UNITS: Final = FSDPUnits()

Spec = Callable[[str, Any], PartitionSpec]
"""`(path, leaf)` to the split of the leaf."""


class ShardMapCollectives(Collectives):
    """Runs the rows of a step on their devices; the step itself sees global arrays.

    Where all functions are written for one example, `over_rows` is a `jax.shard_map`.
    Parameters are gathered before it. Gradients are reduced at its end, once, directly
    to the shards of `update_spec` (`psum_scatter`); XLA would reduce those of each
    micro-batch, and of each iteration of a loop in the model. Where something is
    written for a batch, XLA partitions the full computation.

    The optimizer runs outside of `over_rows`, on global arrays, so that a norm over all
    parameters is right.

    Args:
        strategy: says how leaves are split.
        units: the modules that gather their own parameters.
        is_apart: whether each device works on its own rows alone.
    """

    gathers_params = True

    def __init__(self, strategy: DataParallel, units: FSDPUnits, *, is_apart: bool):
        self.mesh, self.row_axes = strategy.mesh, strategy.row_axes
        # Over these axes, XLA splits arrays and communicates.
        self.other_axes = {*self.mesh.axis_names} - {*self.row_axes}
        self.param_spec, self.update_spec = strategy.param_spec, strategy.update_spec
        self.units, self.is_apart = units, is_apart
        self.shards: dict[str, PartitionSpec] = {}  # of one step, set by `_bind_step`

    def over_rows(
        self, function: OnRows, inputs: Any, groups: Sequence[Group], results: Results
    ) -> Any:
        this_step = self._bind_step(inputs)
        # Draws of other generators than threefry depend on the number of rows.
        is_by_row = jax.config.jax_default_prng_impl == "threefry2x32"  # pyright: ignore
        if not self.is_apart or not is_by_row:
            return function(this_step, inputs, groups)
        try:
            values = this_step._run_shard_map(function, inputs, groups, results)
        except Exception:
            function(this_step, inputs, groups)  # its error has the batch's shapes
            raise
        if "gradients" not in results:
            return values
        return tuple(
            self.like_gradients(part) if role == "gradients" else part
            for role, part in zip(results, values, strict=True)
        )

    def arrange(self, model: PyTree) -> PyTree:
        return self.units.wrap_modules(model, self.shards, self.mesh)

    def gather(self, params: PyTree) -> PyTree:
        # Split the arrays first; otherwise XLA would gather parameters before it casts
        # them.
        split = self._constrain(params, self.param_spec)
        return self._constrain(split, self._get_used_spec)

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
        """Returns a copy that knows the FSDP units and shards among a step's inputs."""
        weights, *_ = find_nodes(Weights, inputs)
        model = eqx.combine(weights.params, weights.buffers)
        bound, bound.shards = copy.copy(self), {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(model):
            spec = self.param_spec(name := leaf_path(path), leaf)
            if self.units.is_gathered(name, spec):
                bound.shards[name] = spec
        bound.units = self.units if bound.shards else NO_UNITS
        return bound

    def _run_shard_map(
        self, function: OnRows, inputs: Any, groups: Sequence[Group], results: Results
    ) -> Any:
        """Runs `function` on each device's rows.

        The `shards`, which modules gather in their calls, and their gradients stay
        split.
        """
        weights, *_ = find_nodes(Weights, inputs)
        rows, everywhere = PartitionSpec(self.row_axes), PartitionSpec()
        group = Group(PartitionSpec(None, self.row_axes), everywhere, everywhere)
        gradients = jax.tree_util.tree_map_with_path(
            lambda path, leaf: self.gradient_spec(leaf_path(path), leaf), weights.params
        )
        specs = {"gradients": gradients, "rows": rows, "replicated": everywhere}
        is_many = isinstance(results, tuple)
        run = functools.partial(function, _DeviceCollectives(self))
        return jax.shard_map(
            run if self.other_axes else clear_ambient_mesh(run),
            mesh=self.mesh,
            in_specs=(
                self._make_input_specs(inputs),
                [group] * len(groups),
            ),
            out_specs=tuple(map(specs.get, results)) if is_many else specs[results],
            axis_names=set(self.row_axes),
            check_vma=False,
        )(self._gather_weights(inputs), list(groups))

    def gradient_spec(self, name: str, leaf: Any) -> PartitionSpec:
        """Returns the split, over the rows' devices, of a gradient that is summed over
        rows.
        """
        if name in self.shards:
            return self.shards[name]
        # Shards over both kinds of axes would not match the parts over `other_axes`.
        spec = self.update_spec(name, leaf)
        entries = [{*get_axis_names(entry)} for entry in spec]
        is_mixed = any(
            each & self.other_axes and each - self.other_axes for each in entries
        )
        return PartitionSpec() if is_mixed else keep_axes({*self.row_axes}, spec)

    def _make_input_specs(self, inputs: Any) -> Any:
        """Returns the specs of inputs: only the `shards` of weights are split."""
        everywhere = PartitionSpec()

        def spec(path: Any, _: Any) -> PartitionSpec:
            return self.shards.get(leaf_path(path), everywhere)

        def specs(weights: Weights) -> Weights:
            params = jax.tree_util.tree_map_with_path(spec, weights.params)
            buffers = jax.tree_util.tree_map_with_path(spec, weights.buffers)
            return Weights(params, buffers, everywhere, everywhere, everywhere)

        return map_nodes(Weights, specs, inputs, others=lambda _: everywhere)

    @jax.named_scope("parameters")
    def _gather_weights(self, inputs: Any) -> Any:
        """Returns inputs with full weights, except for shards."""

        def gather_one(weights: Weights) -> Weights:
            params, buffers = map(self.gather, weights[:2])
            return weights._replace(params=params, buffers=buffers)

        return map_nodes(Weights, gather_one, inputs)

    def _get_used_spec(self, path: str, leaf: Any) -> PartitionSpec:
        """Returns the spec within a step: only shards are split over the rows' axes."""
        spec = self.param_spec(path, leaf)
        return spec if path in self.shards else keep_axes(self.other_axes, spec)


class _DeviceCollectives(AxisCollectives):
    """The collectives of a step inside its `shard_map`: each device has its own rows.

    The parameters are full there, except for the shards of units. A unit is a submodule
    that gathers its own parameters when it is called.
    """

    def __init__(self, step: ShardMapCollectives):
        sizes = (step.mesh.shape[name] for name in step.row_axes)
        super().__init__(step.row_axes, math.prod(sizes))
        self._step = step

    def arrange(self, model: PyTree) -> PyTree:
        step = self._step
        return step.units.wrap_modules(model, step.shards)

    def sum_gradients(self, gradients: PyTree) -> PyTree:
        return jax.tree_util.tree_map_with_path(self._sum_gradient, gradients)

    def _sum_gradient(self, path: Any, leaf: Any) -> Any:
        """Sums a gradient over the rows' devices, to this device's shard of it.

        The gradient of a shard is already summed over the devices that have other
        shards.
        """
        step, name = self._step, leaf_path(path)
        own = step.gradient_spec(name, leaf)
        split = {axis for names in own for axis in get_axis_names(names)}
        remaining = tuple(axis for axis in step.row_axes if axis not in split)

        def reduce(leaf: Any) -> Any:
            leaf = leaf if name in step.shards else reduce_scatter(own, leaf)
            return jax.lax.psum(leaf, remaining) if remaining else leaf

        if name in step.shards or not step.other_axes:
            return reduce(leaf)
        # Otherwise XLA would first gather over the other axes. On CPUs it also aborts
        # the process if it reduces bfloat16 while such axes exist.
        spec = keep_axes(step.other_axes, step.update_spec(name, leaf))
        in_parts = jax.shard_map(
            reduce,
            in_specs=spec,
            out_specs=spec,
            axis_names=step.other_axes,
            check_vma=False,
        )
        return in_parts(leaf)


def reduce_scatter(spec: PartitionSpec, gradient: Array) -> Array:
    """Sums an array over the axes of `spec`, to this device's shard."""
    for axis, names in enumerate(spec):
        if names is not None:
            gradient = jax.lax.psum_scatter(
                gradient, names, scatter_dimension=axis, tiled=True
            )
    return gradient


def keep_axes(axes: set[str], spec: PartitionSpec) -> PartitionSpec:
    """Returns `spec` with splits over `axes` only."""
    kept = (tuple(n for n in get_axis_names(names) if n in axes) for names in spec)
    return PartitionSpec(*(names or None for names in kept))
