"""The costs of a compiled train step: memory, collectives, lower bounds, time."""

import contextlib
import functools
import math
import re
from collections.abc import Collection, Sequence
from typing import Any, Final

import jax

from ...basics.donation import find_donated
from ...basics.host_memory import HOST
from ...basics.tree import leaf_path, nbytes
from ...basics.units import format_bytes
from ...engine import num_in_flight
from ...step import LONG_IN_FLIGHT
from ..local_sgd import LocalSGD
from . import hlo
from .estimate import GROUPS, Bound, Estimate, Memory, PlanLeaf, Traffic
from .hardware import Hardware, get_usable_memory
from .products import count_products

_MAX_PLACES: Final = 3
"""The number of places that the text of a collective of several arrays names."""

_UNNAMED: Final = re.compile(
    r"vmap|jvp|transpose|shard_map|while|body|cond|closed_call|branch_\d+_fun"
    r"|checkpoint|remat\w*|custom_\w+|eval_jaxpr|own_loop|runs_\d+_times|"
)
"""The parts of a path that transformations, control flow and our loops add."""


class StepAnalysis:
    """A compiled step beside the shapes that it was compiled for.

    Args:
        engine: the engine that compiled the step.
        hosts: the number of the host that each device is on, in the mesh's order.
        memory: the bytes of an accelerator, 0 if unknown. None for CPUs, which get
            their batches in the call.
    """

    def __init__(self, engine: Any, hosts: Sequence[int], memory: int | None = None):
        strategy, runs = engine.strategy, engine.get_train_program()
        self.mesh: dict[str, int] = dict(strategy.mesh.shape)
        self.hosts = hosts
        self.branch_every = strategy.every if isinstance(strategy, LocalSGD) else 1

        # Its inputs.
        self.steps: int = runs.num_steps
        sizes = [jax.tree.leaves(group.batch)[0].shape[:2] for group in runs.groups]
        self.rows = sum(micros * rows for micros, rows in sizes) // runs.num_steps
        self.micro_batches = sum(micros for micros, _ in sizes) // runs.num_steps
        self.donated: bool = runs.donates
        self.products: dict[str, float] | None = None
        with contextlib.suppress(KeyError):  # JAX has renamed a primitive
            counted = count_products(runs.jaxpr)
            self.products = {name: n / runs.num_steps for name, n in counted.items()}

        # The compiled program.
        self.program = hlo.read(runs.compiled.as_text())
        self.analysis = runs.compiled.memory_analysis()
        self.results = runs.compiled.out_info
        state = engine.device_state.get_shapes()
        self.state, self.batch = list_plan_leaves(
            state, runs.compiled, self.program.aliased
        )
        self.leaves = self.state + self.batch
        # Rows may be split over some axes, and their tokens over others.
        self.batch_axes = tuple(
            name
            for name in self.mesh
            if name in strategy.row_axes
            or any(f"'{name}'" in leaf.spec for leaf in self.batch)
        )
        self.num_shards = math.prod(self.mesh[axis] for axis in self.batch_axes)
        self.params = [leaf for leaf in self.state if leaf.group == "parameters"]
        self.in_flight = 0 if memory is None else self._count_bytes_in_flight(memory)

    def memory(self) -> Memory:
        """Returns the memory of a device during a step."""
        held, host = dict.fromkeys(GROUPS.values(), 0), 0
        for leaf in self.leaves:
            if leaf.on_host:
                host += leaf.bytes_per_device
            else:
                held[leaf.group] += leaf.bytes_per_device

        sizes = self.analysis
        arguments, results = sizes.argument_size_in_bytes, sizes.output_size_in_bytes
        overwritten, temporary = sizes.alias_size_in_bytes, sizes.temp_size_in_bytes
        if not sizes.host_argument_size_in_bytes:  # to a CPU it is one memory
            arguments, results = arguments - host, results - host
            overwritten -= sum(
                leaf.bytes_per_device * (leaf.on_host and leaf.overwritten)
                for leaf in self.leaves
            )
        return Memory(
            **{field: held[group] for field, group in GROUPS.items()},
            temporary=temporary,
            arguments=arguments,
            results=results,
            overwritten=overwritten,
            program=sizes.generated_code_size_in_bytes,
            in_flight=self.in_flight,
            peak=arguments + results - overwritten + temporary + self.in_flight,
            host=host,
        )

    def _count_bytes_in_flight(self, memory: int) -> int:
        """Returns the bytes of the batches that wait on a device for their steps.

        These are the batches of the dispatches behind the running one, and those of the
        next dispatch, which are placed ahead of it.
        """
        nbytes = sum(
            leaf.bytes_per_device for leaf in self.batch if leaf.path != "counts"
        )
        launched = num_in_flight(nbytes, memory)
        return nbytes * (min(launched, LONG_IN_FLIGHT) if self.steps > 1 else launched)

    @functools.cached_property
    def traffic(self) -> tuple[Traffic, ...]:
        """The collectives, grouped where they differ by their bytes alone."""
        by_kind: dict[Traffic, list[hlo.Collective]] = {}
        for collective in self.program.collectives:
            if collective.group_size > 1:
                alike = Traffic(
                    collective.kind,
                    collective.axes(self.mesh),
                    collective.group_size,
                    collective.dtype,
                    describe_place(collective),
                    times=collective.times,
                    overlapped=collective.overlapped,
                    hidden=collective.hidden,
                    optional=collective.optional,
                    crosses=any(
                        len({self.hosts[place] for place in group}) > 1
                        for group in collective.groups
                    ),
                )
                by_kind.setdefault(alike, []).append(collective)

        # Bytes of a step, of which a dispatch may have several.
        traffic = []
        for alike, listed in by_kind.items():
            times, steps = alike.times or 1, self.steps
            steps *= self.branch_every if alike.optional else 1
            held = sum(collective.operand_bytes for collective in listed)
            sent = sum(collective.wire_bytes for collective in listed)
            total = alike._replace(
                count=len(listed),
                times=alike.times and math.ceil(alike.times / steps),
                operand_bytes=held * times // steps,
                wire_bytes=sent * times / steps,
            )
            traffic.append(total)
        return tuple(sorted(traffic, key=lambda row: -row.wire_bytes))

    @property
    def not_overwritten(self) -> tuple[str, ...]:
        """Leaves that were donated, but that XLA copies."""
        return tuple(
            f"{leaf.group}: {leaf.path}"
            for leaf in self.state
            if self.donated and leaf.bytes and not leaf.overwritten
        )

    def bounds(self) -> tuple[Bound, ...]:
        """Lower bounds of this layout, beside the values of the program."""
        shards = self.num_shards
        gradients = sum(map(self._count_gathered_bytes, self.params))
        state, batch = (
            sum(item.bytes_per_device for item in leaves if not item.on_host)
            for leaves in (self.state, self.batch)
        )

        metrics = sum(nbytes(leaf) for leaf in jax.tree.leaves(self.results[1]))
        # A program returns a table with a pointer to each result.
        metrics += 8 * len(jax.tree.leaves(self.results))

        memory = self.memory()
        return (
            Bound(
                "bytes sent per device: 2(n-1)/n of every gradient, to sum it"
                " over the devices that share the batch"
                + (f", every {self.branch_every} steps" * (self.branch_every > 1)),
                2 * (shards - 1) / shards * gradients / self.branch_every,
                sum(item.wire_bytes for item in self.traffic),
            ),
            Bound(
                "bytes of arguments: the state and the batch, once",
                state + batch,
                memory.arguments,
            ),
            Bound(
                "bytes of new results: metrics, and a pointer per result",
                metrics if self.donated else metrics + state,
                memory.results - memory.overwritten,
            ),
        )

    def _count_gathered_bytes(self, leaf: PlanLeaf) -> float:
        """Returns the bytes of a leaf after gathering over the axes of the batch."""
        others = [name for name in self.mesh if name not in self.batch_axes]
        parts = [self.mesh[name] for name in others if f"'{name}'" in leaf.spec]
        return leaf.bytes / math.prod(parts)


def estimate_time(profile: Hardware, reading: StepAnalysis) -> Estimate:
    """Estimates the time of a step by a roofline.

    Args:
        profile: what one device can do.
        reading: of the step.
    """
    memory = reading.memory()
    counted = (reading.products or {}).items()
    compute = sum(n / profile.rate(name) for name, n in counted) / len(reading.hosts)
    least = memory.arguments + memory.results + 2 * memory.temporary
    touched = least / profile.memory_bandwidth

    communication = 0.0
    for traffic in reading.traffic:
        near = profile.domain is None or traffic.group_size <= profile.domain
        speed = profile.link_bandwidth if near else profile.far_bandwidth
        if not near and profile.domain:
            # Of a ring over nodes, one device per node sends to the next node; each
            # part of the data crosses once, over as many adapters as a node has.
            speed = min(profile.link_bandwidth, profile.far_bandwidth * profile.domain)
        communication += traffic.wire_bytes / speed

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
        memory.peak <= get_usable_memory(profile),
    )


def describe_place(each: hlo.Collective) -> str:
    """Describes the place of a collective in a step, or of the arrays that it moves.

    It follows from the paths of operations in JAX, such as this in the backward pass
    and two scopes; the library's steps and `jax.named_scope` name more:

        jit(train_all)/shard_map/transpose(jvp(vmap(eqx.nn.MLP)))/eqx.nn.Linear/dot
    """
    own_place = _describe_path(each.path)
    if _join_scopes(each.path):
        return own_place
    moved = [
        _describe_path(path) for operand in each.operands for path in operand.paths
    ]
    places = [place for place in dict.fromkeys(moved) if place]
    if len(places) > _MAX_PLACES:
        places[_MAX_PLACES:] = [f"{len(places) - _MAX_PLACES} more"]
    return ", ".join(places) or own_place or "other arrays"


def _describe_path(path: str) -> str:
    """Returns `"backward: eqx.nn.MLP/eqx.nn.Linear"`; empty without scopes."""
    phase = "forward" if "jvp(" in path else ""
    phase = "backward" if "transpose(" in path else phase
    return ": ".join(filter(None, (phase, _join_scopes(path))))


def _join_scopes(path: str) -> str:
    """Joins the named scopes around an operation, from the outermost in."""
    if ":" in path:
        return ""  # A fusion of several operations has several paths.
    path = re.sub(r"\bp?jit\([^()]*\)", "", path)
    *around, _ = path.split("/")
    names = re.split(r"[/()]+", "/".join(around))
    return "/".join(name for name in names if not _UNNAMED.fullmatch(name))


_GROUPS: Final = {
    "params": "parameters",
    "buffers": "frozen leaves",
    "model_state": "model state",
    "opt_state": "optimizer state",
}


def list_plan_leaves(
    state: Any, compiled: Any, aliased: Collection[int]
) -> tuple[list[PlanLeaf], list[PlanLeaf]]:
    """Lists the leaves of the state, and those of the batch.

    Args:
        state: of shapes.
        compiled: the step.
        aliased: which of the program's inputs it overwrites.
    """
    named = [
        (_GROUPS.get(field, "other"), leaf_path(path) or field, leaf)
        for field, tree in state._asdict().items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    (_, groups), _ = compiled.args_info
    paths = jax.tree_util.tree_leaves_with_path(groups)
    batch = [
        ("batch", leaf_path(path[1:] if len(groups) == 1 else path), leaf)
        for path, leaf in paths
    ]

    # JAX does not report the split of a leaf that no output depends on. It is assumed
    # to be split as other leaves.
    (_, split), _ = compiled.input_shardings
    usual = [*jax.tree.leaves(split), named[0][2].sharding][0]
    of_batch = [
        sharding or (split[0].counts if path[1].name == "whole" else usual)
        for sharding, (path, _) in zip(
            jax.tree.structure(groups).flatten_up_to(split), paths, strict=True
        )
    ]

    overwritten = find_donated(compiled, aliased)
    of_state = [
        _make_leaf(*entry, entry[2].sharding, place in overwritten)
        for place, entry in enumerate(named)
    ]
    return of_state, [
        _make_leaf(*entry, sharding, place in overwritten)
        for place, (entry, sharding) in enumerate(
            zip(batch, of_batch, strict=True), len(named)
        )
    ]


def _make_leaf(
    group: str, path: str, leaf: Any, sharding: Any, overwritten: bool
) -> PlanLeaf:
    shard = tuple(sharding.shard_shape(leaf.shape))
    spec = getattr(sharding, "spec", ())
    split = any(part is not None and part != () for part in spec)
    parts = math.prod(
        math.ceil(whole / part) if part else 1
        for whole, part in zip(leaf.shape, shard, strict=True)
    )
    return PlanLeaf(
        group,
        path,
        tuple(leaf.shape),
        str(leaf.dtype),
        str(tuple(spec)) if split else "replicated",
        parts,
        shard,
        nbytes(leaf),
        nbytes(leaf, shard),
        overwritten,
        sharding.memory_kind == HOST,
    )


def list_notes(
    reading: StepAnalysis, platform: str, are_here: bool, profile: Hardware | None
) -> dict[str, list[str]]:
    """Lists the parts of a plan that are exact, indicative and not known."""
    batch = [leaf for leaf in reading.batch if leaf.path != "counts"]
    shapes = ", ".join(map(_format_batch_leaf, batch[:4]))
    exact = [
        "bytes of every leaf per device; arguments, results, temporary memory and peak,"
        " as this compiler laid them out; which inputs are overwritten; every"
        " collective of the compiled program; matrix operations as traced"
    ]
    indicative = [
        f"this is the step for the shape of the first batch, {shapes}; other"
        " shapes have programs of their own"
    ]
    unknown = ["memory of the program itself, of collectives' libraries and of JAX"]

    # What the compiler of other devices can't tell.
    if platform == "cpu" and not are_here:
        indicative.append(
            "temporary memory and collectives come from XLA's CPU compiler. GPU"
            " and TPU compilers fuse more, and turn an all-reduce of which a part"
            " is used into a reduce-scatter, which the CPU compiler never does:"
            " plan with `topology`"
        )
    if any(leaf.on_host for leaf in reading.leaves):
        unknown.append("the time to move optimizer state between host and device")
    if reading.products is None:
        unknown.append("operations: this strategy hides the traced step")
    if any(traffic.times is None for traffic in reading.traffic):
        unknown.append("how often some loops run: collectives in them count once")

    # The values from the hardware profile.
    if profile is None:
        unknown.append("time: pass the hardware, such as hardware='h100'")
        return {"exact": exact, "indicative": indicative, "unknown": unknown}
    indicative.append(
        f"seconds, from the peaks of {profile.name} and ring algorithms at full"
        " bandwidth: real steps reach 30 to 60 % of peaks"
    )
    usable = get_usable_memory(profile)
    if usable < profile.memory:
        exact.append(
            f"memory of {profile.name}: {format_bytes(usable)} of its"
            f" {format_bytes(profile.memory)}, the share that JAX takes of a GPU;"
            " set XLA_CLIENT_MEM_FRACTION to more, such as .9, before it starts"
        )
    return {"exact": exact, "indicative": indicative, "unknown": unknown}


def _format_batch_leaf(leaf: PlanLeaf) -> str:
    """Formats a leaf of the batch, with its shard if more than rows are split."""
    shape = f"{leaf.path} {leaf.shape[1:]}"
    if leaf.shape[2:] != leaf.shard[2:]:
        shape += f" (each device has {leaf.shard[1:]})"
    return shape
