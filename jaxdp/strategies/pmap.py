"""Data parallelism by the per-device view: each device runs the step on its share."""

import contextlib
import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..distributed import RowBlocks, row_blocks
from ..step import DATA, AxisCollectives, Collectives, Group, RowsInteract, TrainState
from .base import (
    DataParallel,
    Devices,
    Role,
    data_mesh,
    draws_by_row,
    each,
    mesh_on,
    place_copy,
    put_rows,
)


class Pmap(DataParallel):
    """What `jax.pmap` does: every device runs the step on its rows, then sums.

    So it is where each value of the loss is of one row. Where rows interact, in a
    scalar loss, BatchNorm, a `loss_fn` that takes `key` or values that other rows have
    a part in, the step is written for the whole batch, which XLA takes apart: the
    numbers are those of one device, not means over devices of what each made of its
    own rows. A loss from a `jax.pmap` program may reduce over the axis `"data"`
    (`jax.lax.pmean(x, "data")`, `BatchNorm(axis_name=("batch", "data"))`): as under
    every strategy it is an axis of one then, along which the whole batch lies.

    Built on `jax.jit(jax.shard_map(...))`, which is what `jax.pmap` has become. The
    state is replicated, never stacked, so checkpoints interchange with `Sharded`.

    Args:
        devices: how many, or which; all by default.
    """

    def __init__(self, devices: Devices = None):
        self.mesh = data_mesh(devices)
        self.num_shards = self.mesh.size

    def place(self, state: TrainState) -> TrainState:
        return place_copy(state, self.state_shardings(state))

    def place_batch(self, groups: Sequence[Group], *, split: bool) -> Sequence[Group]:
        if not self.mesh.is_multi_process:
            return groups
        rows = PartitionSpec(None, DATA) if split else PartitionSpec()
        sharding = NamedSharding(self.mesh, rows)

        def shardings(group: Group) -> Group:
            return group._replace(batch=jax.tree.map(lambda _: sharding, group.batch))

        return put_rows(groups, self.row_blocks(), shardings, split=split)

    def row_blocks(self) -> RowBlocks:
        return row_blocks(enumerate(self.mesh.devices.flat), self.num_shards)

    def state_shardings(self, state: TrainState) -> TrainState:
        whole = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(lambda _: whole, state)

    def on(self, devices: Sequence[Any]) -> "Pmap":
        other = copy.copy(self)
        other.mesh = mesh_on(devices, {DATA: len(devices)})
        other.num_shards = len(devices)
        return other

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
        whole = PartitionSpec()
        rows = PartitionSpec(DATA) if split else whole

        def spec_in(role: Role, argument: Any) -> Any:
            if role != "groups":
                return whole
            return [Group(PartitionSpec(None, *rows), whole) for _ in argument]

        in_specs = tuple(map(spec_in, roles, arguments))
        out_specs = each(results, lambda role: rows if role == "rows" else whole)
        in_shardings, out_shardings = jax.tree.map(
            functools.partial(NamedSharding, self.mesh),
            (in_specs, out_specs),
            is_leaf=lambda node: isinstance(node, PartitionSpec),
        )

        def compiled(function: Callable[..., Any]) -> jax.stages.Compiled:
            program = jax.jit(
                function,
                in_shardings=in_shardings,
                out_shardings=out_shardings,
                donate_argnums=donate,
            )
            return self.build(program, arguments)

        # check_vma=False is pmap's rule: gradients are of this device's rows only.
        per_device = jax.shard_map(
            functools.partial(step, AxisCollectives(DATA, self.num_shards)),
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )
        if split and draws_by_row():
            with contextlib.suppress(RowsInteract):
                return compiled(per_device)
        return compiled(functools.partial(step, Collectives()))

    def __repr__(self) -> str:
        return f"Pmap({self.num_shards})"
