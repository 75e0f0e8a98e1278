"""Diffrax's documented models, small, train as in a loop by hand.

Their solvers raise from inside the compiled step, unless they are told not to.
"""

import functools
import json
import os

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import Recorder, assert_close, hand_written, quiet, run_python

from jaxdp import Sharded, SingleDevice, Whole, per_example

diffrax = pytest.importorskip("diffrax")

ROWS, BATCHES, EPOCHS = 16, 4, 3
TIMES = np.linspace(0, 1, 7).astype(np.float32)
ADAPTIVE = diffrax.PIDController(rtol=1e-2, atol=1e-3)
"""With a solver of low order: where one of high order errs by less than rounding does,
rounding chooses its steps, and no two programs agree."""


class NeuralODE(eqx.Module):
    """The path from a point along a vector field, at the times asked for."""

    field: eqx.nn.MLP

    def __init__(self):
        functions = jax.nn.softplus, jnp.tanh
        self.field = eqx.nn.MLP(3, 2, 8, 1, *functions, key=jax.random.key(0))

    def __call__(self, inputs):
        start, times = inputs
        field = lambda t, y, args: self.field(jnp.append(y, t))  # noqa: E731
        return diffrax.diffeqsolve(
            diffrax.ODETerm(field),
            diffrax.Heun(),
            t0=times[0],
            t1=times[-1],
            dt0=times[1] - times[0],
            y0=start,
            stepsize_controller=ADAPTIVE,
            saveat=diffrax.SaveAt(ts=times),
            max_steps=32,
        ).ys


def make_batch(seed):
    """The starts of spirals and their times, and their points."""
    generator = np.random.default_rng(seed)
    start = generator.uniform(-1, 1, size=(ROWS, 2)).astype(np.float32)
    turn = np.array([[np.cos(TIMES), np.sin(TIMES)], [-np.sin(TIMES), np.cos(TIMES)]])
    paths = np.exp(-TIMES)[:, None] * np.einsum("ijt,ni->ntj", turn, start)
    return (start, Whole(TIMES)), paths.astype(np.float32)


def ode_loss(model, inputs, paths):
    start, times = inputs
    predicted = jax.vmap(lambda row: model((row, times)))(start)
    return jnp.mean((predicted - paths) ** 2)


def ode_example(model, inputs, path):
    return jnp.mean((model(inputs) - path) ** 2)


FORMS = {
    "loss_fn": {"loss_fn": ode_loss},
    "mse": {"loss": "mse"},
    "per_example": {"loss_fn": per_example(ode_example)},
}
"""Arguments of a trainer, by how its loss is written."""

OPTIMIZER = optax.adam(1e-2)
EIGHT = "--xla_force_host_platform_device_count=8"


def data():
    return [make_batch(seed) for seed in range(BATCHES)]


@functools.cache
def by_hand(stop=EPOCHS * BATCHES):
    """The model trained until step `stop`, and the loss of every step."""
    plain = [((start, TIMES), paths) for (start, _), paths in data() * EPOCHS]
    return hand_written(NeuralODE(), OPTIMIZER, plain[:stop], 1, ode_loss)


def make(form, strategy=None, **options):
    strategy = SingleDevice() if strategy is None else strategy
    return quiet(NeuralODE(), OPTIMIZER, strategy=strategy, **FORMS[form], **options)


def train(form, strategy):
    """The loss of every step."""
    recorder = Recorder()
    make(form, strategy, callbacks=[recorder]).fit(data(), max_epochs=EPOCHS)
    return recorder.losses


@pytest.mark.slow_but("per_example")  # each takes half a minute to compile
@pytest.mark.parametrize("form", FORMS)
def test_losses_are_those_of_a_loop_by_hand(form):
    losses = train(form, SingleDevice())
    assert sum(losses[-BATCHES:]) < sum(losses[:BATCHES])
    np.testing.assert_allclose(losses, by_hand()[1], rtol=1e-5)


@pytest.mark.slow_but("per_example")
@pytest.mark.parametrize("form", ["loss_fn", "per_example"])
def test_solvers_that_make_nan_agree_on_eight_devices(form):
    script = f"""
import json
import test_diffrax
from jaxdp import Sharded
print(json.dumps(test_diffrax.train({form!r}, Sharded())))
"""
    flags = " ".join([os.environ.get("XLA_FLAGS", ""), EIGHT])
    done = run_python(script, EQX_ON_ERROR="nan", XLA_FLAGS=flags)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(json.loads(done.stdout), by_hand()[1], rtol=1e-5)


def too_fine(batch):
    """Begins with a tiny step; each is at most ten times as long as the one before."""
    (start, _), paths = batch
    times = TIMES.copy()
    times[1] = 1e-36
    return (start, Whole(times)), paths


def with_nan(batch):
    (start, times), paths = batch
    start = start.copy()
    start[3] = np.nan
    return (start, times), paths


@pytest.mark.slow_but("too_fine")
@pytest.mark.parametrize("spoil", [too_fine, with_nan])
def test_a_solver_that_fails_ends_a_fit_after_the_last_good_step(spoil):
    good = data()
    bad = [*good[:2], spoil(good[2]), good[3]]
    trainer = make("loss_fn")
    with pytest.raises(jax.errors.JaxRuntimeError, match="solver steps was reached"):
        trainer.fit(bad)

    assert trainer.global_step == 2
    expected, _ = by_hand(2)
    assert_close(trainer.model, expected)

    trainer.fit(good, max_steps=4)
    assert trainer.global_step == 4
    assert np.isfinite(trainer.history["loss"][-1])


@pytest.mark.parametrize("form", ["loss_fn", "per_example"])
def test_a_solver_that_may_raise_is_refused_on_several_devices(form):
    recorder = Recorder()
    trainer = make(form, Sharded(), callbacks=[recorder])
    with pytest.raises(ValueError) as caught:
        trainer.fit(data())
    for remedy in ("EQX_ON_ERROR=nan", "throw=False", "SingleDevice()"):
        assert remedy in str(caught.value)
    assert trainer.global_step == 0 and not recorder.losses
    assert eqx.tree_equal(trainer.model, NeuralODE())


def test_passes_solve_as_the_model_does_and_raise_as_the_solver_does():
    trainer, batches = make("mse"), data()
    model = NeuralODE()
    solve = jax.vmap(lambda row: model((row, TIMES)))
    paths = [solve(start) for (start, _), _ in batches]
    predicted = trainer.predict(batches)
    np.testing.assert_allclose(predicted, np.concatenate(paths), rtol=1e-5, atol=1e-6)

    expected = np.mean(
        [np.mean((a - b) ** 2) for a, (_, b) in zip(paths, batches, strict=True)]
    )
    loss = trainer.validate(batches)["val_loss"]
    np.testing.assert_allclose(loss, expected, rtol=1e-5)

    for passes in (trainer.predict, trainer.validate):
        with pytest.raises(jax.errors.JaxRuntimeError, match="solver steps was reac"):
            passes([batches[0], too_fine(batches[1])])
