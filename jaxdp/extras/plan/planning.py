"""Plans of a trainer's step: of one that would run, and of the one that runs."""

import contextlib
import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax

from ...basics.arguments import check_count
from ...basics.tracebacks import TracebackFilter
from ...data import NO_LOADER, count_rows, open_loader
from ...engine import Engine
from ...fit import TrainerConfig
from ...strategies import DataParallel
from .plan import Plan
from .planner import Planner, plan_running
from .remedies import find_remedies

if TYPE_CHECKING:
    from jaxdp import Trainer


@jax.disable_jit(False)
def plan_step(
    trainer: "Trainer",
    loader: Iterable[Any] | None,
    devices: int | None,
    topology: str | None,
    hardware: Any,
    hosts: int | None,
) -> Plan:
    """`Trainer.plan`: the step compiled on shapes, maybe for devices elsewhere."""
    for name, count in (("devices", devices), ("hosts", hosts)):
        if count is not None:
            check_count(name, count)
            if topology is not None:
                raise ValueError(
                    f"`{name}`={count} and `topology`={topology!r} were both given; a"
                    f" topology has its own {name}."
                )

    run, config = trainer.run, trainer.run.config
    source = open_loader(
        NO_LOADER if loader is None else loader,
        "loader",
        config.seed,
    )
    with contextlib.closing(source):
        batch = source.peek_batch()
    run.renew_hooks(trainer.callbacks)
    options = run.hooks.step_options()
    known = run.engine.step_functions.objective if run.has_engine else None
    objective = known or config.make_objective(batch)

    def compile_plan(config: TrainerConfig, rows: int | None) -> Plan:
        def engine_on(strategy: DataParallel) -> Engine:
            planned = config.replace(strategy=strategy)
            engine = planned.make_engine(run.hooks, abstract=True)
            engine.replace_step_functions(objective=objective)
            engine.set_options(options)
            return engine

        window = [batch] * config.accumulate_grad_batches
        planner = Planner(engine_on, config.strategy, window, topology, hardware)
        if hosts is not None:
            planner.set_hosts(devices, hosts)
        return planner.plan(devices, rows)

    with TracebackFilter():
        rows = None
        if config.data == "local" and run.processes.count > 1:
            rows = count_rows(batch) * run.processes.count  # each has other ones
        plan = compile_plan(config, rows)
        if plan.fits is False:
            remedies = find_remedies(config, rows or count_rows(batch), compile_plan)
            plan = dataclasses.replace(plan, remedies=remedies)
        return plan


def plan_running_step(trainer: "Trainer") -> Plan | None:
    """`Trainer.running_plan`, read from the compiled step."""
    return plan_running(trainer.run.engine) if trainer.run.has_engine else None
