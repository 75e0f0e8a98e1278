"""Strategies that replicate the state: on one device, on a mesh, and as `jax.pmap`."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from ..basics.arguments import checks_arguments, format_call
from ..step import DATA, Collectives, Group
from .base import DataParallel, Rows, count_shards, replace_attributes
from .fsdp_units import FSDPUnits
from .meshes import Devices, find_devices, make_mesh
from .shard_map_collectives import NO_UNITS, ShardMapCollectives


class SingleDevice(DataParallel):
    """Keeps state and batches on one device; the step is plain `jax.jit`.

    Args:
        device: the device, by default the first one.
    """

    @checks_arguments
    def __init__(self, device: Any = None):
        if device is not None and not isinstance(device, jax.Device):
            raise TypeError(
                "`device` must be a jax.Device, such as jax.devices()[0]; got"
                f" {device!r}."
            )
        self.mesh = make_mesh(
            find_devices(1 if device is None else [device]), {DATA: 1}
        )

    def on(self, devices: Sequence[Any]) -> "SingleDevice":
        if len(devices) != 1:
            raise ValueError(
                f"`devices`: SingleDevice uses 1 device, not {len(devices)}; plan with"
                " a strategy that splits the batch, such as Sharded()."
            )
        return replace_attributes(self, mesh=make_mesh(devices, {DATA: 1}))

    def __repr__(self) -> str:
        device = self.mesh.devices.flat[0]
        is_first = device == jax.devices()[0]
        return "SingleDevice()" if is_first else f"SingleDevice({device})"


class Sharded(DataParallel):
    """Splits batches by rows over a mesh; replicates parameters and optimizer state.

    The step is compiled once for all devices. A function that is written for a batch, a
    `loss_fn` or a model with BatchNorm, sees every row, and the numbers are those of
    one device.

    For a custom layout, subclass it and override `param_spec` or `batch_spec`.

    Args:
        devices: how many, or which; all by default.
        mesh: instead of `devices`, a mesh that has an axis named `"data"`. Explicit
            axes become Auto axes.
    """

    units: FSDPUnits = NO_UNITS
    """The modules of the model that gather their own parameters."""

    @checks_arguments
    def __init__(self, devices: Devices = None, mesh: Mesh | None = None):
        if mesh is None:
            in_order = find_devices(devices)
            mesh = make_mesh(in_order, {DATA: len(in_order)})
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

    def on(self, devices: Sequence[Any]) -> "Sharded":
        """Returns this strategy on other devices; their number decides the size of
        `"data"`.
        """
        shape = dict(self.mesh.shape)
        others = self.mesh.size // shape[DATA]
        if len(devices) % others:
            raise ValueError(
                f"`devices`: {len(devices)} are not divisible by {others}, the product"
                f" of the mesh's other axes than {DATA!r} in {shape}."
            )
        size = len(devices) // others
        return replace_attributes(self, mesh=make_mesh(devices, {**shape, DATA: size}))

    def collectives(self, groups: Sequence[Group], rows: Rows) -> Collectives:
        """Returns the collectives for devices that work on their local rows, if
        possible.

        Then there is one reduction per step. XLA by itself would reduce gradients
        wherever they are summed: for each micro-batch, and in each iteration of a loop
        in the model.
        """
        if count_shards(self) == 1:
            return Collectives()
        return ShardMapCollectives(self, self.units, is_apart=rows == "apart")

    def __repr__(self) -> str:
        if self.mesh.devices.ndim == 1 or self.mesh.axis_names == self.row_axes:
            return format_call(self, 1, devices=str(self.mesh.size), mesh=None)
        names = self.mesh.axis_names
        mesh = f"jax.make_mesh({self.mesh.devices.shape}, {names})"
        return format_call(self, mesh=mesh)


class Pmap(Sharded):
    """The program of `jax.pmap`: every device runs the step on its rows, then sums.

    This holds for functions of one example: named losses and metrics, and
    `per_example`. A function of a batch (a `loss_fn`, a callable loss, BatchNorm) gets
    the full batch, as under `Sharded`: the numbers are those of one device, not a mean
    over devices that each saw only their own rows. From a `jax.pmap` program, leave out
    `jax.lax.pmean` and the second name of `BatchNorm(axis_name=("batch", "data"))`.

    Built on `jax.jit` and `jax.shard_map`, which is what `jax.pmap` has become; so is
    `Sharded`, and on the devices of one mesh axis both are the same. The state is
    replicated, never stacked, so checkpoints interchange.

    Args:
        devices: how many, or which; all by default.
    """

    @checks_arguments
    def __init__(self, devices: Devices = None):
        super().__init__(devices)
