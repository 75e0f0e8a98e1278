"""Data parallelism by sharding: `jax.jit` sees global arrays, XLA communicates."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from ..basics.tree import leaf_path, map_nodes
from ..distributed import RowBlocks, row_blocks
from ..step import DATA, Collectives, Group, TrainState
from .base import (
    DataParallel,
    Devices,
    Role,
    changed,
    find_devices,
    laid_out,
    mesh_on,
    place_copy,
    put_rows,
)
from .by_rows import ByRows, names_of
from .offload import jitted, optimizer_on_host


class Layout(NamedTuple):
    """How a leaf is split over the devices, and why."""

    spec: PartitionSpec
    reason: str


class Sharded(DataParallel):
    """Splits batches by rows over a mesh; replicates parameters and optimizer state.

    The step is written for the whole batch and compiled once for all devices:
    BatchNorm and scalar losses see every row, and the numbers are those of one device.

    For a layout of your own, subclass it and override `param_spec` or `batch_spec`.

    Args:
        devices: how many, or which; all by default.
        mesh: instead of `devices`, a mesh that has an axis named `"data"`. A mesh with
            Explicit axes is taken as one with Auto axes.
    """

    row_axes: tuple[str, ...] = (DATA,)
    """The axes of the mesh that rows are split over."""

    def __init__(self, devices: Devices = None, mesh: Mesh | None = None):
        if mesh is None:
            in_order = find_devices(devices)
            mesh = mesh_on(in_order, {DATA: len(in_order)})
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
        self.num_shards = math.prod(self.mesh.shape[name] for name in self.row_axes)

    def param_spec(self, path: str, leaf: Array) -> PartitionSpec:
        """How a leaf of the model is split; its optimizer state follows.

        Over an axis that rows are split over too, a parameter is split between steps
        and gathered for each.

        Args:
            path: as a user writes it, `layers[0].weight`.
            leaf: the array, or its shape and dtype.
        """
        return PartitionSpec()

    def update_spec(self, path: str, leaf: Array) -> PartitionSpec:
        """How a parameter's gradient and optimizer state are split: as itself is.

        Elsewhere than the parameter, over an axis that rows are split over: each device
        updates a shard of a parameter that all of them then hold whole.
        """
        return self.param_spec(path, leaf)

    def state_spec(self, path: str, leaf: Array) -> PartitionSpec:
        """How a leaf of the optimizer state is split that belongs to no parameter."""
        return PartitionSpec()

    def batch_spec(self, leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
        """How a leaf of a batch, shaped `(rows, ...)`, is split."""
        return PartitionSpec(self.row_axes)

    def reason(self, path: str, leaf: Array) -> str:
        """Why a leaf of the model is held as it is, for `layouts`."""
        return "by param_spec" if any(self.param_spec(path, leaf)) else "replicated"

    def place(self, state: TrainState) -> TrainState:
        return place_copy(state, self.state_shardings(state))

    def place_batch(self, groups: Sequence[Group], *, split: bool) -> Sequence[Group]:
        if not self.mesh.is_multi_process:
            return groups
        shardings = functools.partial(self._group_shardings, split=split)
        return put_rows(groups, self.row_blocks(), shardings, split=split)

    def row_blocks(self) -> RowBlocks:
        if jax.process_count() == 1:
            return RowBlocks()
        return _row_blocks(self.mesh, self.row_axes)

    def layouts(self, state: TrainState) -> dict[str, "Layout"]:
        """How each leaf of a state is split over the devices, and why.

        Args:
            state: arrays, or their shapes and dtypes; placed or not.

        Returns:
            By name, `params: layers[0].weight`.
        """
        by_name: dict[str, Layout] = {}
        for field, tree in self._layouts(state)._asdict().items():
            is_layout = lambda node: isinstance(node, Layout)  # noqa: E731
            leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_layout)[0]
            for path, layout in leaves:
                by_name[f"{field}: {leaf_path(path)}".removesuffix(": ")] = layout
        return by_name

    def on(self, devices: Sequence[Any]) -> "Sharded":
        """This strategy on other devices; the axis `"data"` is what they allow."""
        shape = dict(self.mesh.shape)
        others = self.mesh.size // shape[DATA]
        if len(devices) % others:
            raise ValueError(
                f"`devices`: {len(devices)} are not divisible by {others}, the product"
                f" of the mesh's other axes than {DATA!r} in {shape}."
            )
        size = len(devices) // others
        # Exact: num_shards is a product of sizes of axes, that of DATA among them.
        return changed(
            self,
            mesh=mesh_on(devices, {**shape, DATA: size}),
            num_shards=self.num_shards * size // shape[DATA],
        )

    def state_shardings(self, state: TrainState) -> TrainState:
        """The layout of every leaf of the state.

        A leaf of the optimizer state belongs to the parameter whose path its own path
        ends with, if it has that parameter's shape too, or a stack of such; Adam's
        `mu.layers[0].weight` does. For those that belong to none there is `state_spec`.
        """

        def held(layout: Layout) -> NamedSharding:
            return NamedSharding(self.mesh, layout.spec)

        shardings = map_nodes(Layout, held, self._layouts(state))
        return optimizer_on_host(shardings, state) if self.offloads else shardings

    def with_offload(self) -> "Sharded":
        return changed(self, offloads=True)

    def _layouts(self, state: TrainState) -> TrainState:
        """A `Layout` for every leaf of the state."""
        params: dict[tuple[Any, ...], tuple[tuple[int, ...], Layout]] = {}

        def own(path: tuple[Any, ...], leaf: Any) -> Layout:
            name = leaf_path(path)
            return Layout(self._held(name, leaf), self.reason(name, leaf))

        def updated(path: tuple[Any, ...], leaf: Any) -> None:
            name = leaf_path(path)
            layout = Layout(self._updated(name, leaf), f"as its parameter {name}")
            params[tuple(map(str, path))] = leaf.shape, layout

        def inherited(path: tuple[Any, ...], leaf: Any) -> Layout:
            # The longest path of a parameter that this one ends with.
            keys = tuple(map(str, path))
            for start in range(len(keys) + 1):
                shape, layout = params.get(keys[start:], (None, None))
                if shape is None or layout is None:
                    continue
                stacked = leaf.ndim - len(shape)
                if stacked >= 0 and leaf.shape[stacked:] == shape:
                    spec = PartitionSpec(*[None] * stacked, *layout.spec)
                    return layout._replace(spec=spec)
            name = leaf_path(path)
            spec = self.state_spec(name, leaf)
            self._check_spec("`state_spec`", spec, name, leaf)
            split = ", split by its own shape" if any(spec) else ", whole"
            return Layout(spec, f"like no parameter{split}")

        # Parameters first: the others follow them.
        with_path = jax.tree_util.tree_map_with_path
        with_path(updated, state.params)
        whole = Layout(PartitionSpec(), "replicated")
        return jax.tree.map(lambda _: whole, state)._replace(
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
        # The state stays laid out as it was placed.
        state = arguments[roles.index("state")]
        layouts = {
            "state": jax.tree.map(lambda leaf: leaf.sharding, state),
            "rows": self._rows if split else self._whole,
            "replicated": self._whole,
        }
        in_shardings, out_shardings = laid_out(
            arguments,
            roles,
            results,
            layouts.__getitem__,
            lambda group: self._group_shardings(group, split),
        )

        # The step, with the collectives of this layout.
        program = jitted(
            functools.partial(step, self._collectives(arguments, roles, split)),
            arguments,
            roles,
            results,
            in_shardings,
            out_shardings,
            donate,
        )
        return self.build(program, arguments)

    @property
    def _rows(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(self.row_axes))

    @property
    def _whole(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def _collectives(
        self, arguments: tuple[Any, ...], roles: tuple[Role, ...], split: bool
    ) -> Collectives:
        """Rows apart, with one reduction a step; none to talk to on one device.

        XLA by itself would reduce gradients wherever they are summed up: for each
        micro-batch, and in each turn of a loop in the model.
        """
        groups = arguments[roles.index("groups")]
        if self.num_shards == 1:
            return Collectives()
        apart = split and all(
            self._is_by_rows(_one_batch(leaf))
            for group in groups
            for leaf in jax.tree.leaves(group.batch)
        )
        return ByRows(
            self.mesh,
            self.row_axes,
            self._held,
            self._updated,
            apart=apart,
            **self._gathering(),
        )

    def _gathering(self) -> dict[str, Any]:
        """What `ByRows` is told of modules that gather their own parameters."""
        return {}

    def _is_by_rows(self, leaf: jax.ShapeDtypeStruct) -> bool:
        """Whether a leaf of a batch is split over the axes of rows by rows only."""
        first, *rest = self.batch_spec(leaf) or [None]
        others = {name for names in rest for name in names_of(names)}
        return names_of(first) == self.row_axes and not others & set(self.row_axes)

    def _group_shardings(self, group: Group, split: bool) -> Group:
        def leaf_sharding(leaf: Any) -> NamedSharding:
            if not split:
                return self._whole
            spec = PartitionSpec(None, *self.batch_spec(_one_batch(leaf)))
            return NamedSharding(self.mesh, spec)

        batch = jax.tree.map(leaf_sharding, group.batch)
        return Group(batch, self._whole, self._whole)

    def _held(self, path: str, leaf: Any) -> PartitionSpec:
        return self._check_spec("`param_spec`", self.param_spec(path, leaf), path, leaf)

    def _updated(self, path: str, leaf: Any) -> PartitionSpec:
        spec = self.update_spec(path, leaf)
        return self._check_spec("`update_spec`", spec, path, leaf)

    def _check_spec(
        self, origin: str, spec: PartitionSpec, path: str, leaf: Any
    ) -> PartitionSpec:
        """`spec`, which came from `origin`, if it fits the leaf."""
        what = f"{origin} gave {spec} for {path} of shape {leaf.shape}"
        if len(spec) > leaf.ndim:
            raise ValueError(f"{what}: more entries than the array has axes.")
        for axis, entry in enumerate(spec):
            for name in names_of(entry):
                if name not in self.mesh.shape:
                    raise ValueError(
                        f"{what}: the mesh has no axis {name!r}, only"
                        f" {self.mesh.axis_names}."
                    )
            parts = math.prod(self.mesh.shape[name] for name in names_of(entry))
            if leaf.shape[axis] % parts:
                raise ValueError(
                    f"{what}: axis {axis} of size {leaf.shape[axis]} is not divisible"
                    f" by {parts}. Give PartitionSpec() for leaves that do not divide."
                )
        return spec

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self.mesh.shape)})"


def shardings_of(mesh: Mesh, specs: PyTree) -> PyTree:
    """The sharding over a mesh that each `PartitionSpec` of a tree means."""
    return map_nodes(PartitionSpec, functools.partial(NamedSharding, mesh), specs)


@functools.lru_cache
def _row_blocks(mesh: Mesh, row_axes: tuple[str, ...]) -> RowBlocks:
    sizes = [mesh.shape[name] for name in row_axes]
    places = [mesh.axis_names.index(name) for name in row_axes]
    shards = [
        (int(np.ravel_multi_index([index[i] for i in places], sizes)), device)
        for index, device in np.ndenumerate(mesh.devices)
    ]
    return row_blocks(shards, math.prod(sizes))


def _one_batch(leaf: Any) -> jax.ShapeDtypeStruct:
    """A leaf of one micro-batch, of those stacked in a group."""
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
