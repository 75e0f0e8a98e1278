"""Draws docs/images/strategies.svg: what each device holds, read from placed arrays.

    python docs/draw_strategies.py

Four devices are faked. Each square is an array: a weight of a block, Adam's mean of its
gradient, and a batch; the coloured part is what the device holds of it.
"""

import pathlib

import equinox as eqx
import jax
import matplotlib
import numpy as np
import optax
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)

from jaxdp import (  # noqa: E402
    FSDP,
    LocalSGD,
    Members,
    Pipeline,
    Sharded,
    Stack,
    TensorParallel,
    Trainer,
    ZeRO,
)
from jaxdp.strategies import tensor_rules  # noqa: E402

PICTURE = pathlib.Path(__file__).parent / "images" / "strategies.svg"
COLOURS = {"weight": "#3b6fb6", "optimizer": "#d98032", "batch": "#5c9e52"}
DEVICES = 4


class Model(eqx.Module):
    """Eight blocks of width 8."""

    blocks: Stack

    def __init__(self, key):
        keys = jax.random.split(key, 8)
        self.blocks = Stack([eqx.nn.MLP(8, 8, 16, 1, key=each) for each in keys])

    def __call__(self, x):
        return self.blocks(x)


def strategies(model):
    yield "Sharded()", Sharded(), {}
    yield "ZeRO()", ZeRO(), {}
    yield "FSDP()", FSDP(), {}
    yield "FSDP(groups=2)", FSDP(groups=2), {}
    pairs = {"data": 2, "model": 2}
    split = TensorParallel(pairs, tensor_rules(model))
    yield "TensorParallel, 2 x 2", split, {}
    yield "Pipeline, 2 stages", Pipeline(2, 4), {}
    yield "LocalSGD(every=50)", LocalSGD(50), {}
    yield "Members()", Members(), {"ensemble": 8}


def arrays(title, trainer):
    """The weight and Adam's mean, whose first axis is the block, member or replica."""
    state = trainer.state
    weight = state.params.blocks.stacked.layers[0].weight
    adam = state.opt_state
    if title.startswith("LocalSGD"):
        adam, weight = (
            state.opt_state.inner,
            state.opt_state.replicas.blocks.stacked.layers[0].weight,
        )
    return weight, adam[0].mu.blocks.stacked.layers[0].weight


def held(array, device):
    """Which part of an array a device holds, as (left, bottom, width, height)."""
    shape = array.shape
    index = array.sharding.devices_indices_map(shape)[device]
    spans = [
        (start / size, (stop - start) / size)
        for start, stop, size in (
            (*each.indices(size)[:2], size)
            for each, size in zip(index, shape, strict=True)
        )
    ]
    # Upright what is first (blocks, members, replicas, rows), across what is split.
    down = spans[0]
    across = next((span for span in spans[1:] if span[1] < 1), (0.0, 1.0))
    return across[0], 1 - down[0] - down[1], across[1], down[1]


def picture() -> Figure:
    rows = []
    plain = Model(jax.random.key(0))
    many = eqx.filter_vmap(Model)(jax.random.split(jax.random.key(0), 8))
    for title, strategy, options in strategies(plain):
        model = many if options else plain
        trainer = Trainer(
            model, optax.adam(1e-3), loss="mse", strategy=strategy, **options
        )
        batch = np.zeros((8, 8), np.float32)
        whole = isinstance(strategy, Members)
        spec = jax.sharding.PartitionSpec() if whole else strategy.batch_spec(batch)
        sharding = jax.sharding.NamedSharding(strategy.mesh, spec)
        rows.append((title, (*arrays(title, trainer), jax.device_put(batch, sharding))))

    figure = Figure(figsize=(8, 0.45 * len(rows) + 0.5))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 26.5), ylim=(-len(rows) * 1.5, 1.5))
    axes.axis("off")
    for device in range(DEVICES):
        axes.text(
            9.85 + 4.6 * device, 0.75, f"device {device}", ha="center", fontsize=9
        )
    for number, (title, found) in enumerate(rows):
        bottom = -1.5 * number - 1.2
        axes.text(0.2, bottom + 0.5, title, va="center", fontsize=9, family="monospace")
        for device in range(DEVICES):
            for place, (name, array) in enumerate(zip(COLOURS, found, strict=True)):
                left = 8.2 + 4.6 * device + 1.15 * place
                x, y, width, height = held(array, jax.devices()[device])
                colour = COLOURS[name]
                axes.add_patch(Rectangle((left, bottom), 1, 1, fc="#eeeeee", ec="none"))
                axes.add_patch(
                    Rectangle((left + x, bottom + y), width, height, fc=colour)
                )
                axes.add_patch(
                    Rectangle((left, bottom), 1, 1, fill=False, ec="#888888", lw=0.6)
                )
    for place, (name, colour) in enumerate(COLOURS.items()):
        axes.add_patch(Rectangle((0.2 + 2.6 * place, 0.7), 0.4, 0.4, fc=colour))
        axes.text(0.75 + 2.6 * place, 0.9, name, va="center", fontsize=8)
    return figure


if __name__ == "__main__":
    matplotlib.rcParams |= {"svg.hashsalt": "strategies", "svg.fonttype": "none"}
    figure = picture()
    figure.savefig(PICTURE, metadata={"Date": None}, facecolor="white")
