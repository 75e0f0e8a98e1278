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


class Field(eqx.Module):
    """A vector field that depends on time."""

    mlp: eqx.nn.MLP

    def __init__(self, size):
        self.mlp = eqx.nn.MLP(
            size + 1,
            size,
            width_size=8,
            depth=1,
            activation=jax.nn.softplus,
            final_activation=jnp.tanh,
            key=jax.random.key(0),
        )

    def __call__(self, t, y, args):
        return self.mlp(jnp.append(y, t))


def solve(term, times, start, **options):
    return diffrax.diffeqsolve(
        term,
        diffrax.Heun(),
        t0=times[0],
        t1=times[-1],
        y0=start,
        stepsize_controller=ADAPTIVE,
        **options,
    ).ys


class NeuralODE(eqx.Module):
    """The path from a point, at the times asked for."""

    field: Field

    def __init__(self):
        self.field = Field(2)

    def __call__(self, inputs):
        start, times = inputs
        options = {"dt0": times[1] - times[0], "saveat": diffrax.SaveAt(ts=times)}
        return solve(diffrax.ODETerm(self.field), times, start, max_steps=32, **options)


def generator(seed):
    return np.random.default_rng(seed)


def spirals(count, seed):
    """Returns the starts of spirals, and their points at `TIMES`."""
    start = generator(seed).uniform(-1, 1, size=(count, 2)).astype(np.float32)
    turn = np.array([[np.cos(TIMES), np.sin(TIMES)], [-np.sin(TIMES), np.cos(TIMES)]])
    paths = np.exp(-TIMES)[:, None] * np.einsum("ijt,ni->ntj", turn, start)
    return start, paths.astype(np.float32)


def of_ode(seed):
    start, paths = spirals(ROWS, seed)
    return (start, Whole(TIMES)), paths


def ode_loss(model, inputs, paths):
    start, times = inputs
    predicted = jax.vmap(lambda row: model((row, times)))(start)
    return jnp.mean((predicted - paths) ** 2)


def ode_example(model, inputs, path):
    return jnp.mean((model(inputs) - path) ** 2)


FORMS = {
    "loss_fn": {"loss_fn": ode_loss},
    "mse": {"loss": "mse"},
    "criterion": {"loss": lambda paths, y: jnp.mean((paths - y) ** 2)},
    "per_example": {"loss_fn": per_example(ode_example)},
}
"""Arguments of a trainer, by how its loss is written."""

OPTIMIZER = optax.adam(1e-2)
EIGHT = "--xla_force_host_platform_device_count=8"


def data():
    return [of_ode(seed) for seed in range(BATCHES)]


def without_whole(batch):
    return jax.tree.map(
        lambda node: node.array if isinstance(node, Whole) else node,
        batch,
        is_leaf=lambda node: isinstance(node, Whole),
    )


@functools.cache
def by_hand(stop=EPOCHS * BATCHES):
    """The model trained until step `stop`, and the loss of every step."""
    batches = [without_whole(batch) for batch in (data() * EPOCHS)[:stop]]
    return hand_written(NeuralODE(), OPTIMIZER, batches, 1, ode_loss)


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
    paths = [
        jax.vmap(lambda row: model((row, TIMES)))(start) for (start, _), _ in batches
    ]
    predicted = trainer.predict(batches)
    np.testing.assert_allclose(predicted, np.concatenate(paths), rtol=1e-5, atol=1e-6)

    expected = np.mean(
        [np.mean((a - b) ** 2) for a, (_, b) in zip(paths, batches, strict=True)]
    )
    loss = trainer.validate(batches)["val_loss"]
    np.testing.assert_allclose(loss, expected, rtol=1e-5)

    for passes in (trainer.predict, trainer.validate):
        with pytest.raises(
            jax.errors.JaxRuntimeError, match="solver steps was reached"
        ):
            passes([batches[0], too_fine(batches[1])])
