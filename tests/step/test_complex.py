"""Complex parameters, beside loops by hand on their real and imaginary parts."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import Recorder, quiet

from jaxdp import (
    FSDP,
    Bitwise,
    Callback,
    LocalSGD,
    Part,
    Pmap,
    Sharded,
    SingleDevice,
    ZeRO,
    per_example,
)
from jaxdp.callbacks import GradientMonitor, NanGuard, WeightAveraging

RNG = np.random.default_rng(0)


def drawn(*shape):
    numbers = RNG.normal(size=shape) + 1j * RNG.normal(size=shape)
    return numbers.astype(np.complex64)


X, Y = drawn(16, 8), drawn(16)
START = np.full(8, 0.5, np.complex64)


class Linear(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return (x * self.weight).sum()


@per_example
def squares(model, x, y):
    return jnp.abs(model(x) - y) ** 2


def loss_at(weight):
    return (jnp.abs(X @ weight - Y) ** 2).mean()


def of_parts(parts):
    return loss_at(parts[0] + 1j * parts[1])


def in_parts(optimizer, steps):
    """Losses of plain descent on real and imaginary parts."""
    params = jnp.stack([START.real, START.imag])
    state, losses = optimizer.init(params), []
    optimizer = optax.with_extra_args_support(optimizer)
    for _ in range(steps):
        value, grad = jax.value_and_grad(of_parts)(params)
        more = {"value": value, "grad": grad, "value_fn": of_parts}
        updates, state = optimizer.update(grad, state, params, **more)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return losses


def with_uphill(optimizer, steps):
    """The same in complex numbers, by the conjugates of JAX's gradients."""
    params = jnp.asarray(START)
    state, losses = optimizer.init(params), []
    for _ in range(steps):
        value, grad = jax.value_and_grad(loss_at)(params)
        updates, state = optimizer.update(jnp.conj(grad), state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return losses


SEARCH = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10))
STEEP = optax.scale_by_backtracking_linesearch(10, slope_rtol=0.4)
ZOOM = optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(10))


def fitted(optimizer, strategy=None, steps=8, **options):
    recorder = Recorder()
    options["callbacks"] = [recorder, *options.get("callbacks", ())]
    trainer = quiet(
        Linear(jnp.asarray(START)), optimizer, strategy=strategy or SingleDevice(),
        **{"loss_fn": None if isinstance(optimizer, list) else squares} | options,
    )  # fmt: skip
    trainer.fit([(X, Y)], max_epochs=steps)
    return recorder.losses, trainer


LINE_SEARCHES = {
    "lbfgs": optax.lbfgs(),
    "backtracking": SEARCH,
    "zoom": ZOOM,
    "steep": optax.chain(optax.sgd(1.0), STEEP),
    "lbfgs_steep": optax.lbfgs(linesearch=STEEP),
}
BY_HAND = {
    "sgd": (optax.sgd(0.02), in_parts),
    "momentum": (optax.sgd(0.02, momentum=0.9), in_parts),
    "adam": (optax.adam(0.05), with_uphill),
    **{name: (optimizer, in_parts) for name, optimizer in LINE_SEARCHES.items()},
}


@pytest.mark.slow_cases("lbfgs_steep", "backtracking")
@pytest.mark.parametrize("name", BY_HAND)
def test_losses_are_those_of_descent_by_hand(name):
    optimizer, by_hand = BY_HAND[name]
    options = {"gradient_clip_val": 1e9} if name == "momentum" else {}
    losses, _ = fitted(optimizer, **options)
    np.testing.assert_allclose(losses, by_hand(optimizer, 8), rtol=1e-4)
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    "strategy, options",
    [
        (Sharded(8), {"accumulate_grad_batches": 1, "callbacks": [NanGuard("skip")]}),
        (Pmap(8), {}),
        (FSDP(8), {"callbacks": [WeightAveraging(0.0), GradientMonitor()]}),
        (ZeRO(devices=8), {}),
        (Bitwise(Sharded(4)), {}),
        (LocalSGD(1, outer=optax.sgd(1.0), devices=4), {}),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(value)[:20],
)
def test_under_every_strategy(strategy, options):
    losses, _ = fitted(optax.sgd(0.02), strategy, **options)
    np.testing.assert_allclose(losses, in_parts(optax.sgd(0.02), 8), rtol=1e-4)


def test_parts_and_hooks_get_conjugates():
    class See(Callback):
        def inside_step(self, grads, updates, state):
            uphill = jnp.conj(grads.weight) * -0.02
            return {"apart": jnp.abs(uphill - updates.weight).max()}

        def on_train_batch_end(self, trainer, metrics, batch_idx):
            assert metrics["apart"] < 1e-5

    def loss_fn(model, x, y):
        return jnp.abs(jax.vmap(model)(x) - y) ** 2

    losses, _ = fitted([Part("weight", loss_fn, optax.sgd(0.02))], callbacks=[See()])
    np.testing.assert_allclose(losses, in_parts(optax.sgd(0.02), 8), rtol=1e-4)
