"""A compiled train step, put into words: memory, collectives, lower bounds, time."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np

from ..basics.tree import leaf_path
from . import hlo
from .hardware import Hardware
from .parts import Bound, Estimate, Leaf, Memory, Split, Traffic
from .places import place_of

_GROUPS: Final = {
    "params": "parameters",
    "buffers": "frozen leaves",
    "model_state": "model state",
    "opt_state": "optimizer state",
}


class Reading:
    """A compiled step beside the shapes that it was compiled for.

    Args:
        state: of shapes.
        places: in which argument each leaf of the state crosses into the step; small
            ones may share one.
        strategy: as it compiles.
        hosts: the number of the host that each device is on, in the mesh's order.
        runs: the step, a `TrainProgram` of the engine's.
    """

    def __init__(
        self,
        state: Any,
        places: Sequence[int],
        strategy: Any,
        hosts: Sequence[int],
        runs: Any,
    ):
        compiled = runs.compiled
        mesh = getattr(strategy, "mesh", None)
        self.mesh: dict[str, int] = {} if mesh is None else dict(mesh.shape)
        self.row_axes: tuple[str, ...] = getattr(strategy, "row_axes", ("data",))
        self.num_shards: int = strategy.num_shards
        if set(self.row_axes) <= set(self.mesh):
            self.num_shards = math.prod(self.mesh[axis] for axis in self.row_axes)
        self.is_whole: bool = getattr(strategy, "state_is_whole", False)
        self.hosts = hosts
        self.steps: int = runs.steps
        self.rows = runs.rows // runs.steps
        self.micro_batches = runs.micro_batches // runs.steps
        self.program = hlo.read(compiled.as_text())
        self.analysis = compiled.memory_analysis()
        self.results = compiled.out_info
        flops = None if runs.built is None else runs.built.flops
        self.flops = None if flops is None else flops / self.steps

        named = [
            (_GROUPS.get(field, "other"), leaf_path(path) or field, leaf)
            for field, tree in state._asdict().items()
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        ]
        self.num_state = len(named)
        inputs, _ = compiled.input_shardings
        _, group_shardings = inputs
        (_, groups), _ = compiled.args_info
        batch = [
            ("batch", leaf_path(path[1:] if len(groups) == 1 else path), leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(groups)
        ]
        shardings = [leaf.sharding for _, _, leaf in named]
        # Of a leaf that nothing depends on JAX does not say how it is split: as others.
        usual = [*jax.tree.leaves(group_shardings), shardings[0]][0]
        of_groups = jax.tree.leaves(group_shardings, is_leaf=lambda each: each is None)
        shardings += [usual if each is None else each for each in of_groups]

        first = max(places) + 1  # of the batch
        arguments = first + len(batch)
        places = [*places, *range(first, arguments)]
        # The program lacks the arguments that nothing depends on, and numbers the rest.
        executable = getattr(compiled, "_executable", None)
        kept = sorted(getattr(executable, "_kept_var_idx", range(arguments)))
        overwritten = {kept[number] for number in self.program.aliased}
        self.leaves = [
            _leaf(*each, sharding, place in overwritten)
            for place, each, sharding in zip(
                places, named + batch, shardings, strict=True
            )
        ]
        self.donated: bool = runs.donated
        self.not_overwritten = tuple(
            f"{leaf.group}: {leaf.path}"
            for leaf in self.leaves[: self.num_state]
            if self.donated and leaf.bytes and not leaf.overwritten
        )
        self.params = [leaf for leaf in self.leaves if leaf.group == "parameters"]

    def memory(self) -> Memory:
        def held(group: str) -> int:
            return sum(
                leaf.bytes_per_device for leaf in self.leaves if leaf.group == group
            )

        found = self.analysis
        return Memory(
            parameters=held("parameters"),
            frozen=held("frozen leaves"),
            model_state=held("model state"),
            optimizer=held("optimizer state"),
            other=held("other"),
            batch=held("batch"),
            gradients=int(sum(map(self._gathered_bytes, self.params))),
            temporary=found.temp_size_in_bytes,
            arguments=found.argument_size_in_bytes,
            results=found.output_size_in_bytes,
            overwritten=found.alias_size_in_bytes,
            program=found.generated_code_size_in_bytes,
            peak=found.argument_size_in_bytes
            + found.output_size_in_bytes
            - found.alias_size_in_bytes
            + found.temp_size_in_bytes,
        )

    @functools.cached_property
    def traffic(self) -> tuple[Traffic, ...]:
        """Collectives alike in everything but their bytes, together."""
        found: dict[Any, list[hlo.Collective]] = {}
        for each in self.program.collectives:
            if each.group_size > 1:
                key = (
                    each.kind,
                    each.axes(self.mesh),
                    each.group_size,
                    each.dtype,
                    place_of(each),
                    each.times,
                    each.overlapped,
                    each.optional,
                    self._crosses(each.groups),
                )
                found.setdefault(key, []).append(each)
        traffic = [
            Traffic(
                kind,
                axes,
                size,
                dtype,
                part,
                len(listed),
                times if times is None else math.ceil(times / self.steps),
                sum(each.operand_bytes for each in listed) * (times or 1) // self.steps,
                sum(each.wire_bytes for each in listed) * (times or 1) / self.steps,
                *rest,
            )
            for (kind, axes, size, dtype, part, times, *rest), listed in found.items()
        ]
        return tuple(sorted(traffic, key=lambda each: -each.wire_bytes))

    def bounds(self) -> tuple[Bound, ...]:
        shards = self.num_shards
        share = 2 * (shards - 1) / shards
        gradients = share * sum(map(self._gathered_bytes, self.params))
        state = sum(each.bytes_per_device for each in self.leaves[: self.num_state])
        batch = sum(each.bytes_per_device for each in self.leaves[self.num_state :])
        found = self.analysis
        copies = found.output_size_in_bytes - found.alias_size_in_bytes
        metrics = sum(_nbytes(leaf) for leaf in jax.tree.leaves(self.results[1]))
        # A program returns a table with a pointer to each result.
        metrics += 8 * len(jax.tree.leaves(self.results))
        return (
            Bound(
                "bytes sent per device: every gradient summed over the devices of the"
                " rows, 2(n-1)/n of it",
                gradients,
                sum(each.wire_bytes for each in self.traffic),
            ),
            Bound(
                "bytes that go in: the state and the batch, once",
                state + batch,
                found.argument_size_in_bytes,
            ),
            Bound(
                "bytes that come out beside the donated state: metrics, and a pointer"
                " per result",
                metrics if self.donated else metrics + state,
                copies,
            ),
        )

    def could_split(self) -> tuple[Split, ...]:
        """Leaves that no axis splits, though the shards divide one of theirs."""
        n = self.num_shards
        found = [
            Split(
                f"{leaf.group}: {leaf.path}",
                axis,
                leaf.bytes_per_device - leaf.bytes_per_device // n,
            )
            for leaf in self.leaves[: self.num_state]
            if n > 1 and leaf.parts == 1 and leaf.group != "other" and not self.is_whole
            for axis in [
                next((i for i, size in enumerate(leaf.shape) if size % n == 0), None)
            ]
            if axis is not None and leaf.bytes >= n
        ]
        return tuple(sorted(found, key=lambda each: -each.bytes_saved))

    def _crosses(self, groups: Sequence[Sequence[int]]) -> bool:
        """Whether devices of several hosts exchange data in any of the groups."""
        return any(len({self.hosts[place] for place in group}) > 1 for group in groups)

    def _gathered_bytes(self, leaf: Leaf) -> float:
        """Bytes of a leaf, less what axes without rows split it into."""
        parts = 1
        for axis in _axes_in(leaf.spec, self.mesh):
            if axis not in self.row_axes:
                parts *= self.mesh[axis]
        return leaf.bytes / parts


def _leaf(group: str, path: str, leaf: Any, sharding: Any, overwritten: bool) -> Leaf:
    shard = tuple(sharding.shard_shape(leaf.shape))
    spec = getattr(sharding, "spec", ())
    split = any(part is not None and part != () for part in spec)
    size = np.dtype(leaf.dtype).itemsize if not _is_key(leaf) else _nbytes(leaf)
    parts = math.prod(
        math.ceil(whole / part) if part else 1
        for whole, part in zip(leaf.shape, shard, strict=True)
    )
    return Leaf(
        group,
        path,
        tuple(leaf.shape),
        str(leaf.dtype),
        str(tuple(spec)) if split else "whole",
        parts,
        shard,
        math.prod(leaf.shape) * size,
        math.prod(shard) * size,
        overwritten,
    )


def estimate(profile: Hardware, reading: Reading, flops: float) -> Estimate:
    memory = reading.memory()
    floating = [leaf.dtype for leaf in reading.params]
    narrow = all("16" in dtype or "8" in dtype for dtype in floating)
    compute = flops / (profile.flops if narrow else profile.flops_float32)
    least = memory.arguments + memory.results + 2 * memory.temporary
    touched = least / profile.memory_bandwidth
    communication = 0.0
    for each in reading.traffic:
        near = profile.domain is None or each.group_size <= profile.domain
        speed = profile.link_bandwidth if near else profile.far_bandwidth
        if not near and profile.domain:
            # Of a ring over nodes, one device per node sends to the next node; each
            # part of the data crosses once, over as many adapters as a node has.
            speed = min(profile.link_bandwidth, profile.far_bandwidth * profile.domain)
        communication += each.wire_bytes / speed
    busy = max(compute, touched)
    worst = busy + communication
    return Estimate(
        profile.name,
        compute,
        touched,
        communication,
        max(busy, communication),
        worst,
        busy / worst if worst else 1.0,
        memory.peak <= profile.memory,
    )


def _axes_in(spec: str, mesh: Mapping[str, int]) -> list[str]:
    return [name for name in mesh if f"'{name}'" in spec]


def _nbytes(leaf: Any) -> int:
    if _is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
        return (
            math.prod(data.shape) * data.dtype.itemsize // max(1, math.prod(leaf.shape))
        )
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def _is_key(leaf: Any) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
