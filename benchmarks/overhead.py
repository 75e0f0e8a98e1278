"""What the loop costs: a tiny model, where nearly all time is the host's.

    python benchmarks/overhead.py

MLP 4 -> 32 -> 4, batches of 16, Adam: the loop of an expert by hand (`jax.jit` over
partitioned arrays, donated state, ready NumPy batches, no reading of losses), the loop
of Equinox's tutorials (`filter_jit`, a torch DataLoader), and jaxdp from the same NumPy
batches and from a torch DataLoader. Each runs in turn, several times over; times are
medians, ratios are to the expert's. All end at the same loss, which is checked.
"""

import argparse
import collections
import statistics
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch.utils.data import DataLoader, TensorDataset

from jaxdp import SingleDevice, Trainer

BATCH = 16


def make_model():
    return eqx.nn.MLP(4, 4, 32, 1, key=jax.random.key(0))


def compute_loss(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def expert(x, y):
    params, static = eqx.partition(make_model(), eqx.is_inexact_array)
    params = jax.tree.map(jnp.copy, params)
    optimizer = optax.adam(3e-4)
    opt_state = optimizer.init(params)

    def step(params, opt_state, x, y):
        def loss(params):
            return compute_loss(eqx.combine(params, static), x, y)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return eqx.apply_updates(params, updates), opt_state, value

    step = jax.jit(step, donate_argnums=(0, 1))
    batches = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH)]

    def epoch():
        nonlocal params, opt_state
        waiting = collections.deque()
        for batch in batches:
            params, opt_state, value = step(params, opt_state, *batch)
            waiting.append(value)
            if len(waiting) > 8:
                waiting.popleft().block_until_ready()
        jax.block_until_ready(params)

    return epoch, lambda: eqx.combine(params, static)


def tutorial(x, y):
    model, optimizer = make_model(), optax.adam(3e-4)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def make_step(model, opt_state, x, y):
        loss, grads = eqx.filter_value_and_grad(compute_loss)(model, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, model)
        return eqx.apply_updates(model, updates), opt_state, loss

    loader = DataLoader(TensorDataset(torch.tensor(x), torch.tensor(y)), BATCH)

    def epoch():
        nonlocal model, opt_state
        for a, b in loader:
            model, opt_state, loss = make_step(model, opt_state, a.numpy(), b.numpy())
            loss.item()

    return epoch, lambda: model


def ours(x, y, loader):
    trainer = Trainer(
        make_model(), optax.adam(3e-4), loss="mse", strategy=SingleDevice()
    )

    def epoch():
        trainer.fit(loader, max_epochs=trainer.current_epoch + 1)

    return epoch, lambda: trainer.model


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=4000, help="per epoch")
    parser.add_argument("--epochs", type=int, default=7, help="of each, in turn")
    args = parser.parse_args(argv)
    x = np.random.default_rng(0).normal(size=(args.steps * BATCH, 4)).astype("f4")
    y = np.sin(x)
    arrays = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH)]
    tensors = DataLoader(TensorDataset(torch.tensor(x), torch.tensor(y)), BATCH)
    loops = {
        "expert": expert(x, y),
        "tutorial, DataLoader": tutorial(x, y),
        "jaxdp, NumPy": ours(x, y, arrays),
        "jaxdp, DataLoader": ours(x, y, tensors),
    }
    times = {name: [] for name in loops}
    for round_ in range(args.epochs + 1):
        for name, (epoch, _) in loops.items():
            start = time.perf_counter()
            epoch()
            if round_:  # the first compiles
                times[name].append((time.perf_counter() - start) / args.steps)
    losses = [float(compute_loss(model(), x, y)) for _, model in loops.values()]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-4)
    medians = {name: statistics.median(values) for name, values in times.items()}
    print("| loop | us per step | of the expert's |\n|---|---|---|")
    for name, median in medians.items():
        print(f"| {name} | {median * 1e6:.0f} | {median / medians['expert']:.2f} |")
    return medians


if __name__ == "__main__":
    main()
