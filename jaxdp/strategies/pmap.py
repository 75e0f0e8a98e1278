"""Data parallelism by the per-device view: each device runs the step on its share."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ..step import DATA, AxisCollectives, Collectives, Group
from .base import Devices, Role, Rows, draws_by_row, laid_out
from .offload import jitted
from .sharded import Sharded, shardings_of


class Pmap(Sharded):
    """What `jax.pmap` does: every device runs the step on its rows, then sums.

    This holds if each value of the loss depends on one row only. If rows interact (a
    scalar loss, BatchNorm, a `loss_fn` that takes `key`), the step is written for the
    whole batch and XLA splits it: the numbers are those of one device, not a mean over
    devices that each saw only their own rows. A loss from a `jax.pmap` program may
    reduce over the axis `"data"` (`jax.lax.pmean(x, "data")`,
    `BatchNorm(axis_name=("batch", "data"))`). As under every strategy, this axis then
    has size one, and the whole batch lies along it.

    Built on `jax.jit(jax.shard_map(...))`, which is what `jax.pmap` has become. The
    state is replicated, never stacked, so checkpoints interchange with `Sharded`.

    Args:
        devices: how many, or which; all by default.
    """

    def __init__(self, devices: Devices = None):
        super().__init__(devices)

    def compile(
        self,
        step: Callable[..., Any],
        arguments: tuple[Any, ...],
        roles: tuple[Role, ...],
        results: Role | tuple[Role, ...],
        *,
        donate: tuple[int, ...] = (),
        rows: Rows = "apart",
    ) -> Any:
        if rows != "apart" or not draws_by_row():
            return super().compile(
                step, arguments, roles, results, donate=donate, rows=rows
            )
        everywhere, by_rows = PartitionSpec(), PartitionSpec(DATA)
        in_specs, out_specs = laid_out(
            arguments,
            roles,
            results,
            lambda role: by_rows if role == "rows" else everywhere,
            lambda _: Group(PartitionSpec(None, DATA), everywhere, everywhere),
        )

        # check_vma=False is pmap's rule: gradients are of this device's rows only.
        per_device = jax.shard_map(
            functools.partial(step, AxisCollectives(DATA, self.num_shards)),
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )
        return jitted(
            per_device,
            arguments,
            roles,
            results,
            shardings_of(self.mesh, in_specs),
            shardings_of(self.mesh, out_specs),
            donate,
        )

    def collectives(self, groups: Sequence[Group], rows: Rows) -> Collectives:
        return Collectives()  # where rows interact, XLA takes the whole step apart

    def __repr__(self) -> str:
        return f"Pmap({self.num_shards})"
