"""Memory split over the devices: optimizer state (`ZeRO`), parameters too (`FSDP`)."""

import math
from typing import Any, Final

from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from ..basics.arguments import check_count
from .base import Devices
from .sharded import Sharded

_WHOLE: Final = PartitionSpec()


class _Split(Sharded):
    """What both have: which axis of a leaf is split over the devices of the rows."""

    def __init__(self, devices: Devices, mesh: Mesh | None, min_size: int):
        super().__init__(devices, mesh)
        smaller = " (elements; smaller leaves are whole)"
        check_count("min_size", min_size, least=0, or_else=smaller)
        self.min_size = min_size

    def reason(self, path: str, leaf: Array) -> str:
        return split_axis(leaf, self.num_shards, self.min_size)[1]

    def state_spec(self, path: str, leaf: Array) -> PartitionSpec:
        return self._split(leaf)

    def _split(self, leaf: Any) -> PartitionSpec:
        axis, _ = split_axis(leaf, self.num_shards, self.min_size)
        return along(axis, self.row_axes)


class ZeRO(_Split):
    """`Sharded`, with the optimizer state split over the devices.

    Each device receives the summed gradient of its share of every parameter, updates
    that share, and the new shares are gathered: as many bytes as the one all-reduce of
    `Sharded`, and 1/devices of its memory for the optimizer. The numbers are those of
    one device for any optimizer, since an optimizer is shown whole arrays.

    Args:
        stage: 1. (The gradients of stage 2 are split as well, for as long as they
            exist; stage 3 is `FSDP`.)
        devices: how many, or which; all by default.
        mesh: instead of `devices`, as for `Sharded`.
        min_size: parameters of fewer elements keep their optimizer state whole: each
            split leaf costs two collectives.
    """

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

    def reason(self, path: str, leaf: Array) -> str:
        return f"whole; its gradient and optimizer state {super().reason(path, leaf)}"


class FSDP(_Split):
    """`Sharded`, with parameters, gradients and optimizer state split over the devices.

    The layout known as ZeRO-3 or fully sharded data parallelism: a step gathers the
    parameters, and every device keeps the summed gradient and the update of its share.
    As many bytes as the one all-reduce of `Sharded`; 1/devices of its memory between
    steps, while a step itself holds the whole parameters for as long as it needs them.

    A leaf is split along its first axis that the devices divide. One that has none, or
    has fewer than `min_size` elements, is held whole; `layouts` tells which.

    Args:
        devices: how many, or which; all by default.
        mesh: instead of `devices`, as for `Sharded`.
        min_size: leaves of fewer elements are held whole: each split leaf costs two
            collectives.
    """

    def __init__(
        self, devices: Devices = None, mesh: Mesh | None = None, *, min_size: int = 1
    ):
        super().__init__(devices, mesh, min_size)

    def param_spec(self, path: str, leaf: Array) -> PartitionSpec:
        return self._split(leaf)


def split_axis(
    leaf: Any, parts: int, min_size: int, taken: PartitionSpec = _WHOLE
) -> tuple[int | None, str]:
    """The first axis of `leaf` that `parts` divide, and why, or why there is none.

    Those that `taken` splits otherwise don't count, nor leaves under `min_size`.
    """
    size = math.prod(leaf.shape)
    if parts == 1:
        return None, "whole: there is one device"
    if size < min_size:
        return None, f"whole: {size} elements are fewer than min_size={min_size}"
    for axis, length in enumerate(leaf.shape):
        free = axis >= len(taken) or taken[axis] is None
        if free and length and length % parts == 0:
            return axis, f"split along axis {axis}"
    return None, f"whole: {parts} devices divide no axis of {tuple(leaf.shape)}"


def along(axis: int | None, names: tuple[str, ...]) -> PartitionSpec:
    """Split along one axis, or whole."""
    if axis is None:
        return PartitionSpec()
    return PartitionSpec(*[None] * axis, names)
