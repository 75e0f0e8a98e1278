"""jaxdp as users start it: a plain `DataLoader`, default callbacks and bar.

With `ready=True` it trains on the expert's list of ready batches instead.
"""

import tempfile
from collections.abc import Callable
from typing import Any

import optax

import jaxdp
from jaxdp.callbacks import Callback

from ..models import build, weights_of
from ..works import Weights, Work
from . import Skip


class Clock(Callback):
    """Notes the end of each epoch, whose means the device has then given."""

    def __init__(self, clock: Callable[[], None]):
        self.clock = clock

    def on_train_epoch_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        self.clock()


def train(
    work: Work,
    clock: Callable[[], None],
    strategy: str = "Sharded",
    ready: bool = False,
    **options: Any,
) -> Weights:
    with tempfile.TemporaryDirectory() as folder:
        try:
            trainer = jaxdp.Trainer(
                build(work),
                optax.adam(work.rate),
                loss=work.criterion,
                strategy=getattr(jaxdp, strategy)(),
                callbacks=[Clock(clock)],
                default_root_dir=folder,
                **options,
            )
        except NotImplementedError as error:
            if "steps_per_execution" in options:
                raise Skip(str(error)) from error
            raise
        loader = work.batches() if ready else work.loader()
        trainer.fit(loader, max_epochs=work.epochs)
    return weights_of(trainer.model, work)
