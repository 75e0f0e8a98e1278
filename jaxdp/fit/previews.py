"""What a trainer opens of the extras: plans, comparisons, summaries and pages."""

import contextlib
import importlib
import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax

from ..basics.arguments import check_count, check_is_local
from ..basics.tracebacks import UsersFramesFirst
from ..basics.tree import leaf_path
from ..callbacks import CSVLogger
from ..callbacks.run_facts import plain, run_facts
from ..data import NO_LOADER, open_loader, rows_of, shown
from ..engine import Engine
from ..strategies import DataParallel, SingleDevice
from . import checks
from .feed import windows
from .views import compiled_train_step, shapes_of

if TYPE_CHECKING:
    import jaxdp.comparison
    import jaxdp.plan
    import jaxdp.reports
    from jaxdp import Trainer


def _extra(name: str) -> Any:
    """A room above the Trainer, imported when it is first asked for."""
    return importlib.import_module(f"jaxdp.{name}")


@jax.disable_jit(False)
def plan(
    trainer: "Trainer",
    loader: Iterable[Any] | None,
    devices: int | None,
    topology: str | None,
    hardware: Any,
    hosts: int | None,
) -> "jaxdp.plan.Plan":
    """`Trainer.plan`: the step compiled on shapes, maybe for devices elsewhere."""
    if devices is not None:
        check_count("devices", devices)
        if topology is not None:
            raise ValueError(
                f"`devices`={devices} and `topology`={topology!r} were both given;"
                " a topology has its number of devices in its name."
            )
    if hosts is not None and topology is not None:
        raise ValueError(
            f"`hosts`={hosts} and `topology`={topology!r} were both given; a"
            " topology has its own hosts."
        )

    run, recipe = trainer.run, trainer.run.recipe
    source = open_loader(
        NO_LOADER if loader is None else loader,
        "loader",
        recipe.seed,
        devices=jax.local_devices,
    )
    with contextlib.closing(source):
        batch = source.peek()
    run.renew_hooks(trainer.callbacks)
    options = run.hooks.step_options()
    known = run.engine.pure.objective if run.has_engine else None
    objective = known or recipe.objective_for(batch)

    def engine_on(strategy: DataParallel) -> Engine:
        engine = recipe.new_engine(strategy, run.hooks, abstract=True)
        engine.set(objective=objective)
        engine.set_options(options)
        return engine

    with UsersFramesFirst():
        window = [batch] * recipe.accumulate_grad_batches
        planner = _extra("plan").Planner(
            engine_on, recipe.strategy, window, topology, hardware
        )
        if hosts is not None:
            check_count("hosts", hosts)
            planner.spread(devices, hosts)

        rows = None
        if recipe.data == "local" and run.processes.count > 1:
            rows = rows_of(batch) * run.processes.count  # each has other ones
        return planner.plan(devices, rows)


@jax.disable_jit(False)
def compare(
    trainer: "Trainer",
    loader: Iterable[Any],
    strategies: tuple[DataParallel, ...],
    steps: int,
) -> "jaxdp.comparison.Comparison":
    """`Trainer.compare`: the same steps from the present state, under each strategy."""
    comparison, run, recipe = _extra("comparison"), trainer.run, trainer.run.recipe
    check_count("steps", steps)
    if run.processes.count > 1:
        raise RuntimeError(
            f"`compare` was called in a job of {run.processes.count} processes; it"
            " compares strategies on the devices of one. Call it in a program that"
            " runs alone, with as many faked devices if need be."
        )
    for strategy in strategies:
        checks.check_strategy_argument(strategy)

    with UsersFramesFirst():
        source = run.open(loader, "loader", "train")
        with contextlib.closing(source):
            batches = map(shown, source.epoch())
            all_windows = windows(batches, recipe.accumulate_grad_batches)
            first = list(itertools.islice(all_windows, steps))
        if not first:
            raise ValueError(source.gave_nothing())

        recipe.decide_loss(run.engine, first[0][0])
        engine_here = run.settled_engine("`compare`")
        start = engine_here.strategy.gather(engine_here.state)

        def trace(strategy: DataParallel) -> "jaxdp.comparison.Trace":
            engine = recipe.new_engine(strategy, run.hooks)
            engine.pure = engine_here.pure._replace(inside=())
            engine.state = engine.place(start)
            return comparison.trace(engine, strategy, first)

        traces = [trace(other) for other in strategies or (SingleDevice(),)]
        return comparison.compare(trace(recipe.strategy), traces)


def running_plan(trainer: "Trainer") -> "jaxdp.plan.Plan | None":
    """`Trainer.running_plan`, made once for each compiled step."""
    run = trainer.run
    compiled = compiled_train_step(run)
    if compiled is None:
        return None
    record = trainer.record
    if record.planned is None or record.planned[0] is not compiled:
        record.planned = compiled, _extra("plan").of_running(run.engine)
    return record.planned[1]


def in_a_line(trainer: "Trainer") -> str:
    """What `repr` says of a trainer."""
    recipe = trainer.run.recipe
    count = sum(leaf.size for leaf in jax.tree.leaves(recipe.parts[:2]))
    return (
        f"Trainer({plain(recipe.model)}, {count:,} parameters, {recipe.strategy!r},"
        f" step {trainer.global_step}, epoch {trainer.current_epoch})"
    )


@jax.disable_jit(False)
def summary(trainer: "Trainer") -> "jaxdp.reports.Summary":
    """`Trainer.summary`, of shapes alone: nothing is placed, and nothing waited for."""
    recipe = trainer.run.recipe
    state = shapes_of(trainer.run)
    shapes = _by_path(state[:2])
    by = [(part.name, eqx.filter(state[0], part.mask)) for part in recipe.several]
    trained = {
        path: name
        for name, leaves in by or [("", state[0])]
        for path in _by_path([leaves])
    }
    layouts = [getattr(leaf, "sharding", None) for leaf in shapes.values()]
    return _extra("reports").summarize(
        recipe.model,
        shapes,
        trained,
        model_state=state[2],
        members=recipe.ensemble and recipe.ensemble.size,
        strategy=recipe.strategy,
        devices=max(len(layout.device_set) if layout else 1 for layout in layouts),
    )


def _by_path(trees: Any) -> dict[str, Any]:
    return {
        leaf_path(path): leaf
        for tree in trees
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def report(trainer: "Trainer", path: str | os.PathLike[str], plan: Any) -> str:
    """Writes the page from the table of a `CSVLogger`, if there is one, else from the
    history."""
    check_is_local("path", path)
    reports = _extra("reports")
    record: dict[str, Any] = dict(run_facts(trainer, None))
    tables = [c.path for c in trainer.callbacks if isinstance(c, CSVLogger)]
    tables = [table for table in tables if table is not None and table.exists()]
    file = Path(path).expanduser()
    if file.is_dir() or not file.suffix:
        file = file / "report.html"
    if tables:
        run = reports.read_run(tables[0])
        run.record.update({**record, **run.record})
        run = run._replace(name=str(tables[0].parent))
    else:
        run = reports.run_of_history(
            str(trainer.default_root_dir), trainer.history, record
        )
    return str(reports.write_report(run, file, plan or trainer.running_plan()))
