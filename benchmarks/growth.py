"""The growth of costs with the model, the callbacks, the devices and the data.

python -m benchmarks.growth [--only leaves,rows] [--turns 5]

Prints Markdown tables. Each case is a process of its own, in which `Trainer.fit` and a
loop written by hand train the same model over the same batches, an epoch each in turns;
a figure is the median over the turns. Steps are in microseconds. For the rows of a data
set, prints the milliseconds of an epoch of 20 steps over a shuffled `DataLoader`. It
also prints by how many MiB the process had grown at its peak, in one process for each
loop.
"""

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .worker import peak_mib

ROOT = Path(__file__).parent.parent
CASES = {
    "leaves": (10, 100, 1000),
    "callbacks": (0, 5, 20),
    "metrics": (1, 10, 50),
    "devices": (1, 8, 64),
    "processes": (1, 2, 4),
    "rows": (10**3, 10**5, 10**7),
}
TITLES = {
    "leaves": "arrays of the model",
    "callbacks": "callbacks with a hook for each step",
    "metrics": "metrics",
    "devices": "faked devices",
    "processes": "processes, one device each",
    "rows": "rows of the data set",
}
BATCH, WIDTH, STEPS, STEPS_OF_ROWS, IN_FLIGHT = 64, 8, 200, 20, 8


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--toy", action="store_true", help="the smallest case of each")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.case:
        kind, size, loops = arguments.case
        results = measure(kind, int(size), loops, arguments.turns)
        print(json.dumps(results), flush=True)
        return
    for kind in arguments.only.split(","):
        unit = "epoch, ms" if kind == "rows" else "step, us"
        memory = " by hand, MiB | fit, MiB |" if kind == "rows" else ""
        print(f"\n| {TITLES[kind]} | by hand: {unit} | fit | ratio |{memory}")
        print("|--:" * (6 if memory else 4) + "|")
        for size in CASES[kind][: 1 if arguments.toy else None]:
            hand, fit, *peaks = run_case(kind, size, arguments.turns)
            cells = [f"{size:,}", f"{hand:.3g}", f"{fit:.3g}", f"{fit / hand:.2f}"]
            print("| " + " | ".join(cells + [f"{peak:.0f}" for peak in peaks]) + " |")


def run_case(kind: str, size: int, turns: int) -> list[float]:
    """Returns the medians of the loop by hand and of `fit`, and peaks of memory."""
    if kind == "rows":
        hand, fit = (start(kind, size, loop, turns) for loop in ("hand", "fit"))
        peaks = hand["peak"], fit["peak"]
        return [hand["hand"], fit["fit"], *peaks]
    results = start(kind, size, "hand,fit", turns)
    return [results["hand"], results["fit"]]


def start(kind: str, size: int, loops: str, turns: int) -> dict[str, float]:
    """Returns the results of a case, from process 0 of its processes."""
    count = size if kind == "processes" else 1
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.growth", "--turns", str(turns)]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(size if kind == "devices" else 1),
    }
    if count > 1:
        environment |= {
            "JAX_NUM_PROCESSES": str(count),
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        }
    processes = [
        subprocess.Popen(
            [*command, "--case", kind, str(size), loops],
            **{"cwd": ROOT, "stdout": subprocess.PIPE, "text": True},
            env=environment | ({"JAX_PROCESS_ID": str(index)} if count > 1 else {}),
        )
        for index in range(count)
    ]
    outputs = [process.communicate(timeout=900)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{kind} {size} failed")
    return json.loads(outputs[0].splitlines()[-1])


def measure(kind: str, size: int, loops: str, turns: int) -> dict[str, float]:
    """Trains by the loops in turns; returns the median of each, and the peak of memory.

    An epoch of `fit` lasts from the end of the hook at its start until that hook is
    called again, so that all of its work between epochs counts.
    """
    import jaxdp

    if kind == "processes" and size > 1:
        jaxdp.distributed.initialize()
    import equinox as eqx
    import jax
    import optax

    from jaxdp.callbacks import Callback

    leaves = size if kind == "leaves" else 10
    num_metrics = size if kind == "metrics" else 1
    num_callbacks = size if kind == "callbacks" else 0

    def make_model() -> Any:
        # Two arrays for each layer.
        keys = jax.random.split(jax.random.key(0), leaves // 2)
        return eqx.nn.Sequential([eqx.nn.Linear(WIDTH, WIDTH, key=key) for key in keys])

    metrics = {f"error{i}": power_error(i) for i in range(num_metrics)}
    loader, steps = make_loader(kind, size), STEPS_OF_ROWS if kind == "rows" else STEPS
    before = peak_mib()

    hand = make_loop(make_model(), metrics, num_callbacks, loader, steps)
    times: dict[str, list[float]] = {"hand": [], "fit": []}

    class Turns(Callback):
        end = None

        def on_train_epoch_start(self, trainer: Any) -> None:
            begin = time.perf_counter()
            if self.end is not None:
                times["fit"].append(begin - self.end)
            if "hand" in loops:
                hand()
                times["hand"].append(time.perf_counter() - begin)
            self.end = time.perf_counter()

    class Idle(Callback):
        def on_train_batch_end(self, trainer: Any, metrics: Any, batch_idx: int):
            pass

    if "fit" in loops:
        trainer = jaxdp.Trainer(
            make_model(),
            optax.adam(1e-3),
            loss="mse",
            metrics=metrics,
            callbacks=[Turns(), *(Idle() for _ in range(num_callbacks))],
        )
        # The first epoch compiles, and the last one's start ends the one before.
        trainer.fit(loader, max_epochs=turns + 2, limit_train_batches=steps)
    else:
        for _ in range(turns + 1):
            begin = time.perf_counter()
            hand()
            times["hand"].append(time.perf_counter() - begin)
    scale = 1e3 if kind == "rows" else 1e6 / steps
    medians = {
        loop: scale * statistics.median(values[1:])
        for loop, values in times.items()
        if values
    }
    return medians | {"peak": peak_mib() - before}


def power_error(power: int) -> Callable[[Any, Any], Any]:
    """Returns a metric of one example, which differs for each `power`."""
    return lambda prediction, target: abs(prediction - target).mean() * (power + 1)


def make_loader(kind: str, size: int) -> Iterable[Any]:
    """Returns ready batches; or a shuffled `DataLoader` of `size` rows."""
    import numpy as np

    rng = np.random.default_rng(0)
    shape = (size if kind == "rows" else BATCH, WIDTH)
    if kind != "rows":
        draw = lambda: rng.standard_normal(shape, np.float32)  # noqa: E731
        return [(draw(), draw()) for _ in range(STEPS)]
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    rows = torch.from_numpy(rng.standard_normal(shape, np.float32))
    return DataLoader(TensorDataset(rows, rows), 16, shuffle=True)


def make_loop(
    model: Any,
    metrics: dict[str, Callable[[Any, Any], Any]],
    num_callbacks: int,
    loader: Iterable[Any],
    steps: int,
) -> Callable[[], None]:
    """Returns an epoch of a loop by hand that does what `fit` does.

    It sums the loss and the metrics on the devices, calls as many empty functions a
    step as there are callbacks, and reads the means once, at the end.
    """
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    params, static = eqx.partition(model, eqx.is_inexact_array)
    optimizer = optax.adam(1e-3)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
    whole = NamedSharding(mesh, PartitionSpec())
    by_rows = NamedSharding(mesh, PartitionSpec("data"))

    def loss_of(params: Any, x: Any, y: Any) -> Any:
        outputs = jax.vmap(eqx.combine(params, static))(x)
        values = [jax.vmap(metric)(outputs, y).mean() for metric in metrics.values()]
        return jnp.mean((outputs - y) ** 2), jnp.stack(values)

    def step(state: Any, x: Any, y: Any) -> Any:
        params, opt_state, sums = state
        (loss, values), grads = jax.value_and_grad(loss_of, has_aux=True)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        sums = sums + jnp.concatenate([loss[None], values])
        return (optax.apply_updates(params, updates), opt_state, sums), loss

    step = jax.jit(
        *(step,),
        donate_argnums=0,
        in_shardings=(whole, by_rows, by_rows),
        out_shardings=whole,
    )
    state = params, optimizer.init(params), jnp.zeros(1 + len(metrics))
    state = jax.jit(lambda state: state, out_shardings=whole)(state)
    hooks = [lambda loss: None for _ in range(num_callbacks)]

    def place(array: Any) -> Any:
        if jax.process_count() == 1:
            return array
        rows = np.split(array, jax.process_count())[jax.process_index()]
        return jax.make_array_from_process_local_data(by_rows, rows)

    def train_epoch() -> None:
        nonlocal state
        waiting: list[Any] = []
        for x, y in itertools.islice(loader, steps):
            x, y = np.asarray(x), np.asarray(y)  # tensors of a `DataLoader`
            state, loss = step(state, place(x), place(y))
            waiting.append(loss)
            if len(waiting) > IN_FLIGHT:
                waiting.pop(0).block_until_ready()
            for hook in hooks:
                hook(loss)
        params, opt_state, sums = state
        np.asarray(sums)
        state = params, opt_state, sums * 0

    return train_epoch


if __name__ == "__main__":
    main()
