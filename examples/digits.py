"""LeNet on 1,797 handwritten digits, over eight devices faked on the CPU.

    python examples/digits.py

Needs no download: scikit-learn brings the images. Writes a log, a checkpoint of the
best epoch, a picture of the curves and one of which device holds what.
"""

import argparse
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import torch
from matplotlib import cm
from matplotlib.figure import Figure
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


def draw_placement(trainer: Trainer, path: Path) -> None:
    """Draws a column per device, a row per array, and in it what is held there."""
    state, step = trainer.state, trainer.compiled_train_step()
    assert step is not None  # the trainer has been trained

    def as_placed(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        # The step takes its batch behind an axis of micro-batches: left out here.
        rows = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=rows)

    shapes, shardings = step.in_avals[0][1][0], step.input_shardings[0][1][0]
    batch = jax.tree.map(as_placed, shapes.batch, shardings.batch)
    names, texts, colors = [], [], []
    held = {"batch": batch, "model": state.params, "optimizer": state.opt_state}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(held):
        size = " x ".join(map(str, leaf.shape)) or "scalar"
        names.append(f"{jax.tree_util.keystr(keys, simple=True, separator='.')}  {size} ")
        places = leaf.sharding.devices_indices_map(leaf.shape).values()
        parts = [place[0].indices(leaf.shape[0]) if place else None for place in places]
        whole = [part is None or part[:2] == (0, leaf.shape[0]) for part in parts]
        texts.append([])
    figure = Figure(figsize=(11, 0.2 * len(names) + 0.6), dpi=120)
    axes = figure.add_axes((0.27, 0.01, 0.72, 0.93))
    axes.axis("off")
    axes.set_title(f"What each device holds: {trainer.strategy}")
    devices = [str(device) for device in jax.devices()]
    table = axes.table(texts, colors, "center", None, names, colLabels=devices)
    for cell in table.get_celld().values():
        cell.set_edgecolor("white")
    figure.savefig(path)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Trains, tests the best epoch, and returns what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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
        metrics=["accuracy"],
        strategy=Sharded(),
        callbacks=[best, CSVLogger(args.output)],
    )
    history = trainer.fit(loader, DataLoader(val, 75), max_epochs=args.epochs)
    history.plot(args.output / "curves.png")
    draw_placement(trainer, args.output / "placement.png")

    trainer.load(best.best_model_path)
    tested = trainer.test(DataLoader(test, 100))
    print(f"{history}\ntest accuracy of the best epoch: {tested['test_accuracy']:.4f}")
    print(f"written to {args.output}:", *sorted(p.name for p in args.output.iterdir()))
    return {"trainer": trainer, "history": history, "test": tested}


if __name__ == "__main__":
    main()
