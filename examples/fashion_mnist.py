"""LeNet on Fashion-MNIST, on one device or two, in one process or two: the same curve.

    python examples/fashion_mnist.py --devices 2 --data DIR
    torchrun --nproc-per-node=2 examples/fashion_mnist.py --data DIR

DIR holds FashionMNIST/raw/train-images-idx3-ubyte and the other three files, as
torchvision's FashionMNIST(DIR, download=True) leaves them; without --data it is
$JAXDP_DATA_DIR, or data. Ten epochs take some minutes on a CPU and reach a test
accuracy of 0.84 or better.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import torch
from torch.utils.data import DataLoader, TensorDataset

from jaxdp import Sharded, Trainer, distributed
from jaxdp.callbacks import CSVLogger


class LeNet(eqx.Module):
    """Two convolutions, each with an average pool, and two linear layers."""

    conv1: eqx.nn.Conv2d
    conv2: eqx.nn.Conv2d
    linear1: eqx.nn.Linear
    linear2: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key, 4)
        self.conv1 = eqx.nn.Conv2d(1, 20, 3, key=keys[0])
        self.conv2 = eqx.nn.Conv2d(20, 50, 5, key=keys[1])
        self.linear1 = eqx.nn.Linear(50 * 4 * 4, 128, key=keys[2])
        self.linear2 = eqx.nn.Linear(128, 10, key=keys[3])

    def __call__(self, x: jax.Array) -> jax.Array:
        pool = eqx.nn.AvgPool2d(2, 2)
        x = pool(jax.nn.relu(self.conv1(x)))
        x = pool(jax.nn.relu(self.conv2(x)))
        return self.linear2(jax.nn.relu(self.linear1(x.ravel())))


def read_idx(path: Path) -> np.ndarray:
    """An array of bytes in the idx format: magic, rank, sizes, then the values."""
    raw = path.read_bytes()
    rank = raw[3]
    shape = np.frombuffer(raw, ">i4", count=rank, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * rank).reshape(shape)


def load(root: str, train: bool) -> TensorDataset:
    """Images `(rows, 1, 28, 28)` in [0, 1] and labels."""
    try:
        from torchvision.datasets import FashionMNIST

        dataset = FashionMNIST(root, train=train)
        images, labels = dataset.data, dataset.targets
    except (ImportError, RuntimeError) as error:
        print(f"reading the files without torchvision ({error})")
        raw, part = Path(root, "FashionMNIST", "raw"), "train" if train else "t10k"
        images = torch.tensor(read_idx(raw / f"{part}-images-idx3-ubyte"))
        labels = torch.tensor(read_idx(raw / f"{part}-labels-idx1-ubyte")).long()
    return TensorDataset(images[:, None].float() / 255, labels)


def main(argv: list[str] | None = None) -> tuple[Trainer, Any]:
    """Trains, and returns the trainer and its history."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default=os.environ.get("JAXDP_DATA_DIR", "data"))
    parser.add_argument(
        "--devices", type=int, choices=[1, 2], default=1, help="of each process"
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batches", type=int, help="per epoch; all by default")
    parser.add_argument("--output", default="runs/fashion_mnist")
    args = parser.parse_args(argv)

    jax.config.update("jax_num_cpu_devices", 8)  # of which one or two are used
    distributed.initialize()  # with other processes, if a launcher has started some
    processes = map(jax.local_devices, range(jax.process_count()))
    devices = [device for own in processes for device in own[: args.devices]]
    output = Path(args.output, f"{len(devices)}_devices")
    order = torch.Generator().manual_seed(0)
    train = DataLoader(load(args.data, True), 256, shuffle=True, generator=order)
    test = DataLoader(load(args.data, False), 256)
    trainer = Trainer(
        LeNet(jax.random.key(0)),
        optax.sgd(0.2),
        loss="cross_entropy",
        metrics=["accuracy"],
        strategy=Sharded(devices),
        callbacks=[CSVLogger(output)],
    )
    history = trainer.fit(
        train, test, max_epochs=args.epochs, limit_train_batches=args.batches
    )
    history.plot(output / "curves.png")
    if trainer.is_global_zero:  # of several processes, one tells
        print(history)
        print(f"{trainer.strategy}: test accuracy {history['val_accuracy'][-1]:.4f}")
        print(f"curves and log are in {output}")
    return trainer, history


if __name__ == "__main__":
    main()
