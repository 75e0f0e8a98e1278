"""The steps that the compilers for GPUs and TPUs make, beside those of steps by hand.

    pip install '.[plan]'
    python -m benchmarks.compiled                       # no GPU or TPU is needed
    python -m benchmarks.compiled --only MLP,GPT --topologies h100x8

For each model and strategy, compares the step of a `Trainer` with a step written by
hand. The second has the same layout, is written for `jax.jit`, and is compiled for the
same devices. The counts come from the compiled programs; a loop counts as often as it
runs. Counts kernels (fusions, library calls and all other computations), copies,
collectives, and the collectives that matrix products hide. Also shows the peak memory.
Prints Markdown tables.
"""

import argparse
import collections
import functools
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp import FSDP, Pmap, Sharded, SingleDevice, Trainer, ZeRO
from jaxdp.extras.plan import hlo
from jaxdp.extras.plan.hlo_text import HloModule
from jaxdp.extras.plan.planner import make_topology_devices
from jaxdp.strategies import DataParallel

from .models import LeNet, Residual

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT  # noqa: E402

ROWS = 64
OPTIMIZER = optax.adamw(1e-3)
FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "add-dependency"),
}
"""Opcodes that launch nothing."""


class Recurrent(eqx.Module):
    """A GRU over 64 steps, and a linear layer on its last state."""

    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(256, 512, key=keys[0])
        self.head = eqx.nn.Linear(512, 16, key=keys[1])

    def __call__(self, x: jax.Array) -> jax.Array:
        def step(state: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
            return self.cell(row, state), None

        state, _ = jax.lax.scan(step, jnp.zeros(512), x)
        return self.head(state)


class Case(NamedTuple):
    """A model, as shapes, and the shapes of a row of its batch and of its target."""

    make: Callable[[jax.Array], Any]
    x: tuple[int, ...]
    y: tuple[int, ...] = ()
    classes: int = 16
    letters: bool = False

    def model(self) -> Any:
        return eqx.filter_eval_shape(self.make, jax.random.key(0))

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        dtype = np.int32 if self.letters else np.float32
        return np.zeros((ROWS, *self.x), dtype), np.zeros((ROWS, *self.y), np.int32)


GPT_SIZES = [256, 512, 6, 8]
CASES = {
    "MLP": Case(lambda key: eqx.nn.MLP(512, 16, 2048, 4, key=key), (512,)),
    "LeNet": Case(LeNet, (1, 28, 28), classes=10),
    "50 residual layers": Case(lambda key: Residual(256, 50, key), (256,), classes=256),
    "GRU": Case(Recurrent, (64, 256)),
    "GPT": Case(lambda key: GPT(64, GPT_SIZES, key), (256,), (256,), 64, letters=True),
}


class Layout(NamedTuple):
    """A strategy, further arguments of the trainer, and the equivalent step by hand."""

    kind: type[DataParallel]
    by_hand: Callable[[Case, list[Any]], Any]
    options: Mapping[str, Any] = {}
    stacked: bool = False
    """Whether it is for a model in a `Stack`, whose blocks are recomputed."""


class Count(NamedTuple):
    """The operations that a device launches in a step, and its memory."""

    kernels: int
    copies: int
    collectives: int
    hidden: int
    peak: int


# --- steps by hand ------------------------------------------------------------------


def loss_of(model: Any, x: Any, y: Any) -> Any:
    logits = jax.vmap(model)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def update(params: Any, opt_state: Any, grads: Any) -> Any:
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return eqx.apply_updates(params, updates), opt_state


def parts(case: Case) -> tuple[Any, Any, Any]:
    """Returns trained arrays and optimizer state as shapes, and the rest of the
    model.
    """
    model = case.model()
    is_trained = jax.tree.map(
        lambda leaf: (
            isinstance(leaf, jax.ShapeDtypeStruct)
            and jnp.issubdtype(leaf.dtype, jnp.inexact)
        ),
        model,
    )
    params, static = eqx.partition(model, is_trained)
    return params, jax.eval_shape(OPTIMIZER.init, params), static


def compiled(step: Any, mesh: Mesh | None, arguments: Any, specs: Any) -> Any:
    """Compiles `step(params, opt_state, x, y)`, which overwrites its first two
    arguments.
    """

    def shaped(leaf: Any, spec: Any) -> Any:
        sharding = spec if mesh is None else NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def with_spec(tree: Any, spec: Any) -> Any:
        is_one = isinstance(spec, P) or mesh is None
        specs = jax.tree.map(lambda _: spec, tree) if is_one else spec
        return jax.tree.map(shaped, tree, specs)

    given = [with_spec(*pair) for pair in zip(arguments, specs, strict=True)]
    results = jax.tree.map(lambda leaf: leaf.sharding, (given[0], given[1]))
    whole = specs[0] if mesh is None else NamedSharding(mesh, P())
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*results, whole))
    return jitted.lower(*given).compile()


def on_one_device(case: Case, devices: list[Any]) -> Any:
    params, opt_state, static = parts(case)

    def step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            return loss_of(eqx.combine(params, static), x, y)

        value, grads = jax.value_and_grad(loss)(params)
        return *update(params, opt_state, grads), value

    here = jax.sharding.SingleDeviceSharding(devices[0])
    return compiled(step, None, (params, opt_state, *case.batch()), [here] * 4)


def mesh_of(devices: list[Any]) -> Mesh:
    return Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))


def split(leaf: Any, start: int = 0) -> P:
    """Splits a leaf along the first axis from `start` that eight devices divide."""
    for axis in range(start, leaf.ndim):
        if leaf.shape[axis] and leaf.shape[axis] % 8 == 0:
            return P(*[None] * axis, "data")
    return P()


def follow(opt_state: Any, specs: Any) -> Any:
    """Returns the specs of the optimizer's state: copies of a parameter are split like
    it.
    """
    return optax.tree_map_params(
        OPTIMIZER,
        lambda _, spec: spec,
        opt_state,
        specs,
        transform_non_params=lambda _: P(),
    )


def by_sharding(
    case: Case, devices: list[Any], *, params_split: bool, state_split: bool
) -> Any:
    """Compiles with `jax.jit` over placed arrays; XLA inserts the collectives.

    Split parameters are gathered before use. Otherwise XLA may split the layers
    instead, which is another layout.
    """
    params, opt_state, static = parts(case)
    mesh = mesh_of(devices)
    apart = jax.tree.map(split, params)
    whole = jax.tree.map(lambda _: P(), params)
    held, updated = apart if params_split else whole, apart if state_split else whole

    def laid_out(tree: Any, specs: Any) -> Any:
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        return jax.lax.with_sharding_constraint(tree, shardings)

    def step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            return loss_of(eqx.combine(params, static), x, y)

        value, grads = jax.value_and_grad(loss)(laid_out(params, whole))
        return *update(params, opt_state, laid_out(grads, updated)), value

    specs = held, follow(opt_state, updated), P("data"), P("data")
    return compiled(step, mesh, (params, opt_state, *case.batch()), specs)


def by_device(case: Case, devices: list[Any]) -> Any:
    """Computes gradients of local rows, then a `pmean`, as in `jax.pmap`."""
    params, opt_state, static = parts(case)
    mesh = mesh_of(devices)

    def step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            return loss_of(eqx.combine(params, static), x, y)

        found = jax.lax.pmean(jax.value_and_grad(loss)(params), "data")
        return *update(params, opt_state, found[1]), found[0]

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(), P(), P("data"), P("data")),
        out_specs=P(),
        check_vma=False,
    )
    specs = P(), P(), P("data"), P("data")
    return compiled(mapped, mesh, (params, opt_state, *case.batch()), specs)


def block_by_block(case: Case, devices: list[Any]) -> Any:
    """Splits all parameters. The loop over blocks gathers them, and again in its
    backward pass, which recomputes them. Other parameters are gathered before the step.
    """
    params, opt_state, static = parts(case)
    mesh = mesh_of(devices)
    specs = jax.tree.map(split, params)
    in_stack = jax.tree.map(lambda leaf: split(leaf, 1), params.blocks)
    specs = eqx.tree_at(lambda tree: tree.blocks, specs, in_stack)

    def gathered(leaf: Any, spec: P) -> Any:
        if "data" not in spec:
            return leaf
        return jax.lax.all_gather(leaf, "data", axis=spec.index("data"), tiled=True)

    def loss(params: Any, x: Any, y: Any) -> Any:
        model = eqx.combine(params, static)
        arrays, rest = eqx.partition(model.blocks.stacked, eqx.is_array)
        inside = jax.tree.map(lambda spec: P(*spec[1:]), in_stack.stacked)

        @jax.checkpoint
        def apply(x: Any, shards: Any) -> tuple[Any, None]:
            whole = jax.tree.map(gathered, shards, inside)
            return jax.vmap(eqx.combine(whole, rest))(x), None

        x = jax.vmap(jax.vmap(model.letters))(x) + model.places
        x, _ = jax.lax.scan(apply, x, arrays)
        logits = jax.vmap(jax.vmap(lambda each: model.head(model.norm(each))))(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean() / 8

    def gradients(params: Any, x: Any, y: Any) -> Any:
        own = eqx.tree_at(lambda tree: tree.blocks, params, None)
        own_specs = eqx.tree_at(lambda tree: tree.blocks, specs, None)

        def whole_loss(own: Any, blocks: Any) -> Any:
            whole = jax.tree.map(gathered, own, own_specs)
            is_none = lambda leaf: leaf is None  # noqa: E731
            model = eqx.tree_at(lambda m: m.blocks, whole, blocks, is_leaf=is_none)
            return loss(model, x, y)

        found, (own, blocks) = jax.value_and_grad(whole_loss, (0, 1))(
            own, params.blocks
        )
        grads = eqx.tree_at(
            lambda tree: tree.blocks, own, blocks, is_leaf=lambda leaf: leaf is None
        )
        # The transposes of the gathers sum the gradients of shards.
        grads = jax.tree.map(
            lambda leaf, spec: leaf if "data" in spec else jax.lax.psum(leaf, "data"),
            grads,
            specs,
        )
        return jax.lax.psum(found, "data"), grads

    apart = jax.shard_map(
        gradients,
        mesh=mesh,
        in_specs=(specs, P("data"), P("data")),
        out_specs=(P(), specs),
        check_vma=False,
    )

    def step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        value, grads = apart(params, x, y)
        return *update(params, opt_state, grads), value

    all_specs = specs, follow(opt_state, specs), P("data"), P("data")
    return compiled(step, mesh, (params, opt_state, *case.batch()), all_specs)


LAYOUTS = {
    "SingleDevice()": Layout(SingleDevice, on_one_device),
    "Sharded()": Layout(
        Sharded,
        functools.partial(by_sharding, params_split=False, state_split=False),
    ),
    "Pmap()": Layout(Pmap, by_device),
    "ZeRO()": Layout(
        ZeRO, functools.partial(by_sharding, params_split=False, state_split=True)
    ),
    'FSDP(gather="once")': Layout(
        FSDP,
        functools.partial(by_sharding, params_split=True, state_split=True),
        {"gather": "once"},
    ),
    'FSDP(), remat="blocks.stacked"': Layout(FSDP, block_by_block, stacked=True),
}


# --- steps of a trainer -------------------------------------------------------------


def of_trainer(case: Case, layout: Layout, name: str) -> Any:
    """Returns the step that a trainer would compile for a topology."""
    programs = []

    class Keeping(layout.kind):
        """The same strategy, which keeps its programs."""

        def compile(self, step: Any, arguments: Any, *others: Any, **how: Any) -> Any:
            jitted = super().compile(step, arguments, *others, **how)
            programs.append(jitted.trace(*arguments).lower().compile())
            return jitted

    trainer = Trainer(
        case.model(),
        OPTIMIZER,
        loss="cross_entropy",
        strategy=Keeping(**layout.options),
        remat="blocks.stacked" if layout.stacked else False,
        enable_progress_bar=False,
    )
    trainer.plan([case.batch()], topology=name)
    return programs[-1]


# --- counting -----------------------------------------------------------------------


def launched(module: HloModule, computation: str, times: int = 1) -> Iterator[tuple]:
    """Counts the operations that a computation launches, by opcode."""
    for each in module[computation].values():
        code = each.opcode
        if code in FREE or code.endswith(("-done", "-update")):
            continue
        if code == "while":
            turns = hlo.count_iterations(module, computation, each) or 1
            yield from launched(module, each.body, times * turns)
        elif code in ("call", "conditional", "async-start"):
            for called in each.called:
                yield from launched(module, called, times)
        else:
            yield code.removesuffix("-start"), times


def count(program: Any) -> Count:
    text = program.as_text()
    module = HloModule(text)
    by_code = collections.Counter()
    for code, times in launched(module, module.entry):
        by_code[code] += times
    collectives = [each for each in hlo.read(text).collectives if each.group_size > 1]
    kinds = {*hlo.KINDS, "copy"}
    memory = program.memory_analysis()
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    return Count(
        sum(times for code, times in by_code.items() if code not in kinds),
        by_code["copy"],
        sum(each.times or 1 for each in collectives),
        sum((each.times or 1) * each.hidden for each in collectives),
        peak,
    )


def cells(ours: Count, theirs: Count) -> Iterator[str]:
    yield f"{ours.kernels} / {theirs.kernels} = {ours.kernels / theirs.kernels:.2f}"
    yield f"{ours.copies} / {theirs.copies}"
    yield f"{ours.collectives} / {theirs.collectives}"
    yield f"{ours.hidden} / {theirs.hidden}"
    mega = f"{ours.peak / 1e6:.1f} / {theirs.peak / 1e6:.1f}"
    yield f"{mega} = {ours.peak / theirs.peak:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--topologies", default="h100x8,v5e-8")
    parser.add_argument("--only", default=",".join(CASES), help="models, by comma")
    parser.add_argument("--layouts", default="", help="parts of strategies' names")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

    for name in args.topologies.split(","):
        kind = re.sub(r"[0-9]+$", "", name)
        print(f"\n{name}, jax {jax.__version__}; ours / by hand\n")
        print(
            "| model | strategy | kernels | copies | collectives | hidden | peak, MB |"
        )
        print("|---|---|---|---|---|---|---|", flush=True)
        for model in args.only.split(","):
            case = CASES[model]
            for title, layout in LAYOUTS.items():
                wanted = any(part in title for part in args.layouts.split(","))
                if not wanted or layout.stacked and model != "GPT":
                    continue
                begun = time.perf_counter()
                here = f"{kind}1" if layout.kind is SingleDevice else name
                ours = count(of_trainer(case, layout, here))
                devices = list(make_topology_devices(here).devices)
                theirs = count(layout.by_hand(case, devices))
                row = " | ".join(cells(ours, theirs))
                print(f"| {model} | `{title}` | {row} |", flush=True)
                took = time.perf_counter() - begun
                print(f"{model}, {title}: {took:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
