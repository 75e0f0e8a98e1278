"""Logs to Weights & Biases."""

import io
import os
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from ..basics.arguments import checks_arguments
from ..callbacks.base import Trainer
from ..callbacks.logger import Logger
from ..callbacks.run_metadata import Facts, flat
from ..record import Number
from .figures import to_png
from .import_package import import_package


class WandbLogger(Logger):
    """Logs to Weights & Biases (wandb.ai), or to files that `wandb sync` sends later.

    Names are those that `CSVLogger` has as columns; the horizontal axis is `step`, the
    number of optimizer steps. Hyperparameters, versions and hardware are the run's
    config. A run that is resumed from a checkpoint continues the same W&B run.
    Needs the extra `wandb`.

    Args:
        project: the W&B project.
        name: name of the run; by default W&B invents one.
        dirpath: where the files go, in a folder `wandb`; None means
            `trainer.default_root_dir`.
        offline: whether to only write files, without a connection to a server.
        id: the id of a run to continue.
        hyperparameters: your own, by name, to record beside the trainer's arguments.
        options: for `wandb.init`, such as `entity`, `group` and `tags`.

    Attributes:
        run: the `wandb.Run`, during a fit.
        id: of the latest run.
    """

    @checks_arguments
    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        dirpath: str | os.PathLike[str] | None = None,
        *,
        offline: bool = False,
        id: str | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        **options: Any,
    ):
        super().__init__(dirpath, hyperparameters)
        self.project = project
        self.name = name
        self.offline = offline
        self.id = id
        self.options = options
        self.run: Any = None
        self._wandb = import_package("wandb", "wandb", "`WandbLogger`")

    def open(self, trainer: Trainer, folder: Path) -> None:
        options: dict[str, Any] = {"resume": "allow", **self.options}
        if self.offline:
            options["mode"] = "offline"
        self.run = self._wandb.init(
            project=self.project, name=self.name, dir=str(folder), id=self.id, **options
        )
        self.id = self.run.id
        # W&B's own step only grows, and drops what is read late.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, epoch: int, step: int, values: dict[str, Number]) -> None:
        self.run.log({"epoch": epoch, "step": step, **values})

    def log_run(self, facts: Facts) -> None:
        self.run.config.update(flat(facts), allow_val_change=True)

    def log_text(self, name: str, text: str) -> None:
        """Shows a text under `name`. Call it during a fit."""
        self.run.log({name: self._wandb.Html(f"<pre>{escape(text)}</pre>")})

    def log_figure(self, name: str, figure: Any) -> None:
        """Shows a `matplotlib.figure.Figure` under `name`. Call it during a fit."""
        from PIL import Image  # which matplotlib needs too

        image = Image.open(io.BytesIO(to_png(figure)))
        self.run.log({name: self._wandb.Image(image)})

    def close(self) -> None:
        run, self.run = self.run, None
        run.finish(exit_code=0 if self._error is None else 1)

    def state_dict(self) -> dict[str, Any]:
        return {"id": self.id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.id = state["id"]
