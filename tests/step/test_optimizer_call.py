"""Optimizers that evaluate the loss, beside a loop written by hand."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import Recorder, batches, linear, on_one_device, path_of, quiet

from jaxdp import FSDP, Bitwise, Pmap, Sharded, SingleDevice
from jaxdp.callbacks import WeightAveraging

RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 8)).astype(np.float32)
Y = (X @ RNG.normal(size=8) + RNG.normal(size=48) > 0).astype(np.float32)

ASCENT = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
SAM = optax.chain(  # which passes on to `sam` whatever it is given
    optax.identity(), optax.contrib.sam(optax.sgd(0.5), ASCENT, opaque_mode=True)
)
OPTIMIZERS = {
    "lbfgs": optax.lbfgs(),
    "backtracking": optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10, store_grad=True)
    ),
    "sam": SAM,
}


def ridge(model, x, y):
    """Convex, so that roundings of a line search do not grow."""
    logits = jax.vmap(model)(x)[:, 0]
    return (
        optax.sigmoid_binary_cross_entropy(logits, y) + 0.05 * (model.weight**2).sum()
    )


def by_hand(optimizer, steps):
    params, static = eqx.partition(linear(8, 1), eqx.is_inexact_array)
    opt_state, losses = optimizer.init(params), []

    def mean(params, _=0):
        return ridge(eqx.combine(params, static), X, Y).mean()

    @jax.jit
    def step(params, opt_state):
        value, grad = jax.value_and_grad(mean)(params)
        functions = {"value": value, "grad": grad, "value_fn": mean}
        if optimizer is SAM:
            functions = {"grad_fn": jax.grad(mean)}
        updates, opt_state = optimizer.update(grad, opt_state, params, **functions)
        return optax.apply_updates(params, updates), opt_state, value

    for _ in range(steps):
        params, opt_state, value = step(params, opt_state)
        losses.append(float(value))
    return losses


@pytest.mark.slow_but(
    "Sharded(8)-1-lbfgs", "Pmap(8)-1-backtracking", "SingleDevice()-1-sam"
)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("strategy, micro_batches", [
    (SingleDevice(), 1), (Sharded(8), 1), (Sharded(8), 3), (FSDP(8, min_size=1), 3),
    (Pmap(8), 1),
], ids=str)  # fmt: skip
def test_thirty_steps_are_those_of_a_loop_by_hand(name, strategy, micro_batches):
    recorder, optimizer = Recorder(), OPTIMIZERS[name]
    options = {"accumulate_grad_batches": micro_batches, "callbacks": [recorder]}
    options |= {"loss_fn": ridge, "strategy": strategy}
    xs, ys = np.split(X, micro_batches), np.split(Y, micro_batches)
    trainer = quiet(linear(8, 1), optimizer, **options)
    trainer.fit(list(zip(xs, ys, strict=True)), max_epochs=30)
    np.testing.assert_allclose(recorder.losses, by_hand(optimizer, 30), rtol=1e-5)


def comparing():
    """Keeps in its state how far what the functions give is from what was given."""

    def update(updates, state, params, *, value, grad, value_fn, grad_fn):
        def far(tree):
            pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(grad), strict=True)
            each = [jnp.abs(a - b).max() / jnp.abs(b).max() for a, b in pairs]
            return jnp.stack(each).max()

        again, derived = jax.value_and_grad(value_fn)(params)
        found = jnp.stack([jnp.abs(again - value), far(derived), far(grad_fn(params))])
        updates = jax.tree.map(lambda grad: -0.1 * grad, updates)
        return updates, {"far": jnp.maximum(state["far"], found)}

    first = {"far": jnp.zeros(3)}
    return optax.GradientTransformationExtraArgs(lambda params: first, update)


@pytest.mark.slow_but("options0", "options4")
@pytest.mark.parametrize("options", [
    {"strategy": Sharded(8)},
    {"strategy": FSDP(8, min_size=1), "precision": "16-mixed"},
    {"strategy": Pmap(8), "remat": "first"},
    {"strategy": SingleDevice(), "callbacks": [WeightAveraging()]},
    {"strategy": Bitwise(Sharded(2))},
])  # fmt: skip
def test_functions_see_the_rows_and_keys_of_the_step(options):
    options |= {"optimizer": comparing(), "accumulate_grad_batches": 2}
    trainer = on_one_device(*options.pop("callbacks", ()), **options)
    trainer.fit(batches(16, 16, 16, 5), max_epochs=2)
    leaves = jax.tree_util.tree_leaves_with_path(trainer.state.opt_state)
    (found,) = [leaf for path, leaf in leaves if "far" in path_of(path)]
    np.testing.assert_array_less(found, 1e-5)


@pytest.mark.parametrize("wrapped", [lambda one: one, lambda one: optax.chain(one)])
def test_an_optimizer_is_given_what_it_names_beside_other_arguments(wrapped):
    given = []

    def update(updates, state, params=None, *, grad_fn=None, **others):
        given.append((grad_fn is not None, "value" in others))
        return updates, state

    optimizer = optax.GradientTransformationExtraArgs(lambda p: (), update)
    on_one_device(optimizer=wrapped(optimizer)).fit(batches(16))
    assert set(given) == {(True, True)}
