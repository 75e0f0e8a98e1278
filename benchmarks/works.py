"""The works to train: models, data and optimizer, with the same numbers for every peer.

Only NumPy here. Each peer builds the model its own way, starts from `weights()`, and
hands its trained weights back to `Work.loss`, an independent referee in float64.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np

Weights = list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Work:
    """A model, its data and how long to train it.

    Args:
        name: the name for `--only`.
        title: one line for tables.
        kind: "mlp", "residual" or "lenet".
        sizes: features before, between and after the layers of an "mlp"; width and
            number of layers of a "residual".
        batch: rows per step.
        steps: steps per epoch.
        epochs: the number of epochs, including the warm-up.
        warm: epochs that are not timed: compilation, first steps.
        criterion: "mse" or "cross_entropy".
        tolerance: how far a peer's final loss may be from the expert's, relatively.
        rate: the learning rate; small if training would amplify differences in last
            bits.
        augmented: whether rows are cropped and flipped one at a time, when asked for.
        workers: the number of workers of the torch `DataLoader`.
        devices: CPU devices, faked if more than one.
    """

    name: str
    title: str
    kind: str
    sizes: tuple[int, ...]
    batch: int
    steps: int
    epochs: int
    warm: int
    criterion: str
    tolerance: float
    rate: float = 1e-3
    augmented: bool = False
    workers: int = 0
    devices: int = 1

    def shapes(self) -> list[tuple[int, ...]]:
        """Returns the shapes of all weights and biases: `(out, in)`, `(out,)`,
        convolutions as torch's.
        """
        if self.kind == "lenet":
            convolutions = [(20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,)]
            return [*convolutions, (128, 50 * 4 * 4), (128,), (10, 128), (10,)]
        if self.kind == "residual":
            width, layers = self.sizes
            return [(width, width), (width,)] * layers
        pairs = zip(self.sizes[:-1], self.sizes[1:], strict=True)
        return [shape for a, b in pairs for shape in ((b, a), (b,))]

    def weights(self) -> Weights:
        """Returns initial weights, uniform up to one over the root of the number of
        inputs.
        """
        random = np.random.default_rng(1)
        found, bound = [], 1.0
        for shape in self.shapes():
            if len(shape) > 1:
                bound = 1 / np.sqrt(np.prod(shape[1:]))
                if self.kind == "residual":  # fifty layers add up
                    bound /= np.sqrt(self.sizes[1])
            found.append(random.uniform(-bound, bound, shape).astype(np.float32))
        return found

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns all rows of an epoch, after augmentation, and their targets."""
        if self.augmented:
            dataset = self.dataset()
            pairs = [dataset[row] for row in range(len(dataset))]
            x, y = (np.stack(part) for part in zip(*pairs, strict=True))
            return x, y
        rows = self.batch * self.steps
        if self.criterion == "mse":
            width = self.sizes[0]
            x = np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32)
            return x, np.sin(x)
        images, labels = _fashion_mnist(rows)
        shape = (rows, 1, 28, 28) if self.kind == "lenet" else (rows, 28 * 28)
        return images.astype(np.float32).reshape(shape) / 255, labels

    def batches(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the batches of an epoch."""
        x, y = self.arrays()
        cuts = range(0, len(x), self.batch)
        return [(x[i : i + self.batch], y[i : i + self.batch]) for i in cuts]

    def dataset(self) -> Any:
        """Returns a dataset for torch's `DataLoader`."""
        if self.augmented:
            return Augmented(*_fashion_mnist(self.batch * self.steps))
        import torch

        return torch.utils.data.TensorDataset(*map(torch.from_numpy, self.arrays()))

    def loader(self, **options: Any) -> Any:
        """Returns a plain torch `DataLoader` of the same batches."""
        import torch

        return torch.utils.data.DataLoader(
            self.dataset(), self.batch, num_workers=self.workers, **options
        )

    def loss(self, weights: Weights) -> float:
        """Returns the mean loss in float64, of at most 8192 rows; 1024 with
        convolutions.

        Training amplifies differences in last bits. Over 1024 rows, the losses of two
        equal loops once differed by 2.4 %, over 8192 rows by 0.1 %.
        """
        rows = 1024 if self.kind == "lenet" else 8192
        x, y = (part[:rows] for part in self.arrays())
        outputs = self._forward([w.astype(np.float64) for w in weights], x)
        if self.criterion == "mse":
            return float(np.mean((outputs - y) ** 2))
        outputs -= outputs.max(axis=1, keepdims=True)
        of_label = np.take_along_axis(outputs, y[:, None], axis=1)[:, 0]
        return float(np.mean(np.log(np.exp(outputs).sum(axis=1)) - of_label))

    def _forward(self, weights: Weights, x: np.ndarray) -> np.ndarray:
        layers = list(zip(weights[::2], weights[1::2], strict=True))
        if self.kind == "residual":
            for weight, bias in layers:
                x = x + np.maximum(x @ weight.T + bias, 0)
            return x
        if self.kind == "lenet":
            for weight, bias in layers[:2]:
                x = _pool(np.maximum(_convolve(x, weight, bias), 0))
            x, layers = x.reshape(len(x), -1), layers[2:]
        for weight, bias in layers[:-1]:
            x = np.maximum(x @ weight.T + bias, 0)
        weight, bias = layers[-1]
        return x @ weight.T + bias

    def toy(self) -> "Work":
        """Returns the same work at a size for tests."""
        sizes = self.sizes
        if self.kind == "residual":
            sizes = (8, 3)
        elif self.kind == "mlp":
            sizes = (sizes[0], *(8 for _ in sizes[1:-1]), sizes[-1])
        small = {"sizes": sizes, "batch": min(self.batch, 16), "steps": 3}
        return dataclasses.replace(self, **small, epochs=3, warm=1)


class Augmented:
    """Images, each cropped, perhaps flipped and scaled when it is asked for.

    The changes to an image depend only on its index, so that all peers see the same
    images.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray):
        self.images = np.pad(images, ((0, 0), (2, 2), (2, 2)))
        self.labels = labels
        random = np.random.default_rng(2)
        self.corners = random.integers(0, 5, (len(images), 2)).tolist()
        self.flips = random.integers(0, 2, len(images)).tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.integer]:
        top, left = self.corners[row]
        image = self.images[row, top : top + 28, left : left + 28]
        if self.flips[row]:
            image = image[:, ::-1]
        return image.ravel().astype(np.float32) / 255, self.labels[row]


def _fashion_mnist(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns images `(rows, 28, 28)` of bytes, and labels; noise if the files are
    missing.
    """
    raw = Path(os.environ.get("JAXDP_DATA_DIR", "data"), "FashionMNIST", "raw")
    images, labels = (
        raw / f"train-{part}-ubyte" for part in ("images-idx3", "labels-idx1")
    )
    if images.exists() and labels.exists():
        pixels = np.fromfile(images, np.uint8, rows * 28 * 28, offset=16)
        classes = np.fromfile(labels, np.uint8, rows, offset=8)
        return pixels.reshape(-1, 28, 28), classes.astype(np.int64)
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (rows, 28, 28), dtype=np.uint8)
    return pixels, random.integers(0, 10, rows)


def _convolve(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    windows = np.lib.stride_tricks.sliding_window_view(x, weight.shape[2:], (2, 3))
    found = np.tensordot(windows, weight, ((1, 4, 5), (1, 2, 3)))
    return found.transpose(0, 3, 1, 2) + bias[:, None, None]


def _pool(x: np.ndarray) -> np.ndarray:
    rows, channels, height, width = x.shape
    height, width = height // 2 * 2, width // 2 * 2
    x = x[:, :, :height, :width]
    return x.reshape(rows, channels, height // 2, 2, width // 2, 2).mean((3, 5))


_TINY = ("mlp", (4, 32, 4), 16)
_CROPS = ("mlp", (784, 256, 256, 10), 128)

WORKS = {
    work.name: work
    for work in (
        Work("W1", "MLP 4-32-4, batch 16", *_TINY, 1000, 11, 1, "mse", 1e-2),
        Work("W1s", "the same, epochs of 4 steps", *_TINY, 4, 550, 50, "mse", 1e-2),
        Work(
            *("W2", "LeNet, Fashion-MNIST, batch 256", "lenet", (), 256),
            *(60, 3, 1, "cross_entropy", 2e-2),
        ),
        Work(
            *("W3", "MLP 784-1024x3-10, batch 512", "mlp", (784, 1024, 1024, 1024, 10)),
            *(512, 117, 3, 1, "cross_entropy", 2e-2, 1e-4),
        ),
        Work(
            *("W4", "50 residual layers of 64, batch 64", "residual", (64, 50)),
            *(64, 150, 11, 1, "mse", 1e-2),
        ),
        Work(
            *("W5", "MLP 784-256-256-10, batch 128, crops and flips", *_CROPS),
            *(150, 9, 1, "cross_entropy", 2e-2, 1e-4),
            augmented=True,
        ),
        Work(
            *("W5w", "the same, 2 loader workers", *_CROPS),
            *(150, 9, 1, "cross_entropy", 2e-2, 1e-4),
            augmented=True,
            workers=2,
        ),
        Work(
            *("W6", "W1 on 8 faked CPU devices", *_TINY, 300, 9, 1, "mse", 1e-2),
            devices=8,
        ),
    )
}
