"""A compiled train step, put into words: memory, collectives, lower bounds, time."""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from ..basics.tree import leaf_path
from . import hlo, hosts
from .hardware import Hardware
from .hosts import Hosts, Owners

MOST_OPERANDS: Final = 3
"""How many leaves a collective names; of more, the first and the last."""

_FEW: Final = 128
"""More elements than the sums of metrics that travel with gradients."""

_GROUPS: Final = {
    "params": "parameters",
    "buffers": "frozen leaves",
    "model_state": "model state",
    "opt_state": "optimizer state",
}


class Leaf(NamedTuple):
    """An array that is held between steps, or a batch's."""

    group: str
    """`"parameters"`, `"frozen leaves"`, `"model state"`, `"optimizer state"`,
    `"batch"` or `"other"`."""
    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    """How it is split: `"('data', None)"`; `"whole"` on every device."""
    parts: int
    """Into how many different pieces."""
    shard: tuple[int, ...]
    """The shape that one device holds."""
    bytes: int
    """Of the whole array."""
    bytes_per_device: int
    overwritten: bool
    """Whether the step writes a result over it."""


class Memory(NamedTuple):
    """Bytes per device."""

    parameters: int
    frozen: int
    model_state: int
    optimizer: int
    other: int
    """The key, the step's number and the sums of metrics."""
    batch: int
    gradients: int
    """All together: as large as the trained parameters that the step works with. How
    many there are at a time, in `temporary` or where results go, is the compiler's
    choice; so they are not added to the peak, which has them already."""
    temporary: int
    """What is neither argument nor result where that is most: activations, buffers of
    collectives, and gradients."""
    arguments: int
    """All that goes in, as the compiler says."""
    results: int
    overwritten: int
    """How much of the results lies where arguments lay."""
    program: int
    peak: int
    """arguments + results - overwritten + temporary."""


class Traffic(NamedTuple):
    """Collectives of one kind, from one place. Bytes are per device and step."""

    kind: str
    axes: tuple[str, ...] | None
    group_size: int
    dtype: str
    part: str
    """What of the model it moves, and in which part of the step."""
    count: int
    """How many instructions, each run `times` times."""
    times: int | None
    """None: in a loop whose length the program does not tell; counted once."""
    operand_bytes: int
    wire_bytes: float
    """What a device sends by the best ring algorithm."""
    overlapped: bool
    optional: bool
    crosses: bool
    """Whether it is between devices of several hosts."""


class Bound(NamedTuple):
    """A lower bound of this layout, and what the compiled program does."""

    what: str
    least: float
    found: float

    @property
    def ratio(self) -> float:
        """1.0 is the bound."""
        return self.found / self.least if self.least else float(self.found == 0) or 1.0


class Split(NamedTuple):
    """A leaf that is whole on every device and need not be."""

    path: str
    axis: int
    bytes_saved: int


class Estimate(NamedTuple):
    """A roofline: seconds at the hardware's peaks, in which a step is hardly ever done.

    Made in the same way for every compiler, so that those of GPUs, TPUs and faked CPU
    devices can be compared. The bytes that compilers count are not: each counts them in
    a way of its own.
    """

    hardware: str
    compute: float
    """Matrix operations, or compiled ones where those are not known."""
    memory: float
    """Arguments read once, results written once, temporary memory both."""
    communication: float
    best: float
    """Communication wholly beside computation."""
    worst: float
    """Communication wholly after it."""
    efficiency: float
    """Least share of `worst` that is not communication; 1.0 on one device."""
    fits: bool
    """Whether the peak is less than the hardware's memory."""


class Reading:
    """A compiled step beside the shapes that it was compiled for.

    Args:
        state: of shapes.
        strategy: as it compiles.
        owner: the host of each device, in the order of the mesh.
        runs: the step as it runs, a `TrainProgram` of the engine's.
        compiled: the same step with every leaf of the state as an argument of its own,
            which tells leaves apart; by default the one that runs.
        places: in which argument each leaf of the state crosses into `compiled`, if
            not each in its own.
    """

    def __init__(
        self,
        state: Any,
        strategy: Any,
        owner: Owners,
        runs: Any,
        compiled: Any = None,
        places: Sequence[int] | None = None,
    ):
        self.state = state
        self.runs = runs.compiled
        self.compiled = compiled = self.runs if compiled is None else compiled
        mesh = getattr(strategy, "mesh", None)
        self.mesh: dict[str, int] = {} if mesh is None else dict(mesh.shape)
        self.row_axes: tuple[str, ...] = getattr(strategy, "row_axes", ("data",))
        self.num_shards: int = strategy.num_shards
        if set(self.row_axes) <= set(self.mesh):
            self.num_shards = math.prod(self.mesh[axis] for axis in self.row_axes)
        self.is_whole: bool = getattr(strategy, "state_is_whole", False)
        self.bubble: float = strategy.bubble
        self.owner = owner
        self.hosts_of_places = list(owner.values())
        self.steps: int = runs.steps
        self.rows = runs.rows // runs.steps
        self.micro_batches = runs.micro_batches // runs.steps
        self.program = hlo.read(compiled.as_text())
        self.analysis = self.runs.memory_analysis()

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
        self.shardings = shardings
        places = list(range(len(named)) if places is None else places)
        self.num_arrays = max(places) + 1
        arguments = self.num_arrays + len(batch)
        places += range(self.num_arrays, arguments)
        # The program lacks the arguments that nothing depends on, and numbers the rest.
        executable = getattr(compiled, "_executable", None)
        kept = sorted(getattr(executable, "_kept_var_idx", range(arguments)))
        self.kept = kept
        overwritten = {kept[number] for number in self.program.aliased}
        self.leaves = [
            _leaf(*each, sharding, place in overwritten)
            for place, each, sharding in zip(
                places, named + batch, shardings, strict=True
            )
        ]
        self.leaves_in: dict[int, list[Leaf]] = {}
        for place, leaf in zip(places, self.leaves, strict=True):
            self.leaves_in.setdefault(place, []).append(leaf)
        self.donated: bool = runs.donated
        self.not_overwritten = tuple(
            f"{leaf.group}: {leaf.path}"
            for leaf in self.leaves[: self.num_state]
            if self.donated and leaf.bytes and not leaf.overwritten
        )
        self.params = [leaf for leaf in self.leaves if leaf.group == "parameters"]
        self.paths = {leaf.path for leaf in self.params}
        self._known_sizes: dict[Leaf, tuple[int, int]] = {}
        self._known_parameters: dict[str, str] = {}

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
                    self._part(each),
                    each.times,
                    each.overlapped,
                    each.optional,
                    hosts.crosses(each.groups, self.hosts_of_places),
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

    def hosts(self) -> Hosts:
        """What falls to the busiest host."""
        found = list(zip(self.leaves, self.shardings, strict=True))
        state, batch = found[: self.num_state], found[self.num_state :]
        rows, loaded, written = 0.0, [], []
        for leaf, sharding in batch:
            shares = hosts.loaded(sharding, leaf.shape, self.owner)
            loaded.append(_shared(leaf.bytes / self.steps, shares))
            rows = rows or self.rows * max(shares.values())  # of the first leaf
        alike: dict[Any, dict[int, float]] = {}
        for leaf, sharding in state:
            replicas = len(self.owner) // leaf.parts
            together = any(size % replicas == 0 for size in leaf.shard)
            key = leaf.spec, leaf.parts, together
            if key not in alike:
                alike[key] = hosts.written(sharding, leaf.shape, together, self.owner)
            written.append(_shared(leaf.bytes, alike[key]))
        sent = [
            _shared(
                (each.times or 1) / self.steps,
                hosts.sent(
                    each.kind, each.groups, each.wire_bytes, self.hosts_of_places
                ),
            )
            for each in self.program.collectives
        ]
        count = len(set(self.hosts_of_places))
        return Hosts(
            count,
            max(map(self.hosts_of_places.count, range(count))),
            round(rows),
            round(_most(loaded)),
            _most(sent),
            round(_most(written)),
            sum(leaf.bytes for leaf, _ in state),
        )

    def bounds(self) -> tuple[Bound, ...]:
        shards = self.num_shards
        share = 2 * (shards - 1) / shards
        gradients = share * sum(map(self._gathered_bytes, self.params))
        state = sum(each.bytes_per_device for each in self.leaves[: self.num_state])
        batch = sum(each.bytes_per_device for each in self.leaves[self.num_state :])
        found = self.analysis
        copies = found.output_size_in_bytes - found.alias_size_in_bytes
        results = self.runs.out_info
        metrics = sum(_nbytes(leaf) for leaf in jax.tree.leaves(results[1]))
        # A program returns a table with a pointer to each result.
        metrics += 8 * len(jax.tree.leaves(results))
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

    def _gathered_bytes(self, leaf: Leaf) -> float:
        """Bytes of a leaf, less what axes without rows split it into."""
        parts = 1
        for axis in _axes_in(leaf.spec, self.mesh):
            if axis not in self.row_axes:
                parts *= self.mesh[axis]
        return leaf.bytes / parts

    def _part(self, each: hlo.Collective) -> str:
        """What a collective moves: leaves of the model if they can be told."""
        moved = [
            self._moved(each, index, operand)
            for index, operand in enumerate(each.operands)
        ]
        leaves = list(dict.fromkeys(itertools.chain(*moved)))
        phase, scope = _phase(each), _scope(each)
        prefix = f"{phase}: " if phase else ""
        # Inside a loop it can't be seen where an array comes from and goes to.
        is_seen = bool(self.program.outputs_of(each.name, None))
        others = "activations" if phase and is_seen else "other arrays"
        if not leaves:
            return prefix + others + (f" in {scope}" if scope else "")
        rest = ["metrics"] * ("metrics" in leaves) + [others] * ([] in moved)
        leaves = [name for name in leaves if name != "metrics"]
        if len(leaves) > MOST_OPERANDS:
            leaves = [f"{leaves[0]} ... {leaves[-1]} ({len(leaves)} leaves)"]
        return prefix + ", ".join(leaves + rest)

    def _moved(
        self, each: hlo.Collective, index: int, operand: hlo.Operand
    ) -> list[str]:
        """The parameters that an operand is of, or "metrics"; else nothing.

        A parameter that is gathered is an input nearby; a gradient that is summed, or a
        new parameter that is gathered, leads to a result nearby. Sizes have to agree.
        """
        size = math.prod(operand.array.shape)
        inputs = [self.kept[i] for i in self.program.inputs_of(operand.name)]
        results = self.program.outputs_of(each.name, index)
        if not results:
            alike = [leaf for leaf in self.params if leaf.shape == operand.array.shape]
            return [alike[0].path] if len(alike) == 1 and _phase(each) else []
        states = [i for i in results if i < self.num_arrays]
        gathered = inputs if each.kind == "all-gather" else []
        for place in gathered + states:
            held = [
                self._parameter(leaf)
                for leaf in self.leaves_in[place]
                if leaf.group != "other" and size in self._sizes(leaf)
            ]
            if len(self.leaves_in[place]) > 1:
                # Small leaves that cross together: those of one size are not told
                # apart, and a single number may be anything.
                held = [path for path in held if path in self.paths]
            if held:
                return list(dict.fromkeys(held))
        if size <= _FEW and len(states) < len(results):
            return ["metrics"]
        states = [leaf for place in states for leaf in self.leaves_in[place]]
        # Compilers join gradients, and the sums of metrics, into one array.
        joined = dict.fromkeys(map(self._parameter, states))
        joined = [leaf for leaf in self.params if leaf.path in joined]
        for which in (0, -1):
            total = sum(self._sizes(leaf)[which] for leaf in joined)
            if total <= size <= total + _FEW:
                return [leaf.path for leaf in joined]
        return []

    def _sizes(self, leaf: Leaf) -> tuple[int, int]:
        """Elements of a leaf on one device, and gathered over the rows' devices."""
        if leaf not in self._known_sizes:
            item = max(1, leaf.bytes // max(1, math.prod(leaf.shape)))
            gathered = int(self._gathered_bytes(leaf)) // item
            self._known_sizes[leaf] = math.prod(leaf.shard), gathered
        return self._known_sizes[leaf]

    def _parameter(self, leaf: Leaf) -> str:
        """The parameter whose path a leaf of the optimizer's ends with."""
        if leaf.group != "optimizer state":
            return leaf.path
        if leaf.path not in self._known_parameters:
            ends = [path for path in self.paths if leaf.path.endswith(path)]
            found = max(ends, key=len, default=leaf.path)
            self._known_parameters[leaf.path] = found
        return self._known_parameters[leaf.path]


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


def _shared(factor: float, shares: Mapping[int, float]) -> dict[int, float]:
    return {host: factor * share for host, share in shares.items()}


def _most(loads: Sequence[Mapping[int, float]]) -> float:
    """The largest sum that any host has."""
    total: dict[int, float] = {}
    for load in loads:
        for host, size in load.items():
            total[host] = total.get(host, 0.0) + size
    return max(total.values(), default=0.0)


def _phase(each: hlo.Collective) -> str:
    """In which part of a step a collective stands, by JAX's transformations."""
    paths = [each.path, *(operand.path for operand in each.operands)]
    if any("transpose(" in path for path in paths):
        return "backward"
    if any("jvp(" in path for path in paths):
        return "forward"
    return ""  # Parameters that are gathered, the update, or not told.


def _scope(each: hlo.Collective) -> str:
    """The innermost named layer, of those that Equinox names."""
    parts = each.path.replace("(", "/").replace(")", "/").split("/")
    named = [part for part in parts if "." in part and not part.startswith("<")]
    return named[-1] if named else ""


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
