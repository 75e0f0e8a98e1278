"""What the processes of `test_together` do; each prints a line of JSON for the test."""

import contextlib
import json
import multiprocessing
import os
import pathlib
import signal
import sys
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import equinox as eqx
import jax
import numpy as np
import optax
import torch
from jax.sharding import PartitionSpec
from toys import Mlp, NormNet, Recorder, rows
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from jaxdp import FSDP, Pmap, Sharded, SingleDevice, TensorParallel, Trainer, ZeRO
from jaxdp.callbacks import (
    Callback,
    CSVLogger,
    EarlyStopping,
    ModelCheckpoint,
    NanGuard,
    Preemption,
    ProgressBar,
    Timer,
)

ROWS = 53
"""In batches of 16: the last one has five, and leaves some processes without any."""


def strategies():
    halves = [("first.weight", PartitionSpec("model", None))]
    devices = jax.device_count()
    return {
        "Sharded": Sharded,
        "Pmap": Pmap,
        "ZeRO": ZeRO,
        "FSDP": FSDP,
        "TensorParallel": lambda: TensorParallel(
            {"data": devices // 2, "model": 2}, halves
        ),
        "across": lambda: TensorParallel({"data": 1, "model": devices}, halves),
        "SingleDevice": SingleDevice,
    }


def trainer(strategy="Sharded", callbacks=(), model=None, **options):
    options = {"loss": "cross_entropy", "metrics": ["accuracy"]} | options
    return Trainer(
        Mlp(jax.random.key(0)) if model is None else model,
        optax.adam(1e-2),
        strategy=strategies()[strategy](),
        callbacks=callbacks,
        enable_progress_bar=False,
        **options,
    )


def data(count=ROWS):
    x, y = rows(count)
    return TensorDataset(torch.tensor(x), torch.tensor(y, dtype=torch.int64))


def tell(**values):
    print("told " + json.dumps(values), flush=True)


def numbers(strategy="Sharded", epochs=2, **options):
    """All the numbers of a short run with dropout and ragged batches."""
    recorder = Recorder()
    run = trainer(strategy, [recorder], **options)
    loader = DataLoader(data(), 16, shuffle=True)
    history = run.fit(loader, DataLoader(data(), 16), max_epochs=epochs)
    found = {
        "losses": recorder.losses,
        "history": history["val_loss"] + history["accuracy"],
        "test": list(run.test(DataLoader(data(), 16)).values()),
        "predictions": run.predict(DataLoader(data(), 16)).ravel().tolist(),
        "weights": weights_of(run),
        "examples": [run.examples_seen],
    }
    return found


def weights_of(run):
    leaves = [leaf for leaf in jax.tree.leaves(run.model) if hasattr(leaf, "dtype")]
    return np.concatenate([np.asarray(leaf).ravel() for leaf in leaves]).tolist()


def all_numbers(cases):
    for name, options in cases.items():
        tell(name=name, found=numbers(**options))


class Logged(Dataset):
    """Knows who was asked for, and can't be fetched in one operation."""

    def __init__(self, count=ROWS):
        self.x, self.y = rows(count)
        self.asked = []

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.asked.append(index)
        return self.x[index], self.y[index]


class Stream(IterableDataset):
    def __iter__(self):
        return zip(*rows(ROWS), strict=True)


def own_collate(samples):
    x, y = zip(*samples, strict=True)
    return {"x": np.stack(x), "y": np.stack(y)}


def dict_loss(model, batch, keys):
    return optax.softmax_cross_entropy_with_integer_labels(
        jax.vmap(model)(batch["x"], key=keys), batch["y"]
    )


def scalar_loss(prediction, target):
    loss = optax.softmax_cross_entropy_with_integer_labels(prediction, target)
    return loss.mean() + 0.1 * prediction.std()


def arrays():
    x, y = rows(ROWS)
    return [(x[at : at + 16], y[at : at + 16]) for at in range(0, ROWS, 16)]


def losses(loader, epochs=2, **options):
    recorder = Recorder()
    run = trainer(callbacks=[recorder], **options)
    run.fit(loader, max_epochs=epochs)
    return recorder.losses


def loaders():
    """The losses of all kinds of loaders and options."""
    logged = Logged()
    model, state = eqx.nn.make_with_state(NormNet)(jax.random.key(0))
    found = {
        "list": losses(arrays()),
        "iterator": losses(iter(arrays()), epochs=1),
        "by index": losses(DataLoader(logged, 16, shuffle=True)),
        "stream": losses(DataLoader(Stream(), 16)),
        "own collate": losses(
            DataLoader(Logged(), 16, shuffle=True, collate_fn=own_collate),
            loss=None,
            loss_fn=dict_loss,
            metrics=(),
        ),
        "accumulated": losses(arrays(), accumulate_grad_batches=3),
        "in blocks": losses(arrays(), steps_per_execution=3),
        "interacting": losses(arrays(), loss=scalar_loss),
        "batch norm": losses(arrays(), model=model, state=state),
        "overfit": _overfit(),
    }
    tell(found=found, asked=logged.asked)


def _overfit():
    recorder = Recorder()
    trainer(callbacks=[recorder]).fit(
        DataLoader(data(), 16, shuffle=True), max_epochs=2, overfit_batches=1
    )
    return recorder.losses


def workers():
    """Loader workers fetch the rows of their process alone."""
    multiprocessing.current_process()._config["daemon"] = False  # may have children
    tell(losses=losses(DataLoader(Logged(), 16, shuffle=True, num_workers=1)))


def local(sizes):
    """Each process has rows of its own, and they end at different times."""
    index = jax.process_index()
    x, y = rows(sum(sizes))
    start = sum(sizes[:index])
    own = slice(start, start + sizes[index])
    mine = TensorDataset(torch.tensor(x[own]), torch.tensor(y[own], dtype=torch.int64))
    recorder = Recorder()
    run = trainer(callbacks=[recorder], data="local")
    before = run.validate(DataLoader(mine, 8))
    predictions = run.predict(DataLoader(mine, 8), gather=False)
    everyone = run.predict(DataLoader(mine, 8))
    history = run.fit(DataLoader(mine, 8), max_epochs=2)
    tell(
        before=before,
        own=predictions.shape[0],
        everyone=everyone.shape[0],
        sums=[float(predictions.sum()), float(everyone.sum())],
        rows=run.examples_seen,
        steps=run.global_step,
        losses=recorder.losses,
        batches=run.num_training_batches,
    )
    with contextlib.suppress(ValueError):
        run.validate(DataLoader(mine, 8) if index == 0 else [])
        tell(bad=True)
    tell(good=True)
