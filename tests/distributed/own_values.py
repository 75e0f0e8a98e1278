"""What processes of a test do with metrics of whole sets and values of callbacks."""

import equinox as eqx
import jax
import numpy as np
from together import rows, tell, trainer

from jaxdp import Callback, PassMetric
from jaxdp.callbacks import EarlyStopping, OptunaPruning


class Keeps:
    """A metric that keeps the rows it was given."""

    def __init__(self):
        self.targets = []

    def __call__(self, predictions, targets):
        self.targets.append(np.asarray(targets).tolist())
        return {"rows": len(targets), "mean": predictions.mean()}


class Logs(Callback):
    """Logs values that differ by process, in a validation and after steps."""

    def on_validation_end(self, trainer, metrics):
        trainer.log("val_own", 10.0 * jax.process_index() + trainer.current_epoch)

    def on_train_batch_end(self, trainer, metrics, batch_idx):
        trainer.log("process", jax.process_index())


def train(local=False):
    """Of all rows, or of own ones, with a last batch that some have no rows of."""
    index, count = jax.process_index(), jax.process_count()
    x, y = rows(21)
    data = [(x[:16], y[:16]), (x[16:20], y[16:20]), (x[20:], y[20:])]
    if local:
        data = [(x[index::count], y[index::count]) for x, y in data]
        data = [each for each in data if len(each[1])]
    keeps = Keeps()
    run = trainer(
        callbacks=[Logs(), EarlyStopping("val_own", patience=1)],
        model=eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0)),  # without dropout
        metrics={"accuracy": "accuracy", "kept": PassMetric(keeps)},
        data="local" if local else "global",
    )
    history = run.fit(data, data, max_epochs=4)
    names = "val_own", "process", "val_kept_rows", "val_kept_mean"
    tell(targets=keeps.targets, **{name: history[name] for name in names})


class Trial:
    """One that is pruned after two reports; the first process alone has it."""

    def __init__(self):
        self.steps = []

    def report(self, value, step):
        self.steps.append(step)

    def should_prune(self):
        return len(self.steps) == 2


def prune():
    """A fit that ends by what one process is told."""
    trial = None if jax.process_index() else Trial()
    run = trainer(callbacks=[OptunaPruning(trial, "val_loss")])
    data = [rows(16)]
    try:
        run.fit(data, data, max_epochs=4)
    except Exception as error:
        tell(error=type(error).__name__, epoch=run.current_epoch, step=run.global_step)
