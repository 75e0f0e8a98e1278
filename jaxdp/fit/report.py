"""The page about a run that `Trainer.report` writes."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..callbacks.csv_logger import CSVLogger
from ..callbacks.run_facts import run_facts

if TYPE_CHECKING:
    from jaxdp import Trainer


def report(trainer: "Trainer", path: str | os.PathLike[str], plan: Any) -> str:
    """Writes the page from the table of a `CSVLogger`, if there is one, else from the
    history."""
    from ..reports import read_run, run_of_history, write_report

    record: dict[str, Any] = dict(run_facts(trainer, None))
    tables = [c.path for c in trainer.callbacks if isinstance(c, CSVLogger)]
    tables = [table for table in tables if table is not None and table.exists()]
    file = Path(path)
    if file.is_dir() or not file.suffix:
        file = file / "report.html"
    if tables:
        run = read_run(tables[0])
        run.record.update({**record, **run.record})
        run = run._replace(name=str(tables[0].parent))
    else:
        run = run_of_history(str(trainer.default_root_dir), trainer.history, record)
    return str(write_report(run, file, plan or trainer.running_plan()))
