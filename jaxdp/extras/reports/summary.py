"""A model layer by layer: its arrays, how large they are, and what trains them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import PyTree

from ...basics.console import format_columns
from ...basics.tree import get_node, leaf_path, nbytes
from ...basics.units import format_bytes
from ...fit import get_shapes

if TYPE_CHECKING:
    from jaxdp import Trainer


class Layer(NamedTuple):
    """A module and the arrays that lie directly in it."""

    path: str
    """The path, `layers[0]`; empty for the model itself."""
    kind: str
    """The name of its class."""
    arrays: dict[str, tuple[int, ...]]
    """Shapes by name."""
    parameters: int
    """The number of parameters in these arrays."""
    trained: int
    """The number of them that an optimizer changes."""
    bytes: int
    bytes_per_device: int
    by: str = ""
    """The parts that train it, of a trainer that has several."""


@dataclasses.dataclass(frozen=True, repr=False)
class Summary:
    """The result of `Trainer.summary`; `print` and notebooks show it as a table.

    Attributes:
        name: of the model.
        layers: the modules that have arrays, in the order of the model.
        state: numbers in the `eqx.nn.State`, and their bytes.
        members: how many models of an ensemble the layers contain, or None.
        strategy: where the model lives.
        devices: on how many devices.
    """

    name: str
    layers: tuple[Layer, ...]
    state: tuple[int, int]
    members: int | None
    strategy: str
    devices: int

    @property
    def parameters(self) -> int:
        """The number of parameters of the model, trained or not."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def trained(self) -> int:
        """The number of them that are trained."""
        return sum(layer.trained for layer in self.layers)

    @property
    def bytes(self) -> int:
        """The bytes of the model, on all devices."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def bytes_per_device(self) -> int:
        """The bytes of it that each device holds."""
        return sum(layer.bytes_per_device for layer in self.layers)

    def __repr__(self) -> str:
        return "\n".join([self._title(), *self._table(), *self._totals()])

    def _title(self) -> str:
        title = (
            f"{self.name}: {_format_count(self.parameters)}, {format_bytes(self.bytes)}"
        )
        if self.members is None:
            return title
        per_member = self.parameters // self.members
        return f"{title}, of {self.members} members with {per_member:,} each"

    def _table(self) -> list[str]:
        heads = ("layer", "class", "arrays", "parameters", "bytes", "per device")
        is_split = self.bytes_per_device != self.bytes
        end = len(heads) if is_split else -1
        rows: list[tuple[str, ...]] = [(*heads[:end], "trained")]
        for layer in self.layers:
            arrays = (f"{name} {shape}" for name, shape in layer.arrays.items())
            cells = (
                layer.path or "(model)",
                layer.kind,
                ", ".join(arrays),
                f"{layer.parameters:,}",
                format_bytes(layer.bytes),
                format_bytes(layer.bytes_per_device),
            )
            rows.append((*cells[:end], _format_trained(layer)))
        numbers = range(3, len(rows[0]) - 1)
        return [f"  {line}" for line in format_columns(rows, right=numbers)]

    def _totals(self) -> list[str]:
        frozen = self.parameters - self.trained
        trained = _format_count(self.trained)
        lines = [f"trained: {trained}; not trained: {_format_count(frozen)}"]
        if self.state[0]:
            numbers, size = self.state
            lines.append(f"state beside the model: {numbers:,} numbers, in {size:,} B")
        if self.devices > 1:
            held = format_bytes(self.bytes_per_device)
            lines.append(
                f"each of {self.devices} devices holds {held}: {self.strategy}"
            )
        return lines


@jax.disable_jit(False)
def summarize(trainer: "Trainer") -> Summary:
    """Implements `Trainer.summary` by shapes: places nothing, and waits for nothing."""
    config = trainer.run.config
    model, state = config.model, get_shapes(trainer.run)
    shapes = _list_by_path(state[:2])
    by = [
        (part.name, eqx.filter(state[0], part.mask)) for part in config.optimizer_parts
    ]
    trained = {
        path: name
        for name, leaves in by or [("", state[0])]
        for path in _list_by_path([leaves])
    }
    layouts = [getattr(leaf, "sharding", None) for leaf in shapes.values()]
    devices = max(len(layout.device_set) if layout else 1 for layout in layouts)

    layers: dict[str, Layer] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        name = leaf_path(path)
        if name not in shapes:
            continue
        leaf, owner = shapes[name], path[: _find_owner_depth(model, path)]
        layer_name = leaf_path(owner)
        if layer_name not in layers:
            kind = type(get_node(model, owner)).__name__
            layers[layer_name] = Layer(layer_name, kind, {}, 0, 0, 0, 0)

        sharding = getattr(leaf, "sharding", None)
        shard = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        layer = layers[layer_name]
        by = dict.fromkeys(filter(None, (*layer.by.split(", "), trained.get(name))))
        layers[layer_name] = layer._replace(
            arrays=layer.arrays | {_format_name(path[len(owner) :], leaf): leaf.shape},
            parameters=layer.parameters + math.prod(leaf.shape),
            trained=layer.trained + (name in trained) * math.prod(leaf.shape),
            bytes=layer.bytes + nbytes(leaf),
            bytes_per_device=layer.bytes_per_device + nbytes(leaf, shard),
            by=", ".join(by),
        )

    beside = [leaf for leaf in jax.tree.leaves(state[2]) if hasattr(leaf, "dtype")]
    return Summary(
        type(model).__name__,
        tuple(layers.values()),
        (sum(math.prod(leaf.shape) for leaf in beside), sum(map(nbytes, beside))),
        config.ensemble and config.ensemble.size,
        repr(config.strategy),
        devices,
    )


def _list_by_path(trees: Any) -> dict[str, Any]:
    return {
        leaf_path(path): leaf
        for tree in trees
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _find_owner_depth(model: PyTree, path: Sequence[Any]) -> int:
    """Returns the length of the path to the module of a leaf.

    In trees without modules, it is that to the container of the leaf.
    """
    for depth in range(len(path) - 1, -1, -1):
        if isinstance(get_node(model, path[:depth]), eqx.Module):
            return depth
    return max(len(path) - 1, 0)


def _format_name(path: Sequence[Any], leaf: Any) -> str:
    """Returns the name of an array in its layer, with a dtype other than float32."""
    name, dtype = leaf_path(path) or "value", str(leaf.dtype)
    return name if dtype == "float32" else f"{name} {dtype}"


def _format_trained(layer: Layer) -> str:
    if not layer.trained:
        return "no"
    if layer.trained < layer.parameters:
        share = f"{layer.trained:,}"
        return f"{share} by {layer.by}" if layer.by else share
    return f"by {layer.by}" if layer.by else "yes"


def _format_count(parameters: int) -> str:
    return f"{parameters:,} parameter{'s' * (parameters != 1)}"
