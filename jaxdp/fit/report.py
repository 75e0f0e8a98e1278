"""A trainer in words: in a line, as a table of its layers, and as a page."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax

from ..basics.tree import leaf_path
from ..callbacks.csv_logger import CSVLogger
from ..callbacks.run_facts import plain, run_facts

if TYPE_CHECKING:
    from jaxdp import Trainer

    from ..reports import Summary


def in_a_line(trainer: "Trainer") -> str:
    """What `repr` says of a trainer."""
    run = trainer.run
    count = sum(leaf.size for leaf in jax.tree.leaves(run.parts[:2]))
    return (
        f"Trainer({plain(run.model)}, {count:,} parameters, {run.strategy!r},"
        f" step {trainer.global_step}, epoch {trainer.current_epoch})"
    )


@jax.disable_jit(False)
def summary(trainer: "Trainer") -> "Summary":
    """`Trainer.summary`, of shapes alone: nothing is placed, and nothing waited for."""
    from ..reports import summarize

    run = trainer.run
    state = run.shapes()
    shapes = _by_path(state[:2])
    by = [(part.name, eqx.filter(state[0], part.mask)) for part in run.several]
    trained = {
        path: name
        for name, leaves in by or [("", state[0])]
        for path in _by_path([leaves])
    }
    layouts = [getattr(leaf, "sharding", None) for leaf in shapes.values()]
    return summarize(
        run.model,
        shapes,
        trained,
        model_state=state[2],
        members=run.ensemble and run.ensemble.size,
        strategy=run.strategy,
        devices=max(len(each.device_set) if each else 1 for each in layouts),
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
    from ..reports import read_run, run_of_history, write_report

    record: dict[str, Any] = dict(run_facts(trainer, None))
    tables = [c.path for c in trainer.callbacks if isinstance(c, CSVLogger)]
    tables = [table for table in tables if table is not None and table.exists()]
    file = Path(path).expanduser()
    if file.is_dir() or not file.suffix:
        file = file / "report.html"
    if tables:
        run = read_run(tables[0])
        run.record.update({**record, **run.record})
        run = run._replace(name=str(tables[0].parent))
    else:
        run = run_of_history(str(trainer.default_root_dir), trainer.history, record)
    return str(write_report(run, file, plan or trainer.running_plan()))
