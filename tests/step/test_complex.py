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


def by_hand(optimizer, steps=8):
    """Losses of plain descent on real and imaginary parts."""

    def loss_at(parts):
        return (jnp.abs(X @ (parts[0] + 1j * parts[1]) - Y) ** 2).mean()

    params = jnp.stack([START.real, START.imag])
    state, losses = optimizer.init(params), []
    optimizer = optax.with_extra_args_support(optimizer)
    for _ in range(steps):
        value, grad = jax.value_and_grad(loss_at)(params)
        more = {"value": value, "grad": grad, "value_fn": loss_at}
        updates, state = optimizer.update(grad, state, params, **more)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return losses


SGD = optax.sgd(0.02)
STEEP = optax.scale_by_backtracking_linesearch(10, slope_rtol=0.4)


def losses_of(optimizer, strategy=None, steps=8, callbacks=(), **options):
    recorder = Recorder()
    options = {"loss_fn": None if isinstance(optimizer, list) else squares} | options
    options |= {"strategy": strategy or SingleDevice()}
    callbacks = [recorder, *callbacks]
    trainer = quiet(
        Linear(jnp.asarray(START)), optimizer, callbacks=callbacks, **options
    )
    trainer.fit([(X, Y)], max_epochs=steps)
    return recorder.losses


OPTIMIZERS = {
    "sgd": SGD,
    "momentum": optax.sgd(0.02, momentum=0.9),
    "lbfgs": optax.lbfgs(),
    "backtracking": optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10)
    ),
    "zoom": optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(10)),
    "steep": optax.chain(optax.sgd(1.0), STEEP),
    "lbfgs_steep": optax.lbfgs(linesearch=STEEP),
}


@pytest.mark.slow_cases("lbfgs_steep", "backtracking")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_are_those_of_descent_by_hand(name):
    options = {"gradient_clip_val": 1e9} if name == "momentum" else {}
    losses = losses_of(OPTIMIZERS[name], **options)
    np.testing.assert_allclose(losses, by_hand(OPTIMIZERS[name]), rtol=1e-4)
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("strategy, callbacks", [
    (Sharded(8), [NanGuard("skip")]),
    (Pmap(8), []),
    (FSDP(8), [WeightAveraging(0.0), GradientMonitor()]),
    (ZeRO(devices=8), []),
    (Bitwise(Sharded(4)), []),
    (LocalSGD(1, outer=optax.sgd(1.0), devices=4), []),
], ids=repr)  # fmt: skip
def test_under_every_strategy(strategy, callbacks):
    losses = losses_of(SGD, strategy, callbacks=callbacks)
    np.testing.assert_allclose(losses, by_hand(SGD), rtol=1e-4)


def test_parts_and_hooks_get_conjugates():
    class See(Callback):
        def inside_step(self, grads, updates, state):
            uphill = jnp.conj(grads.weight) * -0.02
            return {"apart": jnp.abs(uphill - updates.weight).max()}

        def on_train_batch_end(self, trainer, metrics, batch_idx):
            assert metrics["apart"] < 1e-5

    losses = losses_of([Part("weight", squares, SGD)], callbacks=[See()])
    np.testing.assert_allclose(losses, by_hand(SGD), rtol=1e-4)


@pytest.mark.parametrize("x, y", [(X, Y), (X.real, Y), (X, Y.real)])
def test_mse_and_mae_of_complex_numbers_are_of_their_absolute_values(x, y):
    weight = START if np.iscomplexobj(x) else START.real
    trainer = quiet(Linear(jnp.asarray(weight)), SGD, loss="mse", metrics=["mae"])
    error = abs(x @ weight - y)
    found = trainer.validate([(x, y)])
    assert found["val_loss"] == pytest.approx((error**2).mean(), 1e-5)
    assert found["val_mae"] == pytest.approx(error.mean(), 1e-5)
    before = found["val_loss"]
    trainer.fit([(x, y)])
    assert trainer.validate([(x, y)])["val_loss"] < before
