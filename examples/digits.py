"""LeNet on 1,797 handwritten digits, over eight devices faked on the CPU.

    python examples/digits.py

Needs no download: scikit-learn brings the images. Writes a log, checkpoints of the best
and the last epoch, and a picture of the curves.
"""

import argparse
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset

from jaxdp import Sharded, Trainer
from jaxdp.callbacks import CSVLogger, ModelCheckpoint


class LeNet(eqx.Module):
    """Two convolutions with max pools and two linear layers, for 8 x 8 images."""

    conv1: eqx.nn.Conv2d
    conv2: eqx.nn.Conv2d
    linear1: eqx.nn.Linear
    linear2: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key, 4)
        self.conv1 = eqx.nn.Conv2d(1, 32, 3, padding=1, key=keys[0])
        self.conv2 = eqx.nn.Conv2d(32, 64, 3, padding=1, key=keys[1])
        self.linear1 = eqx.nn.Linear(64 * 2 * 2, 128, key=keys[2])
        self.linear2 = eqx.nn.Linear(128, 10, key=keys[3])

    def __call__(self, x: jax.Array) -> jax.Array:
        pool = eqx.nn.MaxPool2d(2, 2)
        x = pool(jax.nn.relu(self.conv1(x)))
        x = pool(jax.nn.relu(self.conv2(x)))
        return self.linear2(jax.nn.relu(self.linear1(x.ravel())))


def load_data() -> list[TensorDataset]:
    """Training, validation and test sets: images `(rows, 1, 8, 8)` in [0, 1], labels.

    A training image appears five times: as it is, and moved by a pixel each way.
    """
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    x, x_test, y, y_test = train_test_split(x, y, test_size=300, random_state=0)
    x, x_val, y, y_val = train_test_split(x, y, test_size=150, random_state=0)
    wide = np.pad(x, [(0, 0), (0, 0), (1, 1), (1, 1)])
    corners = (1, 1), (0, 1), (2, 1), (1, 0), (1, 2)
    x = np.concatenate([wide[:, :, i : i + 8, j : j + 8] for i, j in corners])
    parts = (x, np.tile(y, len(corners))), (x_val, y_val), (x_test, y_test)
    return [TensorDataset(*map(torch.tensor, part)) for part in parts]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Trains, tests the best epoch, and returns what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path("runs/digits"))
    args = parser.parse_args(argv)

    jax.config.update("jax_num_cpu_devices", 8)
    train, val, test = load_data()
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(train, 64, shuffle=True, generator=order)
    rate = optax.cosine_decay_schedule(5e-3, args.epochs * len(loader))
    best = ModelCheckpoint(args.output / "checkpoints", monitor="val_loss")
    trainer = Trainer(
        LeNet(jax.random.key(0)),
        optax.adam(rate),
        loss="cross_entropy",
        metrics=["accuracy"],
        strategy=Sharded(),
        callbacks=[best, CSVLogger(args.output)],
    )
    print(trainer.summary())
    history = trainer.fit(loader, DataLoader(val, 75), max_epochs=args.epochs)
    print(history)
    history.plot(args.output / "curves.png")

    trainer.load(best.best_model_path)
    tested = trainer.test(DataLoader(test, 100))
    print(f"test accuracy of the best epoch: {tested['test_accuracy']:.4f}")
    print(f"the best epoch's checkpoint: {best.best_model_path}")
    print(f"the log:                     {args.output / 'metrics.csv'}")
    print(f"the curves:                  {args.output / 'curves.png'}")
    return {"trainer": trainer, "history": history, "test": tested}


if __name__ == "__main__":
    main()
