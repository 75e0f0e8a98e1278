"""Tensor parallelism by rules, beside data parallelism, on a mesh of several axes."""

from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree

from ..basics.arguments import checks_arguments, format_call
from ..basics.tree import format_paths, leaf_path, matches
from ..step import DATA
from .base import check_spec
from .meshes import Devices, check_sizes, find_devices, make_topology_mesh
from .sharded import Sharded
from .stack import Stack

Rule = tuple[str, PartitionSpec]
"""A pattern of paths, and how leaves that it matches are split."""


class TensorParallel(Sharded):
    """Splits layers over one axis of a mesh by rules, and batches over another.

        TensorParallel(
            {"data": 4, "model": 2},
            rules=[
                ("layers[0].weight", PartitionSpec("model", None)),
                ("layers[1].weight", PartitionSpec(None, "model")),
            ],
        )

    A rule says which axis of an array is split over which axis of the mesh (the grid of
    devices). The first rule that matches an array applies; without one, the array is
    replicated. XLA works out the communication. `tensor_rules(model)` makes rules for
    MLPs and attention.

    An array that a rule splits over `"data"` as well, `PartitionSpec("model", "data")`,
    is held in shards between steps, as under `FSDP`, and gathered over `"data"` before
    each step.

    Args:
        mesh_shape: sizes of the mesh's axes by name, `"data"` among them.
        rules: `(path pattern, PartitionSpec)`. A pattern must match the whole path, as
            `layers[0].weight` does, and `**.weight`, for weights anywhere.
        devices: how many, or which; all by default.
    """

    @checks_arguments
    def __init__(
        self,
        mesh_shape: Mapping[str, int],
        rules: Sequence[Rule] = (),
        devices: Devices = None,
    ):
        in_order = find_devices(devices)
        _check_mesh_shape(mesh_shape, len(in_order))
        for rule in rules:
            _check_rule(rule)
        super().__init__(mesh=make_topology_mesh(in_order, mesh_shape))
        self.rules = [(pattern, spec) for pattern, spec in rules]

    def prepare(self, arguments: dict[str, Any]) -> dict[str, Any]:
        leaves = jax.tree_util.tree_leaves_with_path(arguments["model"])
        kinds = jax.Array | jax.ShapeDtypeStruct
        paths = [leaf_path(path) for path, leaf in leaves if isinstance(leaf, kinds)]
        used = [self._find_rule(path) for path in paths]
        for rule in self.rules:
            if not any(rule is other for other in used):
                raise ValueError(
                    f"`rules`: {rule[0]!r} is used for no leaf of the model. A pattern"
                    " must match the whole path, and the first rule that matches is"
                    f" used: put special rules before general ones. The paths are"
                    f" {format_paths(paths)}."
                )
        return arguments

    def param_spec(self, path: str, leaf: Array) -> PartitionSpec:
        if (rule := self._find_rule(path)) is None:
            return PartitionSpec()
        origin = f"`rules`: the rule for {rule[0]!r}"
        return check_spec(self.mesh, origin, rule[1], path, leaf)

    def __repr__(self) -> str:
        return format_call(self, 1, mesh_shape=repr(dict(self.mesh.shape)))

    def _find_rule(self, path: str) -> Rule | None:
        """Returns the first rule that matches."""
        return next((rule for rule in self.rules if matches(path, rule[0])), None)


@checks_arguments
def tensor_rules(model: PyTree, axis: str = "model") -> list[Rule]:
    """Returns rules that split layers of MLPs and attention in pairs, as Megatron-LM.

    In each pair of layers of an `eqx.nn.MLP`, the first is split by its outputs and the
    second by its inputs, so that devices only exchange the sum after the second. An odd
    last layer stays whole. An `eqx.nn.MultiheadAttention` is split by heads; the size
    of the axis should divide their number.

    Args:
        model: the model whose layers are to be split.
        axis: the axis of the mesh to split over.

    Returns:
        Rules with full paths, to be printed, edited or added to.

    Raises:
        ValueError: if there are no such layers.
    """
    rules = _make_rules(model, axis)
    if not rules:
        raise ValueError(
            "`model` has no eqx.nn.MLP of two or more layers and no"
            " eqx.nn.MultiheadAttention; write rules for its own layers:"
            ' ("layers[0].weight", PartitionSpec("model", None)).'
        )
    return rules


def _make_rules(model: PyTree, axis: str) -> list[Rule]:
    """Returns the rules that split the layers of `model` over `axis`, in pairs."""
    kinds = eqx.nn.MLP | eqx.nn.MultiheadAttention | Stack
    is_kind = lambda node: isinstance(node, kinds)  # noqa: E731
    rules: list[Rule] = []
    nodes = jax.tree_util.tree_flatten_with_path(model, is_leaf=is_kind)[0]
    for path, node in nodes:
        pairs: list[tuple[dict[str, Any], str]] = []
        prefix = f"{leaf_path(path)}." if path else ""
        if isinstance(node, Stack):
            rules += [
                (f"{prefix}stacked.{name}", PartitionSpec(None, *spec))
                for name, spec in _make_rules(node.stacked, axis)
            ]
        elif isinstance(node, eqx.nn.MLP):
            pairs = [
                ({f"layers[{i}]": node.layers[i]}, f"layers[{i + 1}]")
                for i in range(0, len(node.layers) - 1, 2)
            ]
        elif isinstance(node, eqx.nn.MultiheadAttention):
            inputs = ("query_proj", "key_proj", "value_proj")
            pairs = [({name: getattr(node, name) for name in inputs}, "output_proj")]

        # In a pair, the first layer is split by outputs, the second by inputs.
        for outward, inward in pairs:
            for name, layer in outward.items():
                rules.append((f"{prefix}{name}.weight", PartitionSpec(axis, None)))
                if layer.bias is not None:
                    rules.append((f"{prefix}{name}.bias", PartitionSpec(axis)))
            rules.append((f"{prefix}{inward}.weight", PartitionSpec(None, axis)))
    return rules


def _check_mesh_shape(mesh_shape: Mapping[str, int], count: int) -> None:
    if DATA not in mesh_shape:
        raise ValueError(
            '`mesh_shape` must be sizes by name, such as {"data": 4, "model": 2}, with'
            f" {DATA!r}, which rows are split over, among them; got {mesh_shape!r}."
        )
    if "fsdp" in mesh_shape:
        raise ValueError(
            '`mesh_shape`: TensorParallel has no axis "fsdp". Name "data" in the rules,'
            ' as in PartitionSpec("model", "data"): then parameters are split over it'
            " between steps, and gathered for each step."
        )
    check_sizes(mesh_shape, count)


def _check_rule(rule: Any) -> None:
    kinds = tuple(map(type, rule)) if isinstance(rule, tuple | list) else ()
    if kinds != (str, PartitionSpec):
        raise TypeError(
            "`rules` must be (path pattern, PartitionSpec) pairs, such as"
            f' ("layers[0].weight", PartitionSpec("model", None)); got {rule!r}.'
        )
