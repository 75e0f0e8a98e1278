"""Sequence parallelism: the tokens of each row are split over the devices."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from ..basics.arguments import checks_arguments, format_call
from ..basics.tree import stored_path
from ..step import DATA, Collectives, Group, OnRows, Results
from ..strategies import FSDP
from ..strategies.base import Rows, drop_micro_batch_axis, replace_attributes
from ..strategies.meshes import Devices, check_sizes, find_devices, make_topology_mesh
from ..strategies.shard_map_collectives import ShardMapCollectives
from .fuse_attention import SEQ


class SequenceParallel(FSDP):
    """Splits the tokens of each row over one axis of a mesh, and rows over the other.

        SequenceParallel({"data": 1, "seq": 8})

    For rows that are too long for one device, or fewer rows than devices. The leaves of
    a batch are shaped `(rows, tokens, ...)`; a leaf of another length, or without
    tokens, is split by rows only; a plan shows the part of each leaf that a device has.
    Each device computes its share of the tokens; XLA gathers the keys and values of
    attention, and works out masks, positions and shifts, as they are written for whole
    rows.

    Args:
        mesh_shape: how many devices share the rows, `"data"`, and the tokens of each,
            `"seq"`. Default: all devices share the tokens.
        fsdp: whether all devices also share the parameters, gradients and optimizer
            state, as under `FSDP`, block by block where the model has a `Stack`. If
            not, each device has all of them.
        devices: how many, or which; all by default.
        min_size: leaves of fewer elements are held whole, if `fsdp`.

    Raises:
        ValueError: for sizes that are not those of the devices; when a step is
            compiled, for rows whose number of tokens `"seq"` does not divide.
    """

    @checks_arguments
    def __init__(
        self,
        mesh_shape: Mapping[str, int] | None = None,
        fsdp: bool = False,
        *,
        devices: Devices = None,
        min_size: int = 1,
    ):
        in_order = find_devices(devices)
        if mesh_shape is None:
            mesh_shape = {DATA: 1, SEQ: len(in_order)}
        _check_mesh_shape(mesh_shape, len(in_order))
        self.fsdp = fsdp
        mesh = make_topology_mesh(
            in_order, {name: mesh_shape[name] for name in (DATA, SEQ)}
        )
        gather = "auto" if fsdp else "once"
        super().__init__(mesh=mesh, min_size=min_size, gather=gather)

    @property
    def split_axes(self) -> tuple[str, ...]:
        return (DATA, SEQ) if self.fsdp else ()

    def _group_shardings(self, group: Group, split: bool) -> Group:
        if not split:
            return super()._group_shardings(group, split)
        batch = jax.tree.map(drop_micro_batch_axis, group.batch)
        tokens = self._find_num_tokens(batch)

        def shard(leaf: Any) -> NamedSharding:
            names = [SEQ] if leaf.shape[1:2] == (tokens,) else []
            return NamedSharding(self.mesh, PartitionSpec(None, DATA, *names))

        return Group(jax.tree.map(shard, batch), self._replicated, self._replicated)

    def collectives(self, groups: Sequence[Group], rows: Rows) -> Collectives:
        """Returns those of `FSDP` for `fsdp`; else XLA does all communication.

        One reduction over all devices sends less than one over the tokens, by XLA, and
        another over the rows.
        """
        inner = Collectives()
        if self.fsdp:
            over_all = replace_attributes(self, row_axes=(DATA, SEQ))
            inner = ShardMapCollectives(over_all, self.units, is_apart=False)
        split = functools.partial(self._split_tokens, rows)
        return _SequenceCollectives(inner, split, self.mesh.abstract_mesh)

    def _split_tokens(self, rows: Rows, group: Group) -> Group:
        """Returns the group with its tokens split.

        Args:
            rows: whether rows are split, too.
            group: of which leaves are `(micro_batches, rows, ...)`.
        """
        tokens = self._find_num_tokens(jax.tree.map(drop_micro_batch_axis, group.batch))
        spec = PartitionSpec(None, DATA, SEQ)
        if rows == "replicated":
            # If tokens are split over one axis of two, and a loss shifts them, XLA's
            # gradient of an embedding is off by half (CPUs, jax 0.10.2 and 0.12).
            is_even = tokens % self.mesh.size == 0
            spec = PartitionSpec(None, None, (DATA, SEQ) if is_even else None)
        sharding = NamedSharding(self.mesh, spec)

        def split(leaf: Array) -> Array:
            if leaf.shape[2:3] != (tokens,):
                return leaf
            return jax.lax.with_sharding_constraint(leaf, sharding)

        return group._replace(batch=jax.tree.map(split, group.batch))

    def _find_num_tokens(self, batch: PyTree) -> int:
        """Returns the number of tokens per row of a batch: its longest axis 1."""
        shapes = {
            f"batch{stored_path(path)}": leaf.shape
            for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
        }
        lengths = {name: shape[1] for name, shape in shapes.items() if len(shape) > 1}
        if not lengths:
            raise ValueError(
                f"`strategy`: {self!r} splits axis 1 of a batch's leaves, its tokens,"
                f" and none has one; they are {shapes}. Use Sharded()."
            )
        tokens, parts = max(lengths.values()), self.mesh.shape[SEQ]
        if tokens % parts:
            longest = ", ".join(name for name in lengths if lengths[name] == tokens)
            raise ValueError(
                f"`strategy`: {self!r} splits axis 1 of {longest}, {tokens} tokens,"
                f" over the {parts} devices of {SEQ!r}, which do not divide them. Cut"
                f" or pad rows to a multiple of {parts}; where a loss shifts tokens,"
                " shift them in the data set: x, y = tokens[:-1], tokens[1:]."
            )
        return tokens

    def __repr__(self) -> str:
        return format_call(self, 1, mesh_shape=repr(dict(self.mesh.shape)))


class _SequenceCollectives(Collectives):
    """The collectives of a strategy, for a step whose tokens are split.

    Args:
        inner: the strategy's own collectives, which do the communication.
        split: makes a group of batches into one whose tokens are split.
        mesh: the axes over which tokens are split, as an abstract mesh. It is ambient
            in the step, so that `fuse_attention` knows of the split.
    """

    def __init__(
        self,
        inner: Collectives,
        split: Callable[[Group], Group],
        mesh: jax.sharding.AbstractMesh,
    ):
        self._inner, self._split, self._mesh = inner, split, mesh
        self.gathers_params = inner.gathers_params

    def over_rows(
        self, function: OnRows, inputs: Any, groups: Sequence[Group], results: Results
    ) -> Any:
        groups = [self._split(group) for group in groups]
        # Ambient, so that `fuse_attention` knows that tokens are split.
        with jax.sharding.use_abstract_mesh(self._mesh):
            return self._inner.over_rows(function, inputs, groups, results)

    def like_gradients(self, params: PyTree) -> PyTree:
        return self._inner.like_gradients(params)


def _check_mesh_shape(mesh_shape: Any, count: int) -> None:
    names = {DATA, SEQ}
    if {*mesh_shape} != names:
        raise ValueError(
            '`mesh_shape` must be two sizes by name, such as {"data": 2, "seq": 4}: how'
            " many devices share the rows, and how many the tokens of each; got"
            f" {mesh_shape!r}."
        )
    check_sizes(mesh_shape, count)
