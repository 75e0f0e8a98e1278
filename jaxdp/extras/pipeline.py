"""Pipeline parallelism: stages of layers that work on parts of a batch in turn."""

import functools
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, PRNGKeyArray, PyTree

from ..basics.arguments import check_count, checks_arguments, format_call
from ..basics.tree import get_node, map_nodes
from ..step import DATA, Collectives, Group
from ..strategies.base import Rows, replace_attributes
from ..strategies.meshes import Devices, find_devices, make_topology_mesh
from ..strategies.sharded import Sharded
from ..strategies.stack import Stack, apply_blocks, find_stacks

_STAGE = "stage"


class Pipeline(Sharded):
    """Splits the blocks of a `jaxdp.Stack` over stages of devices, as GPipe does.

    A batch is cut into micro-batches, which go through the stages one after the other:
    while the second stage works on the first micro-batch, the first stage works on the
    second one. The blocks of a stage, with their gradients and optimizer state, are
    only on its devices; the rest of the model is replicated. The outputs of blocks are
    sent to the next stage, and their gradients back; parameters are never sent.

    Stages wait for a share of the time in the blocks, the `bubble`: (stages - 1) /
    (microbatches + stages - 1). The numbers are those of one device.

    Args:
        stages: into how many parts the blocks are split. Devices beyond that split the
            rows: eight devices in four stages are two pipelines.
        microbatches: into how many parts each pipeline's rows are cut. If it does not
            divide them, some rows are computed twice and counted once.
        devices: how many, or which; all by default.
    """

    @checks_arguments
    def __init__(self, stages: int, microbatches: int, devices: Devices = None):
        in_order = find_devices(devices)
        for name, value in {"stages": stages, "microbatches": microbatches}.items():
            check_count(name, value)
        if len(in_order) % stages:
            raise ValueError(
                f"`stages`: {stages} do not divide the {len(in_order)} devices. Take a"
                " number that does, or pass `devices=...`."
            )
        shape = {DATA: len(in_order) // stages, _STAGE: stages}
        super().__init__(mesh=make_topology_mesh(in_order, shape))
        self.stages = stages
        self.microbatches = microbatches
        self.bubble = (stages - 1) / (microbatches + stages - 1)
        self._stacks: tuple[str, ...] = ()

    def prepare(self, arguments: dict[str, Any]) -> dict[str, Any]:
        if arguments["ensemble"] is not None:
            raise ValueError(
                "`ensemble`: Pipeline splits the first axis of a Stack's arrays, which"
                " are its blocks and, in an ensemble, the members. Use Members() or"
                " Sharded()."
            )
        stacks = find_stacks(model := arguments["model"])
        if not stacks:
            raise ValueError(
                f"`strategy`: {self!r} splits the blocks of a jaxdp.Stack, but the"
                " model has none. Make its equal layers one: Stack([Block(key)"
                " for key in keys])."
            )
        for name, path in stacks.items():
            number = len(get_node(model, path))
            if number % self.stages:
                raise ValueError(
                    f"`strategy`: the {self.stages} stages of {self!r} do not divide"
                    f" the {number} blocks of {name or 'the model'}."
                )
        names = tuple(f"{name}.stacked".lstrip(".") for name in stacks)
        return {**arguments, "strategy": replace_attributes(self, _stacks=names)}

    def param_spec(self, path: str, leaf: Array) -> PartitionSpec:
        is_in_block = path.startswith(self._stacks)
        return PartitionSpec(_STAGE) if is_in_block else PartitionSpec()

    def collectives(self, groups: Sequence[Group], rows: Rows) -> Collectives:
        return _PipelineCollectives(self.mesh, self.microbatches)

    def __repr__(self) -> str:
        return format_call(self, 2, devices=str(self.mesh.size))


class _PipelineCollectives(Collectives):
    """Global arrays, as `Sharded` has them, and stacks that run in stages."""

    def __init__(self, mesh: Mesh, microbatches: int):
        self.mesh, self.microbatches = mesh, microbatches

    def arrange(self, model: PyTree) -> PyTree:
        def make_staged(stack: Stack) -> _PipelineStack:
            return _PipelineStack(stack, self.mesh, self.microbatches)

        return map_nodes(Stack, make_staged, model)


class _PipelineStack(Stack):
    """A stack that runs a full batch through the stages when it is vmapped.

    A model may ask for the class or the length of its stack, so this is a `Stack`, too.
    """

    mesh: Mesh = eqx.field(static=True)
    microbatches: int = eqx.field(static=True)

    def __init__(self, stack: Stack, mesh: Mesh, microbatches: int):
        self.stacked, self.mesh, self.microbatches = stack.stacked, mesh, microbatches

    def __call__(
        self,
        x: PyTree,
        *,
        key: PRNGKeyArray | None = None,
        training: bool | None = None,
    ) -> PyTree:
        arrays, rest = eqx.partition(self.stacked, eqx.is_array)
        blocks = functools.partial(apply_blocks, rest, training)
        row = jax.custom_batching.custom_vmap(blocks)

        @row.def_vmap
        def rows(size: int, batched: Any, arrays: Any, x: Any, keys: Any) -> Any:
            def repeat_rows(leaf: Array, is_batched: bool) -> Array:
                return leaf if is_batched else jnp.repeat(leaf[None], size, axis=0)

            if any(jax.tree.leaves(batched[0])):
                axes = jax.tree.map(lambda each: 0 if each else None, batched)
                values = jax.vmap(blocks, axes)(arrays, x, keys)
            else:
                of_rows = jax.tree.map(repeat_rows, (x, keys), tuple(batched[1:]))
                values = self._run_stages(blocks, size, arrays, *of_rows)
            return values, jax.tree.map(lambda _: True, values)

        return row(arrays, x, self.keys(key))

    def _run_stages(
        self, blocks: Any, size: int, arrays: PyTree, x: PyTree, keys: Any
    ) -> PyTree:
        """Applies all blocks to the rows of `x`; keys are `(rows, blocks)`."""
        data = None if size % self.mesh.shape[DATA] else DATA
        in_stages = jax.shard_map(
            functools.partial(self._run_stage, blocks),
            mesh=self.mesh,
            in_specs=(
                PartitionSpec(_STAGE),
                PartitionSpec(data),
                PartitionSpec(data, _STAGE),
            ),
            out_specs=PartitionSpec(data),
            check_vma=False,
        )
        return in_stages(arrays, x, keys)

    def _run_stage(self, blocks: Any, arrays: PyTree, x: PyTree, keys: Any) -> PyTree:
        """Applies the blocks of one device to one micro-batch after the other.

        Before the first micro-batch arrives and after the last, it computes on rows
        whose results are discarded. These are real rows: zeros might have gradients
        that are not finite.
        """
        stages, parts = self.mesh.shape[_STAGE], self.microbatches
        stage = jax.lax.axis_index(_STAGE)
        rows = len(jax.tree.leaves(x)[0])
        per_part = -(-rows // parts)

        def cut(leaf: Array) -> Array:
            again = jnp.concatenate([leaf] * -(-parts * per_part // rows))
            return again[: parts * per_part].reshape(parts, per_part, *leaf.shape[1:])

        micro, micro_keys = jax.tree.map(cut, (x, keys))
        forwards = [(i, i + 1) for i in range(stages - 1)]

        def turn(arrived: PyTree, number: Array) -> tuple[PyTree, PyTree]:
            part = jnp.clip(number - stage, 0, parts - 1)
            choose = functools.partial(jnp.where, stage == 0)
            inputs = jax.tree.map(lambda x, sent: choose(x[part], sent), micro, arrived)
            block_keys = jax.tree.map(lambda leaf: leaf[part], micro_keys)
            values = jax.vmap(functools.partial(blocks, arrays))(inputs, block_keys)
            # No stage sends to the first one, whose zeros are not used.
            return jax.lax.ppermute(values, _STAGE, forwards), values

        first = jax.tree.map(lambda batch: batch[0], micro)
        numbers = jnp.arange(parts + stages - 1)
        values = jax.lax.scan(turn, first, numbers)[1]

        def whole(leaf: Array) -> Array:
            last = leaf[stages - 1 :].reshape(-1, *leaf.shape[2:])[:rows]
            last = jnp.where(stage == stages - 1, last, jnp.zeros_like(last))
            return jax.lax.psum(last, _STAGE)

        return jax.tree.map(whole, values)
