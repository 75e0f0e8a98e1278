"""JAX's distributed-arrays tutorial: a wide network, its batch split over devices.

    python examples/tutorials/distributed_arrays.py
    python examples/tutorials/distributed_arrays.py --tensor 2  # 2-way tensor
    python examples/tutorials/distributed_arrays.py --width 8192 --batch-size 8192

With `--tensor`, the tutorial's second half: two of the weights are split over a second
axis of the mesh, W2 by columns and W3 by rows. The numbers stay.

The tutorial's `predict` and `loss` are plain functions of a list of weights; they
stay that. The full size holds 536 MB of weights per device and wants accelerators.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jaxdp import Sharded, TensorParallel, Trainer

Params = list[tuple[jax.Array, jax.Array]]


def predict(params: Params, inputs: jax.Array) -> jax.Array:
    """The network over one row or many: the last axis is the features."""
    for weight, bias in params[:-1]:
        inputs = jax.nn.relu(inputs @ weight + bias)
    weight, bias = params[-1]
    return inputs @ weight + bias


def loss(params: Params, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Squared error, summed over the outputs: one value per row."""
    return jnp.sum((predict(params, inputs) - targets) ** 2, axis=-1)


def make_params(sizes: list[int], key: jax.Array) -> Params:
    """Weights scaled by the root of their inputs, and normal biases."""
    params = []
    for inputs, outputs in zip(sizes[:-1], sizes[1:], strict=True):
        key, weight_key, bias_key = jax.random.split(key, 3)
        weight = jax.random.normal(weight_key, (inputs, outputs)) / np.sqrt(inputs)
        params.append((weight, jax.random.normal(bias_key, (outputs,))))
    return params


def make_batch(rows: int, inputs: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    """Random inputs and targets."""
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, inputs)).astype(np.float32)
    return x, random.normal(size=(rows, outputs)).astype(np.float32)


def make_strategy(devices: int, tensor: int) -> Sharded:
    """Batches split over all devices, or over some, and two layers over the others."""
    if tensor == 1:
        return Sharded(devices)
    columns, rows = PartitionSpec(None, "model"), PartitionSpec("model", None)
    return TensorParallel(
        {"data": devices // tensor, "model": tensor},
        rules=[
            ("[1][0]", columns),  # W2, whose outputs are split, and so
            ("[1][1]", PartitionSpec("model")),  # b2
            ("[2][0]", rows),  # W3, which takes them
        ],
        devices=devices,
    )


def main(argv: list[str] | None = None) -> tuple[Trainer, Any]:
    """Trains, and returns the trainer and its history: one epoch is one step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=8, help="CPU devices to fake")
    parser.add_argument("--tensor", type=int, default=1, help="ways to split W2 and W3")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args(argv)

    jax.config.update("jax_num_cpu_devices", args.devices)
    sizes = [784, args.width, args.width, args.width, 10]
    trainer = Trainer(
        make_params(sizes, jax.random.key(0)),
        optax.sgd(1e-5),
        loss_fn=loss,
        strategy=make_strategy(args.devices, args.tensor),
        enable_progress_bar=False,
    )
    batch = make_batch(args.batch_size, sizes[0], sizes[-1])
    history = trainer.fit([batch], max_epochs=args.steps)

    weight = trainer.state.params[1][0]
    print(f"{trainer.strategy}: the second weight {weight.shape} is on")
    print(f"  {len(weight.sharding.device_set)} devices, {weight.sharding.spec}")
    print(f"loss {history['loss'][0]:.4f} -> {history['loss'][-1]:.4f}")
    return trainer, history


if __name__ == "__main__":
    main()
