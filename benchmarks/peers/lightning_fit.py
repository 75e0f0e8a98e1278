"""Lightning: with its defaults and the loss logged, or with everything off."""

import tempfile
from collections.abc import Callable

import lightning
import torch

from ..works import Weights, Work
from . import eager


class Module(lightning.LightningModule):
    def __init__(self, work: Work, logs: bool):
        super().__init__()
        self.model, self.criterion = eager.build(work), eager.criterion_of(work)
        self.rate, self.logs = work.rate, logs

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.criterion(self.model(x), y)
        if self.logs:
            self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.model.parameters(), self.rate)


class Clock(lightning.Callback):
    def __init__(self, clock: Callable[[], None]):
        self.clock = clock

    def on_train_epoch_end(self, trainer, pl_module):
        self.clock()


def train(work: Work, clock: Callable[[], None], bare: bool = False) -> Weights:
    off = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    module = Module(work, logs=not bare)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=work.epochs,
            accelerator="cpu",
            callbacks=[Clock(clock)],
            default_root_dir=folder,
            **(off if bare else {}),
        )
        trainer.fit(module, work.loader())
    return eager.weights_of(module.model)
