"""Strategies that shard the optimizer state (`ZeRO`), and parameters too (`FSDP`)."""

import math
from collections.abc import Sequence
from typing import Any, Final

import equinox as eqx
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import GetAttrKey
from jaxtyping import Array, PyTree

from ..basics.arguments import check_count, checks_arguments
from ..basics.tree import get_node
from ..step import DATA, find_outermost_modules
from .base import replace_attributes
from .fsdp_units import FSDPUnits
from .meshes import Devices, find_devices, make_mesh
from .shard_map_collectives import NO_UNITS
from .sharded import Sharded
from .stack import Stack, find_stacks

_GROUP: Final = "group"


class _AxisShardedStrategy(Sharded):
    """The choice of an axis of each leaf to split, for `ZeRO` and `FSDP`."""

    def __init__(self, devices: Devices, mesh: Mesh | None, min_size: int):
        super().__init__(devices, mesh)
        smaller = " (elements; smaller leaves are whole)"
        check_count("min_size", min_size, minimum=0, suffix=smaller)
        self.min_size = min_size

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes of the mesh that leaves are split over."""
        return self.row_axes

    def _spec_without_parameter(self, leaf: Any) -> PartitionSpec:
        return self._split(leaf)

    def _split(self, leaf: Any, num_block_axes: int = 0) -> PartitionSpec:
        """Returns the split of a leaf along the first axis whose size the number of
        devices divides; axes of blocks are tried last.
        """
        parts = math.prod(self.mesh.shape[name] for name in self.split_axes)
        if parts == 1 or math.prod(leaf.shape) < self.min_size:
            return PartitionSpec()
        axes = range(len(leaf.shape))
        for axis in (*axes[num_block_axes:], *axes[:num_block_axes]):
            if leaf.shape[axis] and leaf.shape[axis] % parts == 0:
                return PartitionSpec(*[None] * axis, self.split_axes)
        return PartitionSpec()


class ZeRO(_AxisShardedStrategy):
    """`Sharded`, with the optimizer state split over the devices.

    Each device receives the summed gradient of its shard (part) of every parameter and
    updates that shard; then the new shards are gathered. This sends as many bytes as
    the all-reduce of `Sharded`, with 1/devices of its memory for the optimizer. The
    numbers are those of one device for any optimizer, because it sees global arrays.

    Args:
        stage: 1. (The gradients of stage 2 are split as well, for as long as they
            exist; stage 3 is `FSDP`.)
        devices: how many, or which; all by default.
        mesh: instead of `devices`, as for `Sharded`.
        min_size: the optimizer state of parameters with fewer elements is replicated:
            each split leaf costs two collectives.
    """

    @checks_arguments
    def __init__(
        self,
        stage: int = 1,
        devices: Devices = None,
        mesh: Mesh | None = None,
        *,
        min_size: int = 1,
    ):
        if stage != 1 or isinstance(stage, bool):
            raise ValueError(
                f"`stage` must be 1; got {stage!r}. Gradients, which stage 2 splits,"
                " are split by stage 1 here already; for stage 3, parameters split as"
                " well, use FSDP(). (A number of devices is `devices=...`.)"
            )
        super().__init__(devices, mesh, min_size)

    def update_spec(self, path: str, leaf: Array) -> PartitionSpec:
        return self._split(leaf)


class FSDP(_AxisShardedStrategy):
    """`Sharded`, with parameters, gradients and optimizer state split over the devices.

    This layout, known as ZeRO-3 or fully sharded data parallelism, needs 1/devices of
    the memory of `Sharded` between steps. Within a step, parameters are gathered:

    - block by block in a `jaxdp.Stack`: each block when it is called, and again in its
      backward pass, where its gradient is summed directly into shards. So a device
      holds only one whole block at a time, and the largest possible model grows with
      the number of devices. It sends 1.5 times the bytes of `Sharded`'s all-reduce.
    - all others before the step. That sends as many bytes as the all-reduce.

    With a named loss or `per_example`, each block is gathered in its own call. Its
    parameters may be used nowhere else (a penalty on all weights needs gather="once").
    With a `loss_fn`, which gets the full batch, XLA gathers, by sharding constraints.

    A leaf (array) is split along its first axis that the devices divide; in a `Stack`,
    along an axis of a single block. Leaves without such an axis, or with fewer than
    `min_size` elements, are replicated; `jaxdp.strategies.find_layouts` shows which.

    Args:
        devices: how many, or which; all by default.
        mesh: instead of `devices`, as for `Sharded`. If it has axes other than
            `"data"`, all is gathered before the step.
        min_size: leaves of fewer elements are replicated: each split leaf costs two
            collectives.
        gather: `"auto"`, as above; `"once"`, everything before the step. Or path
            patterns of submodules, such as `["encoder.layers[*]"]`, each of which
            gathers its own parameters when it is called.
        groups: the number of groups of devices, usually hosts, that hold the same
            shards (HSDP). Parameters are gathered within a group only; shards of
            gradients are summed between groups.
    """

    @checks_arguments
    def __init__(
        self,
        devices: Devices = None,
        mesh: Mesh | None = None,
        *,
        min_size: int = 1,
        gather: str | Sequence[str] = "auto",
        groups: int = 1,
    ):
        check_count("groups", groups)
        if groups > 1:
            mesh, devices = _make_group_mesh(devices, mesh, groups), None
            self.row_axes = (_GROUP, DATA)
        super().__init__(devices, mesh, min_size)
        self.groups = groups
        patterns = () if isinstance(gather, str) else tuple(gather)
        are_texts = patterns and all(isinstance(each, str) for each in patterns)
        if gather not in ("auto", "once") and not are_texts:
            raise ValueError(
                "`gather` must be 'auto', 'once', or a list of path patterns of"
                f" submodules; got {gather!r}."
            )
        self.gather = patterns or gather

    @property
    def split_axes(self) -> tuple[str, ...]:
        return tuple(name for name in self.row_axes if name != _GROUP)

    def prepare(self, arguments: dict[str, Any]) -> dict[str, Any]:
        units = self._find_units(arguments["model"])
        return {**arguments, "strategy": replace_attributes(self, units=units)}

    def param_spec(self, path: str, leaf: Array) -> PartitionSpec:
        return self._split(leaf, self.units.count_block_axes(path))

    def _find_units(self, model: PyTree) -> FSDPUnits:
        """Finds the submodules that gather their own parameters."""
        own_axes = {*self.row_axes, *self.split_axes}
        if self.gather == "once" or own_axes != {*self.mesh.axis_names}:
            return NO_UNITS
        if isinstance(self.gather, str):
            paths = {
                f"{name}.stacked".lstrip("."): (*path, GetAttrKey("stacked"))
                for name, path in find_stacks(model).items()
                if isinstance(get_node(model, path).stacked, eqx.Module)
            }
        else:
            paths = find_outermost_modules(model, self.gather, "gather")
        stacked = {}
        for name, path in paths.items():
            above = [get_node(model, path[:length]) for length in range(len(path))]
            stacked[name] = sum(isinstance(node, Stack) for node in above)
        return FSDPUnits(paths, stacked)


def _make_group_mesh(devices: Devices, mesh: Mesh | None, groups: int) -> Mesh:
    if mesh is not None:
        raise ValueError(
            "`groups` and `mesh` were both given; groups are made of `devices`, in"
            " their order, so leave `mesh` out."
        )
    in_order = find_devices(devices)
    if len(in_order) % groups:
        raise ValueError(
            f"`groups`: the {len(in_order)} devices can't be divided into {groups}"
            " groups of equal size; take a number that divides them."
        )
    return make_mesh(in_order, {_GROUP: groups, DATA: len(in_order) // groups})
