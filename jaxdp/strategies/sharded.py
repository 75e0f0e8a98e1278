"""Data parallelism by sharding: `jax.jit` sees global arrays, XLA communicates."""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from ..collectives import DATA, Collectives
from ..step import Group, TrainState
from ..tree import leaf_path
from .base import (
    DataParallel,
    Devices,
    Role,
    data_mesh,
    each,
    mesh_on,
    place_copy,
    state_shardings,
)


class Sharded(DataParallel):
    """Batches split by rows over a mesh, parameters and optimizer state replicated.

    The step is written for the whole batch and compiled once for all devices:
    BatchNorm and scalar losses see every row, and the numbers are those of one device.

    For a layout of your own, subclass it and override `param_spec` or `batch_spec`.

    Args:
        devices: how many, or which; all by default.
        mesh: instead of `devices`, a mesh that has an axis named `"data"`. A mesh with
            Explicit axes is taken as one with Auto axes.
    """

    def __init__(
        self,
        devices: Devices = None,
        mesh: Mesh | None = None,
    ):
        if mesh is None:
            mesh = data_mesh(devices)
        elif devices is not None:
            raise ValueError(
                "`devices` and `mesh` were both given; a mesh has its devices already,"
                " so leave `devices` out."
            )
        elif DATA not in mesh.axis_names:
            raise ValueError(
                f"`mesh` has axes {mesh.axis_names}, and none is named {DATA!r}, which"
                " the rows of a batch are split over."
            )
        auto = (AxisType.Auto,) * len(mesh.axis_names)
        self.mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=auto)
        self.num_shards = self.mesh.shape[DATA]

    def param_spec(self, path: str, leaf: Array) -> PartitionSpec:
        """How a leaf of the model is split; its optimizer state follows.

        Args:
            path: as a user writes it, `layers[0].weight`.
            leaf: the array, or its shape and dtype.
        """
        return PartitionSpec()

    def batch_spec(self, leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
        """How a leaf of a batch, shaped `(rows, ...)`, is split."""
        return PartitionSpec(DATA)

    def place(self, state: TrainState) -> TrainState:
        return place_copy(state, self.state_shardings(state))

    def on(self, devices: Sequence[Any]) -> "Sharded":
        """This strategy on other devices; the axis `"data"` is what they allow."""
        shape = dict(self.mesh.shape)
        others = self.mesh.size // shape[DATA]
        if len(devices) % others:
            raise ValueError(
                f"`devices`: {len(devices)} are not divisible by {others}, the product"
                f" of the mesh's other axes than {DATA!r} in {shape}."
            )
        other = copy.copy(self)
        other.mesh = mesh_on(devices, {**shape, DATA: len(devices) // others})
        # Exact: num_shards is a product of sizes of axes, that of DATA among them.
        other.num_shards = self.num_shards * other.mesh.shape[DATA] // shape[DATA]
        return other

    def state_shardings(self, state: TrainState) -> TrainState:
        """The layout of every leaf of the state, from `param_spec`.

        A leaf of the optimizer state belongs to the parameter whose path its own path
        ends with, if it has that parameter's shape too; Adam's `mu.layers[0].weight`
        does. Whatever belongs to none is replicated.
        """
        specs: dict[tuple[Any, ...], tuple[tuple[int, ...], PartitionSpec]] = {}

        def own(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
            spec = self._checked_spec(leaf_path(path), leaf)
            specs[tuple(map(str, path))] = leaf.shape, spec
            return NamedSharding(self.mesh, spec)

        def inherited(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
            keys = tuple(map(str, path))
            for start in range(len(keys)):
                shape, spec = specs.get(keys[start:], (None, PartitionSpec()))
                if shape == leaf.shape:
                    return NamedSharding(self.mesh, spec)
            return self._whole

        with_path = jax.tree_util.tree_map_with_path
        shardings = jax.tree.map(lambda _: self._whole, state)
        return shardings._replace(
            params=with_path(own, state.params),
            buffers=with_path(own, state.buffers),
            opt_state=with_path(inherited, state.opt_state),
        )

    def compile(
        self,
        step: Callable[..., Any],
        arguments: tuple[Any, ...],
        roles: tuple[Role, ...],
        results: Role | tuple[Role, ...],
        *,
        donate: tuple[int, ...] = (),
        split: bool = True,
    ) -> jax.stages.Compiled:
        rows = PartitionSpec(DATA) if split else PartitionSpec()
        layouts = {
            "state": state_shardings(arguments, roles),
            "rows": NamedSharding(self.mesh, rows),
            "whole": self._whole,
        }

        def layout_in(role: Role, argument: Any) -> PyTree:
            if role != "groups":
                return layouts[role]
            return [self._group_shardings(group, split) for group in argument]

        program = jax.jit(
            functools.partial(step, Collectives()),
            in_shardings=tuple(map(layout_in, roles, arguments)),
            out_shardings=each(results, layouts.__getitem__),
            donate_argnums=donate,
        )
        return self.build(program, arguments)

    @property
    def _whole(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def _group_shardings(self, group: Group, split: bool) -> Group:
        def leaf_sharding(leaf: Any) -> NamedSharding:
            if not split:
                return self._whole
            row = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
            return NamedSharding(self.mesh, PartitionSpec(None, *self.batch_spec(row)))

        return Group(jax.tree.map(leaf_sharding, group.batch), self._whole)

    def _checked_spec(self, path: str, leaf: Any) -> PartitionSpec:
        spec = self.param_spec(path, leaf)
        if len(spec) > leaf.ndim:
            raise ValueError(
                f"`param_spec` gave {spec} for {path} of shape {leaf.shape}: more"
                " entries than the array has axes."
            )
        for axis, names in enumerate(spec):
            names = names if isinstance(names, tuple) else (names,)
            parts = 1
            for name in names:
                if name is not None and name not in self.mesh.shape:
                    raise ValueError(
                        f"`param_spec` gave {spec} for {path}: the mesh has no axis"
                        f" {name!r}, only {self.mesh.axis_names}."
                    )
                parts *= 1 if name is None else self.mesh.shape[name]
            if leaf.shape[axis] % parts:
                raise ValueError(
                    f"`param_spec` gave {spec} for {path} of shape {leaf.shape}: axis"
                    f" {axis} of size {leaf.shape[axis]} is not divisible by {parts}."
                    " Return PartitionSpec() for leaves that do not divide."
                )
        return spec

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self.mesh.shape)})"
