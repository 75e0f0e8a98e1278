"""One device, jit over many, or pmap: step time and memory of a deep, wide MLP.

    python examples/tutorials/big_mlp.py --strategy sharded

The size it is about has 1.5 GB of weights and wants accelerators:

    python examples/tutorials/big_mlp.py --depth 90 --width 2056 --strategy single \
        --batch-size 6912 --devices 0
    python examples/tutorials/big_mlp.py --depth 90 --width 2056 --strategy sharded \
        --batch-size 13824 --devices 0
"""

import argparse
import time
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax

from jaxdp import Pmap, Sharded, SingleDevice, Trainer

INPUTS, OUTPUTS = 1024, 10


def make_model(depth: int, width: int) -> eqx.nn.MLP:
    """`depth` hidden layers of `width`."""
    return eqx.nn.MLP(INPUTS, OUTPUTS, width, depth, key=jax.random.key(0))


def make_batches(rows: int, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Random rows with random labels: only time and memory matter here."""
    random = np.random.default_rng(0)
    return [
        (
            random.normal(size=(rows, INPUTS)).astype(np.float32),
            random.integers(0, OUTPUTS, size=rows),
        )
        for _ in range(count)
    ]


def bytes_per_device(tree: Any) -> int:
    """Bytes that the arrays of `tree` hold on the first device."""
    return sum(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(tree))


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Runs a few steps, and returns their losses, the step time and the memory."""
    parser = argparse.ArgumentParser()
    choices = ["single", "sharded", "pmap"]
    parser.add_argument("--strategy", choices=choices, default="sharded")
    parser.add_argument("--depth", type=int, default=8, help="hidden layers")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--devices", type=int, default=8, help="CPU devices to fake; 0: the real ones"
    )
    args = parser.parse_args(argv)

    if args.devices:
        jax.config.update("jax_num_cpu_devices", args.devices)
    devices = args.devices or None
    strategies = {
        "single": SingleDevice,
        "sharded": lambda: Sharded(devices),
        "pmap": lambda: Pmap(devices),
    }
    trainer = Trainer(
        make_model(args.depth, args.width),
        optax.adam(1e-4),
        loss="cross_entropy",
        strategy=strategies[args.strategy](),
        enable_progress_bar=False,
    )
    steps = trainer.steps(make_batches(args.batch_size, 1 + args.steps))
    losses = [float(next(steps)["loss"])]  # compiles, so it is not timed
    begin = time.perf_counter()
    losses += [float(metrics["loss"]) for metrics in list(steps)]  # waits for the last
    step_time = (time.perf_counter() - begin) / args.steps

    compiled = trainer.compiled_train_step()
    memory = None if compiled is None else compiled.memory_analysis()
    live = bytes_per_device(trainer.state)
    print(f"{trainer.strategy}, {args.depth} layers of {args.width},", end=" ")
    print(f"batch {args.batch_size}")
    print(f"  step time         {step_time * 1e3:10.1f} ms")
    print("  per device:")
    print(f"  state             {live / 1e6:10.1f} MB")
    if memory is not None:
        print(f"  step: arguments   {memory.argument_size_in_bytes / 1e6:10.1f} MB")
        print(f"  step: in between  {memory.temp_size_in_bytes / 1e6:10.1f} MB")
        print(f"  step: in place    {memory.alias_size_in_bytes / 1e6:10.1f} MB")
    return {"losses": losses, "step_time": step_time, "state_bytes": live}


if __name__ == "__main__":
    main()
