"""What a trainer says of arguments that belong elsewhere, hands out (the model, its
shapes, hyperparameters), and opens of the extras: plans, comparisons, pages."""

import contextlib
import importlib
import inspect
import itertools
import os
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import equinox as eqx
import jax

from ..basics.arguments import check_count, check_is_local
from ..basics.tracebacks import UsersFramesFirst
from ..basics.tree import leaf_path
from ..callbacks import CSVLogger
from ..callbacks.run_facts import plain, run_facts
from ..data import NO_LOADER, open_loader, own_of, rows_of
from ..engine import Engine
from ..engine.state import hyperparam_values, leaves_to_set
from ..step import InferenceModel
from ..strategies import DataParallel, SingleDevice
from . import checks
from .feed import windows

if TYPE_CHECKING:
    import jaxdp.comparison
    import jaxdp.plan
    import jaxdp.reports
    from jaxdp import Trainer

    from .run import Run


_BATCHES: Final = "the loader makes batches, as jaxdp.Arrays(x, y, batch_size=32) does"
_DEVICES: Final = "strategy=Sharded(2) takes two devices, SingleDevice() one"
_WEIGHTS: Final = "batches may be (x, y, weight), with a weight for each row"
_NOT_NEEDED: Final = "leave it out"

OTHERS: Final = {
    "__init__": {
        # Lightning's.
        "accelerator": "JAX takes what it finds; JAX_PLATFORMS=cpu hides the others",
        "devices": _DEVICES,
        "gpus": _DEVICES,
        "num_nodes": "a launcher starts processes, distributed.initialize() joins them",
        "logger": "loggers are callbacks: callbacks=[CSVLogger('runs/first')]",
        "enable_checkpointing": "callbacks=[ModelCheckpoint('runs/first')] saves",
        "enable_model_summary": "print(trainer.summary()) shows the layers",
        "num_sanity_val_steps": "fit(..., fast_dev_run=True) tries a batch of each",
        "limit_test_batches": "test(loader, limit_batches=...) has it",
        "limit_predict_batches": "predict(loader, limit_batches=...) has it",
        "deterministic": "see `reproducible`",
        "benchmark": _NOT_NEEDED,
        "inference_mode": f"{_NOT_NEEDED}: passes without training always use it",
        "use_distributed_sampler": "data='global' shares rows out, data='local' not",
        "profiler": "callbacks=[Profiler()] profiles",
        "detect_anomaly": "callbacks=[NanGuard()] looks for NaN",
        "sync_batchnorm": f"{_NOT_NEEDED}: BatchNorm sees the whole batch",
        "plugins": "see `strategy` and `precision`",
        "gradient_clip_algorithm": "optax.chain(optax.clip(1.0), ...) clips by value",
        "reload_dataloaders_every_n_epochs": "a loader is iterated anew in every epoch",
        "resume_from_checkpoint": "fit(..., ckpt_path='last') resumes",
        "auto_lr_find": "jaxdp.finders.lr_find(trainer, loader) does it",
    },
    "fit": {
        # Lightning's.
        "train_dataloaders": "it is called `train_loader`",
        "val_dataloaders": "it is called `val_loader`",
        "datamodule": "pass its loaders as `train_loader` and `val_loader`",
        # Keras's.
        "x": _BATCHES,
        "y": _BATCHES,
        "batch_size": _BATCHES,
        "shuffle": _BATCHES,
        "epochs": "it is called `max_epochs`, and includes those of earlier fits",
        "initial_epoch": "`ckpt_path` resumes where a run had stopped",
        "validation_data": "it is called `val_loader`",
        "validation_split": "split the rows before, and pass the rest as `val_loader`",
        "validation_freq": "it is called `check_val_every_n_epoch`",
        "steps_per_epoch": "it is called `limit_train_batches`",
        "validation_steps": "it is called `limit_val_batches`",
        "validation_batch_size": _BATCHES,
        "class_weight": _WEIGHTS,
        "sample_weight": _WEIGHTS,
        "verbose": "Trainer(enable_progress_bar=False) shows no bar",
    },
}
"""What to write instead of arguments of Lightning's and Keras's, by method."""

_LIVE: Final = "callbacks", "log_every_n_steps", "default_root_dir"
"""Arguments of a trainer that are looked at anew by every fit."""


def refuse(cls: type, method: str, given: Iterable[str]) -> None:
    """Raises for arguments that `__init__` or `fit` of `cls` does not have, saying
    where those belong that the other of the two has, or that `OTHERS` knows."""
    here, there, other = "Trainer", "fit", "fit"
    if method == "fit":
        here, there, other = "fit", "Trainer", "__init__"
    for name in given:
        if name in inspect.signature(getattr(cls, other)).parameters:
            where = f"it belongs to `{there}`: {there}(..., {name}=...)"
        elif name in OTHERS[method]:
            where = OTHERS[method][name]
        elif name in OTHERS[other]:  # Trainer(epochs=3)
            where = f"nor of `{there}`; {OTHERS[other][name]}"
        else:  # as Python says it
            called = f"{cls.__name__}.{method}()"
            raise TypeError(f"{called} got an unexpected keyword argument {name!r}")
        raise TypeError(f"`{name}` is no argument of `{here}`: {where}.")


def check_may_be_set(arguments: Container[str], name: str) -> None:
    """Raises for an argument of the trainer that nothing would look at again."""
    if name in arguments and name not in _LIVE:
        raise AttributeError(
            f"`trainer.{name}` can't be set: it is an argument of `Trainer`, and"
            " steps are made of it. For another value make another Trainer, which"
            " may `load` what this one saves."
        )


def whole_model(run: "Run", wanted: str) -> tuple[Any, Any]:
    """The model as trained so far, and its `eqx.nn.State`: live copies."""
    if not run.has_engine:
        return run.recipe.model, run.recipe.model_state
    engine = run.settled_engine(wanted)
    with run.access.apart():
        return engine.held.gather()


def inference_model(run: "Run", member: int | None) -> InferenceModel:
    """`Trainer.inference_model`."""
    check_callable(run, "inference_model")
    model_and_state = whole_model(run, "`inference_model`")
    if member is not None:
        return InferenceModel(*member_of(run, model_and_state, member))
    is_ensemble = run.recipe.ensemble is not None
    return InferenceModel(*model_and_state, is_ensemble=is_ensemble)


def check_callable(run: "Run", method: str) -> None:
    """Raises if the model can't be called on one example, as `method` does."""
    model = run.recipe.model
    if not callable(model):
        name, part = type(model).__name__, ".generator"
        if isinstance(model, dict | list | tuple):
            part = "['generator']" if isinstance(model, dict) else "[0]"
        raise TypeError(
            f"`{method}` calls the model on one example, and {name} has no"
            " __call__. Call a part of `trainer.model`, as in"
            f" jax.vmap(trainer.model{part})(x); or give a class of yours one."
        )


def member_of(run: "Run", model: Any, index: int) -> Any:
    """One model of those that `model` holds."""
    if run.recipe.ensemble is None:
        raise ValueError("`member` needs a Trainer with `ensemble`; use `model`.")
    return run.recipe.ensemble.member_of(model, index)


def shapes_of(run: "Run") -> tuple[Any, Any, Any]:
    """Trained leaves, other arrays and the model's state, as shapes.

    With their shardings, before they are placed too, where the strategy tells.
    """
    recipe = run.recipe
    try:
        if run.has_engine:
            state = run.engine.held.shapes()
        else:
            strategy = recipe.strategy
            state = recipe.new_engine(strategy, run.hooks, abstract=True).state
    except NotImplementedError:  # a user's strategy without a `mesh`
        return *recipe.parts[:2], recipe.model_state
    return state.params, state.buffers, state.model_state


def values(run: "Run") -> Mapping[str, Any]:
    """`Trainer.hyperparams`."""
    return hyperparam_values(run.settled_engine("`trainer.hyperparams`").state)


def set_values(run: "Run", values: Mapping[str, Any]) -> None:
    """`Trainer.set_hyperparams`."""
    engine = run.settled_engine("`set_hyperparams`")
    run.processes.same("values in `set_hyperparams`", values)
    engine.write(leaves_to_set(engine.state, values))


def compiled_train_step(run: "Run") -> jax.stages.Compiled | None:
    """`Trainer.compiled_train_step`."""
    program = run.engine.train_program() if run.has_engine else None
    return None if program is None else program.compiled


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
    for name, count in (("devices", devices), ("hosts", hosts)):
        if count is not None:
            check_count(name, count)
            if topology is not None:
                raise ValueError(
                    f"`{name}`={count} and `topology`={topology!r} were both given; a"
                    f" topology has its own {name}."
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
            batches = map(own_of, source.epoch())
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
