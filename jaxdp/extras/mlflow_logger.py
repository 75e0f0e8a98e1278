"""Logs to MLflow."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..basics.arguments import checks_arguments
from ..callbacks.base import Trainer
from ..callbacks.logger import Logger
from ..callbacks.monitor import announce
from ..callbacks.run_metadata import Facts, flat
from ..record import Number
from .import_package import import_package


class MLFlowLogger(Logger):
    """Logs to MLflow: to a server, or to a database file in `dirpath`.

    Metrics have the names that `CSVLogger` has as columns; hyperparameters are the
    run's parameters, versions and hardware its tags. A run that is resumed from a
    checkpoint continues the same MLflow run, if this logger's store has it.
    Needs the extra `mlflow`. Look at a local store with
    `mlflow ui --backend-store-uri sqlite:///<dirpath>/mlflow.db`.

    Args:
        experiment_name: name of the experiment; it is made if there is none.
        run_name: name of the run; by default MLflow invents one.
        tracking_uri: address of a server or database. By default the environment
            variable MLFLOW_TRACKING_URI or, without it, `mlflow.db` in `dirpath`, with
            files in `mlartifacts` beside it.
        dirpath: folder of the local store; None means `trainer.default_root_dir`.
        run_id: the id of a run to continue.
        hyperparameters: your own, by name, to record beside the trainer's arguments.
        tags: of the run.

    Attributes:
        run_id: of the latest run.
        tracking_uri: where it is.
    """

    @checks_arguments
    def __init__(
        self,
        experiment_name: str = "jaxdp",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        dirpath: str | os.PathLike[str] | None = None,
        *,
        run_id: str | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
    ):
        super().__init__(dirpath, hyperparameters)
        self.experiment_name = experiment_name
        self.run_name = run_name
        self.tracking_uri = tracking_uri
        self.run_id = run_id
        self.tags = dict(tags or {})
        self._mlflow = import_package("mlflow", "mlflow", "`MLFlowLogger`")
        self._client: Any = None
        self._is_resumed = False

    def open(self, trainer: Trainer, folder: Path) -> None:
        artifacts = None
        self.tracking_uri = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if self.tracking_uri is None:
            self.tracking_uri = f"sqlite:///{(folder / 'mlflow.db').resolve()}"
            artifacts = (folder / "mlartifacts").resolve().as_uri()
        self._client = self._mlflow.MlflowClient(tracking_uri=self.tracking_uri)
        if self.run_id is not None:
            try:
                return self._client.update_run(self.run_id, status="RUNNING")
            except self._mlflow.exceptions.MlflowException as error:
                if not self._is_resumed:  # the user has passed this id
                    raise
                text = f"{error}. A new run begins; `tracking_uri` says where to log."
                announce(trainer, "MLFlowLogger", text)
        name = self.experiment_name
        experiment = self._client.get_experiment_by_name(name)
        id = experiment and experiment.experiment_id
        id = id or self._client.create_experiment(name, artifacts)
        run = self._client.create_run(id, run_name=self.run_name, tags=self.tags)
        self.run_id = run.info.run_id

    def log(self, epoch: int, step: int, values: dict[str, Number]) -> None:
        metric, now = self._mlflow.entities.Metric, int(time.time() * 1000)
        named = {"epoch": epoch, **values}
        metrics = [metric(k, float(v), now, step) for k, v in named.items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def log_run(self, facts: Facts) -> None:
        entities = self._mlflow.entities
        # A continued run has parameters, which MLflow does not change.
        known = self._client.get_run(self.run_id).data.params
        new = {k: v for k, v in facts["hyperparameters"].items() if k not in known}
        tags = {k: v for k, v in flat(facts).items() if "/" in k}
        self._client.log_batch(
            self.run_id,
            params=[entities.Param(k, str(v)[:500]) for k, v in new.items()],
            tags=[entities.RunTag(k, str(v)) for k, v in tags.items()],
        )

    def log_text(self, name: str, text: str) -> None:
        """Keeps a text as the file `<name>.txt`. Call it during a fit."""
        self._client.log_text(self.run_id, text, f"{name}.txt")

    def log_figure(self, name: str, figure: Any) -> None:
        """Keeps a `matplotlib.figure.Figure` as `<name>.png`. Call it during a fit."""
        self._client.log_figure(self.run_id, figure, f"{name}.png")

    def close(self) -> None:
        is_stopped = isinstance(self._error, KeyboardInterrupt)
        failed = "KILLED" if is_stopped else "FAILED"
        self._client.set_terminated(self.run_id, failed if self._error else "FINISHED")

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self.run_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # No address: a checkpoint does not decide where data is sent.
        self.run_id, self._is_resumed = state["run_id"], True
