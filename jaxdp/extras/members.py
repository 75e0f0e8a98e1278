"""The members of an ensemble on devices of their own."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from ..basics.arguments import checks_arguments
from ..step import TrainState
from ..strategies.base import Layout, changed
from ..strategies.meshes import Devices, find_devices, mesh_on
from ..strategies.sharded import Sharded

MEMBERS: Final = "members"
"""Name of the axis that members are split over."""


class Members(Sharded):
    """Splits the models of `Trainer(ensemble=...)` over the devices.

    Each device trains its own members on whole batches. Devices exchange the sums of
    each member's loss and metrics, a number each, and nothing else. The number of
    members must be a multiple of the number of devices.

    Args:
        devices: how many, or which; all by default.
    """

    row_axes = ()

    @checks_arguments
    def __init__(self, devices: Devices = None):
        in_order = find_devices(devices)
        self.mesh = mesh_on(in_order, {MEMBERS: len(in_order)})
        self.num_shards = 1

    def check(self, arguments: Mapping[str, Any]) -> None:
        ensemble = arguments["ensemble"]
        if ensemble is None:
            raise ValueError(
                "`strategy`: Members splits the models of an ensemble, but"
                " `ensemble` was not given; pass it, or use Sharded()."
            )
        if ensemble.size % self.mesh.size:
            raise ValueError(
                f"`ensemble`: {ensemble.size} members can't be split over the"
                f" {self.mesh.size} devices of Members(); pass a number of devices that"
                " divides them."
            )

    def param_spec(self, path: str, leaf: Array) -> PartitionSpec:
        return PartitionSpec(MEMBERS)

    def batch_spec(self, leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
        return PartitionSpec()

    def reason(self, path: str, leaf: Array) -> str:
        return "by members"

    def on(self, devices: Sequence[Any]) -> "Members":
        return changed(self, mesh=mesh_on(devices, {MEMBERS: len(devices)}))

    def layouts(self, state: TrainState) -> dict[str, Layout]:
        by_members = Layout(PartitionSpec(MEMBERS), "by members")
        return {
            name: by_members if name.startswith("model_state") else layout
            for name, layout in super().layouts(state).items()
        }
