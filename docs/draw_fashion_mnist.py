"""Draws docs/images/fashion_mnist.png: an example's losses on one device and on two.

    python docs/draw_fashion_mnist.py [FOLDER]

Without a folder the example trains first, three minutes on two cores. With one, its
logs are read from there.
"""

import csv
import pathlib
import sys
import tempfile

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

ROOT = pathlib.Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "fashion_mnist.png"
LINES = {1: {"alpha": 0.5, "linewidth": 4}, 2: {"linestyle": "--", "marker": "o"}}


def read_epochs(folder: pathlib.Path) -> list[dict[str, str]]:
    """Returns the rows of epochs in the log of a run."""
    with open(folder / "metrics.csv", newline="") as file:
        return [row for row in csv.DictReader(file) if row["val_loss"]]


def draw(output: pathlib.Path) -> Figure:
    """Returns the figure of the logs that the example has written to `output`."""
    figure = Figure((12, 4.4), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        for devices, line in LINES.items():
            rows = read_epochs(output / f"{devices}_devices")
            epochs = [int(row["epoch"]) for row in rows]
            of = f"{devices} device{'s' * (devices > 1)}"
            for color, column, what in (
                ("tab:blue", f"epoch_{name}", "training"),
                ("tab:orange", f"val_{name}", "test"),
            ):
                values = [float(row[column]) for row in rows]
                axes.plot(epochs, values, color=color, label=f"{what}, {of}", **line)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
        axes.set(xlabel="epoch", ylabel=name)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "examples"))
    from fashion_mnist import main

    output = pathlib.Path(sys.argv[1] if sys.argv[1:] else tempfile.mkdtemp())
    if not sys.argv[1:]:
        for devices in LINES:
            main(["--devices", str(devices), "--output", str(output)])
    draw(output).savefig(PICTURE, dpi=100)
