"""Before a fit: what a step would cost, and whether other strategies give the same."""

import contextlib
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax

from ..basics.arguments import check_count
from ..basics.tracebacks import UsersFramesFirst
from ..data import NO_LOADER, open_loader, rows_of, shown, windows
from ..engine import Engine
from ..strategies import DataParallel, SingleDevice
from . import checks

if TYPE_CHECKING:
    from jaxdp import Trainer

    from ..comparison import Comparison
    from ..plan import Plan


@jax.disable_jit(False)
def plan(
    trainer: "Trainer",
    loader: Iterable[Any] | None,
    devices: int | None,
    topology: str | None,
    hardware: Any,
    hosts: int | None,
) -> "Plan":
    """`Trainer.plan`: the step compiled on shapes, maybe for devices elsewhere."""
    from ..plan import Planner

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

    run = trainer.run
    source = open_loader(NO_LOADER if loader is None else loader, "loader", run.seed)
    with contextlib.closing(source):
        batch = shown(source.peek())
    run.renew_hooks(trainer.callbacks)
    options, objective = run.hooks.step_options(), run.objective_for(batch)

    def engine_on(strategy: DataParallel) -> Engine:
        engine = run.new_engine(strategy, abstract=True)
        engine.programs.set(objective=objective)
        engine.set_options(options)
        return engine

    with UsersFramesFirst():
        window = [batch] * run.accumulate_grad_batches
        strategy = run.as_asked(run.strategy)
        planner = Planner(engine_on, strategy, window, topology, hardware)
        if hosts is not None:
            check_count("hosts", hosts)
            planner.spread(devices, hosts)

        rows = None
        if run.data == "local" and run.processes.count > 1:
            rows = rows_of(batch) * run.processes.count  # each has other ones
        return planner.plan(devices, rows)


@jax.disable_jit(False)
def compare(
    trainer: "Trainer",
    loader: Iterable[Any],
    strategies: tuple[DataParallel, ...],
    steps: int,
) -> "Comparison":
    """`Trainer.compare`: the same steps from the present state, under each strategy."""
    from .. import comparison

    run = trainer.run
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
            each = windows(batches, run.accumulate_grad_batches)
            found = list(itertools.islice(each, steps))
        if not found:
            raise ValueError(source.gave_nothing())

        run.engine_for(found[0][0])
        own = run.settled_engine("`compare`")
        start = own.strategy.gather(own.state)

        def trace(strategy: DataParallel) -> comparison.Trace:
            engine = run.new_engine(run.as_asked(strategy))
            engine.programs.steps = own.programs.steps._replace(inside=())
            engine.state = engine.strategy.place(start)
            return comparison.trace(engine, strategy, found)

        traces = [trace(each) for each in strategies or (SingleDevice(),)]
        return comparison.compare(trace(run.strategy), traces)
