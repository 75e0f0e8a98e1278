"""On one accelerator: a model that fills it, LeNet, and one that is all overhead.

python -m benchmarks.gpu [--only big-f32,tiny] [--repeats 3] [--output DIR]

Step times, those of jaxdp over those of E (the loop written by hand), and MFU: the
share of the matrix rate, measured in the same run, that the arithmetic of the model
reaches. Needs jax, equinox, optax and torch, and no network. All loops of a case live
in this process and train in turn; a time is the difference of fits of two lengths.
"""

import argparse
import collections
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import SingleDevice, Trainer

from .models import build, mean_loss
from .report import describe_machine
from .works import Work

Run = Callable[[int], float]
"""Trains so many epochs, and returns the seconds that it took."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A work, the precision, and how many epochs longer the longer fit is."""

    work: Work
    precision: str
    epochs: int


def _big(name: str, sizes: tuple[int, ...], batch: int, steps: int) -> Work:
    title = f"MLP of {len(sizes) - 2} layers of {sizes[1]}, batch {batch}"
    return Work(
        name, title, "mlp", sizes, batch, steps, 1, 0, "cross_entropy", 5e-2, 1e-5
    )


def cases(toy: bool) -> dict[str, Case]:
    """By name; at toy size for tests."""
    tiny = Work(
        *("tiny", "MLP 4-32-4, batch 16", "mlp", (4, 32, 4), 16),
        *(8 if toy else 1000, 1, 0, "mse", 1e-2),
    )
    lenet = Work(
        *("lenet", "LeNet, batch 256", "lenet", (), 16 if toy else 256),
        *(2 if toy else 60, 1, 0, "cross_entropy", 5e-2),
    )
    depth, width, batch = (2, 16, 32) if toy else (90, 2056, 6912)
    sizes = 784, *([width] * depth), 10
    steps = 2 if toy else 8
    return {
        "big-f32": Case(_big("big-f32", sizes, batch, steps), "32-true", 3),
        "big-bf16": Case(_big("big-bf16", sizes, batch, steps), "bf16-mixed", 3),
        "lenet": Case(lenet, "32-true", 20),
        "tiny": Case(tiny, "32-true", 10),
    }


def matrix_rate(dtype: Any, size: int) -> float:
    """Operations per second of a chain of square products, the best of five."""
    key_x, key_w = jax.random.split(jax.random.key(0))
    x = jax.random.normal(key_x, (size, size), dtype)
    w = jax.random.normal(key_w, (size, size), dtype) / jnp.sqrt(size).astype(dtype)
    times = 16

    @jax.jit
    def chain(x, w):
        return jax.lax.fori_loop(0, times, lambda _, x: x @ w, x)

    chain(x, w).block_until_ready()
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        chain(x, w).block_until_ready()
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 * times / best


def operations(work: Work) -> float:
    """Of the matrix products of a step: forward, and twice that backward.

    Nobody needs the gradient of the first layer's input, so that is left out.
    """
    sides = iter([26, 9])  # of what LeNet's convolutions give
    forward = []
    for shape in work.shapes():
        if len(shape) > 1:
            places = next(sides) ** 2 if len(shape) == 4 else 1
            forward.append(2 * work.batch * places * float(np.prod(shape)))
    return 3 * sum(forward) - forward[0]


def expert(case: Case) -> tuple[Run, Callable[[], Any]]:
    """E: jit over partitioned arrays, donated state, the next batch on its way."""
    work, optimizer = case.work, optax.adam(case.work.rate)
    params, static = eqx.partition(build(work), eqx.is_inexact_array)
    state = params, optimizer.init(params)
    del params
    batches = work.batches()

    def in_half(tree):
        return jax.tree.map(
            lambda a: a.astype(jnp.bfloat16) if eqx.is_inexact_array(a) else a, tree
        )

    def step(state, x, y):
        params, opt_state = state

        def loss_of(params):
            rows = x
            if case.precision == "bf16-mixed":
                params, rows = in_half((params, rows))
            model = eqx.combine(params, static)
            return mean_loss(
                lambda row: model(row).astype(jnp.float32), rows, y, work.criterion
            )

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (eqx.apply_updates(params, updates), opt_state), loss

    step = jax.jit(step, donate_argnums=0)

    def run(epochs: int) -> float:
        nonlocal state
        begin = time.perf_counter()
        waiting = collections.deque()
        following = jax.device_put(batches[0])
        for number in range(epochs * len(batches)):
            batch = following
            following = jax.device_put(batches[(number + 1) % len(batches)])
            state, loss = step(state, *batch)
            waiting.append(loss)
            if len(waiting) > 8:
                waiting.popleft().block_until_ready()
        float(waiting[-1])
        jax.block_until_ready(state)
        return time.perf_counter() - begin

    return run, lambda: eqx.combine(state[0], static)


def ours(case: Case, **options: Any) -> tuple[Run, Callable[[], Any]]:
    """jaxdp as users start it, from a plain `DataLoader`."""
    work = case.work
    if case.precision != "32-true":
        options["precision"] = case.precision
    trainer = Trainer(
        build(work),
        optax.adam(work.rate),
        loss=work.criterion,
        strategy=SingleDevice(),
        default_root_dir=tempfile.gettempdir(),
        **options,
    )
    loader = work.loader()

    def run(epochs: int) -> float:
        begin = time.perf_counter()
        trainer.fit(loader, max_epochs=trainer.current_epoch + epochs)
        return time.perf_counter() - begin

    return run, lambda: trainer.model


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Seconds per step of each loop, the ratios, and what could not be run."""
    found: dict[str, Any] = {"title": case.work.title, "precision": case.precision}
    found |= {"seconds_per_step": {}, "of_expert": {}, "loss": {}, "not_run": {}}
    loops = {}
    for name, make in {
        "expert": lambda: expert(case),
        "jaxdp": lambda: ours(case),
        "jaxdp_auto": lambda: ours(case, steps_per_execution="auto"),
    }.items():
        try:
            loops[name] = make()
            loops[name][0](1)  # compiles
            loops[name][0](1)
        except Exception as error:  # out of memory, or not available: say so, go on
            loops.pop(name, None)
            found["not_run"][name] = f"{type(error).__name__}: {error}"[:300]
    times = {name: [] for name in loops}
    for turn in range(repeats):
        for name in loops if turn % 2 == 0 else reversed(loops):
            run, _ = loops[name]
            short, long = run(1), run(1 + case.epochs)
            steps = case.epochs * case.work.steps
            times[name].append((long - short) / steps)
    x, y = case.work.batches()[0]
    final = eqx.filter_jit(mean_loss)
    for name, (_, model) in loops.items():
        found["loss"][name] = float(final(model(), x, y, case.work.criterion))
        found["seconds_per_step"][name] = statistics.median(times[name])
        pairs = zip(times[name], times.get("expert", ()), strict=False)
        values = [ours / theirs for ours, theirs in pairs]
        if values:
            found["of_expert"][name] = statistics.median(values)
    for name, loss in found["loss"].items():
        wanted = found["loss"].get("expert", loss)
        if abs(loss - wanted) > case.work.tolerance * abs(wanted):
            found["not_run"][name] = f"ended at the loss {loss:g}, E at {wanted:g}"
    return found


def markdown(results: dict[str, Any]) -> str:
    """A table with a row for each case and loop."""
    rates = ", ".join(
        f"{name} {rate / 1e12:.3g}" for name, rate in results["matrix_rates"].items()
    )
    lines = [
        f"{results['device']}; matrix rate in TFLOP/s: {rates}.",
        "",
        "| model | precision | loop | ms per step | of E | MFU |",
        "|---|---|---|---|---|---|",
    ]
    for case in results["cases"].values():
        for name, value in case["seconds_per_step"].items():
            beside = case["of_expert"].get(name)
            lines.append(
                f"| {case['title']} | {case['precision']} | {name}"
                f" | {value * 1e3:.4g} | {'' if beside is None else f'{beside:.3f}'}"
                f" | {case['mfu'][name]:.1%} |"
            )
        for name, reason in case["not_run"].items():
            reason = " ".join(reason.split()).replace("|", "/")
            lines.append(
                f"| {case['title']} | {case['precision']} | {name} | {reason} | | |"
            )
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measures, writes and prints; returns what the JSON file holds."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--only", help=f"of {', '.join(cases(False))}")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument(
        "--toy", action="store_true", help="tiny, to see whether it runs"
    )
    args = parser.parse_args(argv)
    every = cases(args.toy)
    names = args.only.split(",") if args.only else list(every)
    for name in names:
        if name not in every:
            parser.error(f"`--only` has {name!r}; there are {', '.join(every)}.")

    size = 64 if args.toy else 8192
    device = jax.devices()[0]
    if device.platform == "cpu" and not args.toy:
        parser.error("this needs a GPU or TPU, and JAX has a CPU; `--toy` runs on it.")
    results: dict[str, Any] = {
        "device": device.device_kind,
        "platform": device.client.platform_version,
        "machine": describe_machine(),
        "matrix_rates": {
            "32-true": matrix_rate(jnp.float32, size),
            "bf16-mixed": matrix_rate(jnp.bfloat16, size),
        },
        "cases": {},
    }
    args.output.mkdir(parents=True, exist_ok=True)
    for name in names:
        case = every[name]
        found = measure(case, args.repeats)
        rate = results["matrix_rates"][case.precision]
        found["mfu"] = {
            loop: operations(case.work) / (value * rate)
            for loop, value in found["seconds_per_step"].items()
        }
        results["cases"][name] = found
        jax.clear_caches()
        (args.output / "gpu.json").write_text(json.dumps(results, indent=1) + "\n")
        (args.output / "gpu.md").write_text(markdown(results))
    print(markdown(results))
    return results


if __name__ == "__main__":
    main()
