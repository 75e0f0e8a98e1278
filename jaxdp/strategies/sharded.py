"""Data parallelism by sharding: `jax.jit` sees global arrays, XLA communicates."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from ..basics.tree import map_nodes
from ..step import DATA, Collectives, Group, TrainState
from .base import (
    DataParallel,
    Devices,
    Layout,
    Rows,
    changed,
    find_devices,
    mesh_on,
    names_of,
    one_batch,
)
from .by_rows import ByRows


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

    def state_spec(self, path: str, leaf: Array) -> PartitionSpec:
        """How a leaf of the optimizer state is split that belongs to no parameter."""
        return PartitionSpec()

    def reason(self, path: str, leaf: Array) -> str:
        """Why a leaf of the model is held as it is, for `layouts`."""
        return "by param_spec" if any(self.param_spec(path, leaf)) else "replicated"

    def _state_spec(self, path: str, leaf: Array) -> PartitionSpec:
        return self.state_spec(path, leaf)

    def _reason(self, path: str, leaf: Array) -> str:
        return self.reason(path, leaf)

    def _layouts(self, state: TrainState) -> dict[str, Layout]:
        return self.layouts(state)

    def layouts(self, state: TrainState) -> dict[str, Layout]:
        """How each leaf of a state is split over the devices, and why.

        A subclass overrides it to look at the whole state first, or to split leaves
        that its other methods are not asked about.

        Args:
            state: arrays, or their shapes and dtypes; placed or not.

        Returns:
            By name, `params: layers[0].weight`.
        """
        return super()._layouts(state)

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

    def collectives(self, groups: Sequence[Group], rows: Rows) -> Collectives:
        """Rows apart, with one reduction a step; none to talk to on one device.

        XLA by itself would reduce gradients wherever they are summed up: for each
        micro-batch, and in each turn of a loop in the model.
        """
        if self.num_shards == 1:
            return Collectives()
        apart = rows == "apart" and all(
            self._is_by_rows(one_batch(leaf))
            for group in groups
            for leaf in jax.tree.leaves(group.batch)
        )
        return ByRows(
            self.mesh,
            self.row_axes,
            self._held,
            self._updated,
            apart=apart,
            interact=rows != "apart",
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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self.mesh.shape)})"


def shardings_of(mesh: Mesh, specs: PyTree) -> PyTree:
    """The sharding over a mesh that each `PartitionSpec` of a tree means."""
    return map_nodes(PartitionSpec, lambda spec: NamedSharding(mesh, spec), specs)
