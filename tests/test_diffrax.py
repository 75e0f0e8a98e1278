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
    """A vector field, or with `channels` a matrix field, that depends on time."""

    mlp: eqx.nn.MLP
    shape: tuple[int, ...] = eqx.field(static=True)

    def __init__(self, size, *channels, seed=0):
        self.shape = (size, *channels)
        self.mlp = eqx.nn.MLP(
            size + 1,
            size * int(np.prod(channels)),
            width_size=8,
            depth=1,
            activation=jax.nn.softplus,
            final_activation=jnp.tanh,
            key=jax.random.key(seed),
        )

    def __call__(self, t, y, args):
        return self.mlp(jnp.append(y, t)).reshape(self.shape)


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
    throw: bool = eqx.field(static=True)

    def __init__(self, throw):
        self.field = Field(2)
        self.throw = throw

    def __call__(self, inputs):
        start, times = inputs
        options = {"dt0": times[1] - times[0], "saveat": diffrax.SaveAt(ts=times)}
        options |= {"max_steps": 32, "throw": self.throw}
        return solve(diffrax.ODETerm(self.field), times, start, **options)


class NeuralCDE(eqx.Module):
    """The logit of a path, given by the coefficients of its cubic spline."""

    initial: eqx.nn.Linear
    field: Field
    readout: eqx.nn.Linear
    throw: bool = eqx.field(static=True)

    def __init__(self, throw):
        keys = jax.random.split(jax.random.key(1))
        self.initial = eqx.nn.Linear(3, 4, key=keys[0])
        self.field = Field(4, 3)
        self.readout = eqx.nn.Linear(4, "scalar", key=keys[1])
        self.throw = throw

    def __call__(self, inputs):
        times, coefficients = inputs
        path = diffrax.CubicInterpolation(times, coefficients)
        term = diffrax.ControlTerm(self.field, path).to_ode()
        start = self.initial(path.evaluate(times[0]))
        options = {"dt0": None, "max_steps": 64, "throw": self.throw}
        return self.readout(solve(term, times, start, **options)[-1])


def generator(seed):
    return np.random.default_rng(seed)


def spirals(count, seed):
    """Where they start, and where they are at `TIMES`."""
    start = generator(seed).uniform(-1, 1, size=(count, 2)).astype(np.float32)
    turn = np.array([[np.cos(TIMES), np.sin(TIMES)], [-np.sin(TIMES), np.cos(TIMES)]])
    paths = np.exp(-TIMES)[:, None] * np.einsum("ijt,ni->ntj", turn, start)
    return start, paths.astype(np.float32)


def of_ode(seed):
    start, paths = spirals(ROWS, seed)
    return (start, Whole(TIMES)), paths


def of_cde(seed):
    """Each row has times of its own, and a path that turns one way or the other."""
    _, paths = spirals(ROWS, seed)
    right = generator(seed).uniform(size=ROWS) < 0.5
    paths[right, :, 1] *= -1
    times = TIMES * generator(seed).uniform(0.5, 1.5, size=(ROWS, 1))
    times = times.astype(np.float32)
    paths = np.concatenate([times[..., None], paths], axis=-1)
    coefficients = jax.vmap(diffrax.backward_hermite_coefficients)(times, paths)
    coefficients = tuple(map(np.asarray, coefficients))
    return (times, coefficients), right.astype(np.float32)


def ode_loss(model, inputs, paths):
    start, times = inputs
    predicted = jax.vmap(lambda row: model((row, times)))(start)
    return jnp.mean((predicted - paths) ** 2)


def ode_example(model, inputs, path):
    return jnp.mean((model(inputs) - path) ** 2)


def cde_loss(model, inputs, labels):
    logits = jax.vmap(model)(inputs)
    return optax.sigmoid_binary_cross_entropy(logits, labels).mean()


def cde_example(model, inputs, label):
    logit = model(inputs)
    value = optax.sigmoid_binary_cross_entropy(logit, label)
    return value, {"accuracy": jnp.float32((logit > 0) == (label > 0.5))}


MODELS = {"ode": NeuralODE, "cde": NeuralCDE}
BATCHES_OF = {"ode": of_ode, "cde": of_cde}
LOSSES = {"ode": ode_loss, "cde": cde_loss}
FORMS = {
    "ode loss_fn": {"loss_fn": ode_loss},
    "ode mse": {"loss": "mse"},
    "ode criterion": {"loss": lambda paths, y: jnp.mean((paths - y) ** 2)},
    "ode per_example": {"loss_fn": per_example(ode_example)},
    "cde loss_fn": {"loss_fn": cde_loss},
    "cde named": {"loss": "binary_cross_entropy", "metrics": ["accuracy"]},
    "cde per_example": {"loss_fn": per_example(cde_example)},
}
"""Arguments of a trainer, by the model and how its loss is written."""

OPTIMIZER = optax.adam(1e-2)
EIGHT = "--xla_force_host_platform_device_count=8"


def data_of(port):
    return [BATCHES_OF[port](seed) for seed in range(BATCHES)]


def without_whole(batch):
    return jax.tree.map(
        lambda node: node.array if isinstance(node, Whole) else node,
        batch,
        is_leaf=lambda node: isinstance(node, Whole),
    )


@functools.cache
def by_hand(port, stop=EPOCHS * BATCHES):
    """The model trained until step `stop`, and the loss of every step."""
    data = [without_whole(batch) for batch in (data_of(port) * EPOCHS)[:stop]]
    return hand_written(MODELS[port](True), OPTIMIZER, data, 1, LOSSES[port])


def make(form, strategy=None, *, throw=True, **options):
    model = MODELS[form.split()[0]](throw)
    strategy = SingleDevice() if strategy is None else strategy
    return quiet(model, OPTIMIZER, strategy=strategy, **FORMS[form], **options)


def train(form, strategy, *, throw):
    """The loss of every step."""
    recorder = Recorder()
    trainer = make(form, strategy, throw=throw, callbacks=[recorder])
    trainer.fit(data_of(form.split()[0]), max_epochs=EPOCHS)
    return recorder.losses


@pytest.mark.slow_but("cde per_example")  # each takes half a minute to compile
@pytest.mark.parametrize("form", FORMS)
def test_losses_are_those_of_a_loop_by_hand(form):
    losses = train(form, SingleDevice(), throw=True)
    assert sum(losses[-BATCHES:]) < sum(losses[:BATCHES])
    np.testing.assert_allclose(losses, by_hand(form.split()[0])[1], rtol=1e-5)


@pytest.mark.slow_but("cde per_example")
@pytest.mark.parametrize("form", [f for f in FORMS if f.startswith("cde")])
def test_solvers_that_do_not_throw_agree_on_eight_devices(form):
    """Those of the others check more than their results: times."""
    losses = train(form, Sharded(), throw=False)
    np.testing.assert_allclose(losses, by_hand(form.split()[0])[1], rtol=1e-5)


@pytest.mark.slow_but("ode per_example")
@pytest.mark.parametrize("form", ["ode loss_fn", "ode per_example"])
def test_solvers_that_make_nan_agree_on_eight_devices(form):
    script = f"""
import json
import test_diffrax
from jaxdp import Sharded
print(json.dumps(test_diffrax.train({form!r}, Sharded(), throw=True)))
"""
    flags = " ".join([os.environ.get("XLA_FLAGS", ""), EIGHT])
    done = run_python(script, EQX_ON_ERROR="nan", XLA_FLAGS=flags)
    assert done.returncode == 0, done.stderr
    losses = json.loads(done.stdout)
    np.testing.assert_allclose(losses, by_hand(form.split()[0])[1], rtol=1e-5)


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
    good = data_of("ode")
    bad = [*good[:2], spoil(good[2]), good[3]]
    trainer = make("ode loss_fn")
    with pytest.raises(jax.errors.JaxRuntimeError, match="solver steps was reached"):
        trainer.fit(bad)

    assert trainer.global_step == 2
    expected, _ = by_hand("ode", 2)
    assert_close(trainer.model, expected)

    trainer.fit(good, max_steps=4)
    assert trainer.global_step == 4
    assert np.isfinite(trainer.history["loss"][-1])


@pytest.mark.parametrize("form", ["ode loss_fn", "ode per_example"])
def test_a_solver_that_may_raise_is_refused_on_several_devices(form):
    recorder = Recorder()
    trainer = make(form, Sharded(), callbacks=[recorder])
    with pytest.raises(ValueError) as caught:
        trainer.fit(data_of("ode"))
    for remedy in ("EQX_ON_ERROR=nan", "throw=False", "SingleDevice()"):
        assert remedy in str(caught.value)
    assert trainer.global_step == 0 and not recorder.losses
    assert eqx.tree_equal(trainer.model, NeuralODE(True))


def test_passes_solve_as_the_model_does_and_raise_as_the_solver_does():
    trainer, data = make("ode mse"), data_of("ode")
    model = NeuralODE(True)
    paths = [jax.vmap(lambda row: model((row, TIMES)))(start) for (start, _), _ in data]
    predicted = trainer.predict(data)
    np.testing.assert_allclose(predicted, np.concatenate(paths), rtol=1e-5, atol=1e-6)

    expected = np.mean(
        [np.mean((a - b) ** 2) for a, (_, b) in zip(paths, data, strict=True)]
    )
    loss = trainer.validate(data)["val_loss"]
    np.testing.assert_allclose(loss, expected, rtol=1e-5)

    for passes in (trainer.predict, trainer.validate):
        with pytest.raises(
            jax.errors.JaxRuntimeError, match="solver steps was reached"
        ):
            passes([data[0], too_fine(data[1])])
