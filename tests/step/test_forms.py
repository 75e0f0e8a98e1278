"""Losses in all their forms, in all layouts: the numbers of a loop by hand.

A form that is written for a batch uses it as a user may: its size, its order, its mean.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from toys import NormNet, Recorder, Stacked, assert_close, mlp, quiet

from jaxdp import FSDP, Pmap, Sharded, SingleDevice, TensorParallel, ZeRO, per_example

KEY = jax.random.key(3)
RATE = 0.05
EPOCHS = 2
RAGGED, OTHERS = (16, 16, 12, 6), (16, 6)
"""Of training and of validation; eight devices divide sixteen rows only."""

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def batches(sizes, seed=0):
    """Batches of 4 features and 3 targets."""
    x = np.random.default_rng(seed).normal(size=(sum(sizes), 4)).astype(np.float32)
    parts = np.split(x, np.cumsum(sizes)[:-1])
    return [(part, np.sin(2 * part[:, :3])) for part in parts]


def weighted_batches(sizes, seed=0):
    """With weights of all sizes, some of them 0."""
    generator, found = np.random.default_rng(seed), []
    for x, y in batches(sizes, seed):
        weight = generator.gamma(0.5, size=len(x)).astype(np.float32)
        weight[::5] = 0
        found.append((x, y, weight))
    return found


class Form(NamedTuple):
    """A way to write a loss."""

    options: dict[str, Any]
    """Of the trainer."""
    sums: Callable[..., Any]
    """Of a model, its state, a step and whether it trains, and a batch: sums of values
    and of their weights, by name; and the new state."""
    data: Callable[..., Any] = batches


def add_up(result, rows):
    """The sum of a batch's values, and that of their weights."""
    if isinstance(result, tuple):
        values, weights = result
        return (values * weights).sum(), weights.sum()
    return (result * rows, rows) if result.ndim == 0 else (result.sum(), rows)


def read(result, rows):
    is_dict = isinstance(result, tuple) and isinstance(result[1], dict)
    loss, metrics = result if is_dict else (result, {})
    return {n: add_up(value, rows) for n, value in {"loss": loss, **metrics}.items()}


def of(loss_fn):
    """The sums of a loss that is written for a batch."""
    return lambda model, state, step, training, *batch: (
        read(loss_fn(model, *batch), len(batch[0])),
        state,
    )


def of_predictions(criterion, **metrics):
    def loss_fn(model, x, y):
        found = jax.vmap(model)(x)
        return criterion(found, y), {n: f(found, y) for n, f in metrics.items()}

    return of(loss_fn)


# Those of a batch.


def squares(model, x, y):
    """One value for each row, by that row alone."""
    return jnp.square(jax.vmap(model)(x) - y).sum(axis=1)


def second_half_alone(model, x, y):
    return squares(model, x[len(x) // 2 :], y[len(y) // 2 :]).mean()


def centred(model, x, y):
    prediction = jax.vmap(model)(x)
    centre = jax.lax.stop_gradient(prediction.mean(axis=0, keepdims=True))
    return jnp.square(prediction - centre - y).sum(axis=1)


def paired_by_constant_key(model, x, y):
    other = jax.random.permutation(KEY, len(x))
    return squares(model, (x + x[other]) / 2, (y + y[other]) / 2)


def penalised(model, x, y):
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    return squares(model, x, y) + 0.01 * sum(jnp.square(leaf).sum() for leaf in leaves)


def masked_tokens(model, x, y):
    """A loss and a metric of each of three tokens, of which some do not count."""
    error = jax.vmap(model)(x) - y
    metrics = {"close": (jnp.abs(error) < 1, x[:, :3] > 0), "plain": jnp.ones(len(x))}
    return (error**2, x[:, :3] > 0), metrics


OF_BATCHES = {
    "values over the size": lambda model, x, y: squares(model, x, y) / x.shape[0],
    "the second half alone": second_half_alone,
    "centred": centred,
    "pairs by a constant key": paired_by_constant_key,
    "a penalty on all weights": penalised,
    "tokens that count": masked_tokens,
}


def masked_mean(model, x, y, mask):
    values = jnp.where(mask, squares(model, x, y), 0.0)
    return values.sum() / mask.sum()


def off_centre(prediction, target):
    centre = prediction.mean(axis=0, keepdims=True)
    return jnp.abs(prediction - centre - target).sum(axis=1)


CRITERIA = {
    "a criterion off the centre": off_centre,
    "a criterion of pairs": lambda prediction, target: cross_entropy(
        prediction @ target.T, jnp.arange(len(target))
    ),
    "a criterion by places": lambda prediction, target: (
        jnp.square(prediction - target).sum(axis=1),
        1.0 + jnp.arange(len(target)),
    ),
}


def mean_squares(prediction, target):
    return jnp.square(prediction - target).mean(axis=1)


def mean_distance(prediction, target):
    return jnp.abs(prediction - target).mean(axis=1)


METRICS = {
    "spread": lambda prediction, target: jnp.square(
        prediction - prediction.mean(axis=0, keepdims=True)
    ).sum(axis=1),
    "deviation": lambda prediction, target: jnp.std(prediction),
}


def weighs_rows(model, x, y, weight):
    found = jax.vmap(model)(x)
    return (mean_squares(found, y), weight), {"mae": (mean_distance(found, y), weight)}


# Those with a state.


def with_state(criterion):
    """A loss of predictions by statistics of the batch."""

    def loss(model, x, y, state):
        over_rows = jax.vmap(model, (0, None), (0, None), axis_name="batch")
        prediction, state = over_rows(x, state)
        return criterion(prediction, y), state

    return loss


mean_with_state = with_state(lambda found, y: jnp.square(found - y).sum(axis=1).mean())


def stateful(loss):
    def sums(model, state, step, training, x, y):
        result, state = loss(model, x, y, state)
        return read(result, len(x)), state

    return sums


# Those of one example.


def plain(model, x, y):
    return jnp.square(model(x) - y).sum()


def weighed_metrics(model, x, y):
    metrics = {"close": (model(x).sum() > 0, y[0] > 0), "size": jnp.abs(x).sum()}
    return (plain(model, x, y), jnp.abs(x).sum()), metrics


def scheduled(model, x, y, step, *, training):
    return plain(model, x, y) * (1 + step) if training else plain(model, x, y)


def over_rows(function):
    return lambda model, *batch: jax.vmap(functools.partial(function, model))(*batch)


def by_schedule(model, state, step, training, x, y):
    loss = over_rows(functools.partial(scheduled, step=step, training=training))
    return read(loss(model, x, y), len(x)), state


FORMS = {
    **{name: Form({"loss_fn": f}, of(f)) for name, f in OF_BATCHES.items()},
    "a mean by the mask": Form(
        {"loss_fn": masked_mean},
        of(lambda m, x, y: masked_mean(m, x, y, jnp.ones(len(x), bool))),
    ),
    **{name: Form({"loss": f}, of_predictions(f)) for name, f in CRITERIA.items()},
    "metrics of the batch": Form(
        {"loss": "mse", "metrics": METRICS}, of_predictions(mean_squares, **METRICS)
    ),
    "a third element": Form(
        {"loss": "mse", "metrics": ["mae"]}, of(weighs_rows), weighted_batches
    ),
    "a mean with state": Form({"loss_fn": mean_with_state}, stateful(mean_with_state)),
    "a named loss with state": Form(
        {"loss": "mse"}, stateful(with_state(mean_squares))
    ),
    "a criterion with state": Form(
        {"loss": off_centre}, stateful(with_state(off_centre))
    ),
    "an example's weights of metrics": Form(
        {"loss_fn": per_example(weighed_metrics)}, of(over_rows(weighed_metrics))
    ),
    "an example's schedule": Form({"loss_fn": per_example(scheduled)}, by_schedule),
    "an example's partial": Form(
        {"loss_fn": per_example(functools.partial(scheduled, training=False))},
        of(over_rows(plain)),
    ),
}


def add(window, function):
    """Sums over the batches of a window, whose state goes from one to the next."""
    totals, state = {}, None
    for batch in window:
        found, state = function(state, batch)
        for name, pair in found.items():
            old = totals.get(name, (0.0, 0.0))
            totals[name] = old[0] + pair[0], old[1] + pair[1]
    return totals, state


def means(totals):
    return {name: float(total / weight) for name, (total, weight) in totals.items()}


def make_model(kind):
    if kind == "norm":
        return eqx.nn.make_with_state(NormNet)(jax.random.key(0))
    return (Stacked() if kind == "stack" else mlp()), None


@functools.cache
def by_hand(name, kind, accumulated=1):
    """Losses of steps, means of epochs and of a validation, and the parameters."""
    sums, data = FORMS[name].sums, FORMS[name].data(RAGGED)
    model, state = make_model(kind)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def total(params, state, step, training, window):
        model = eqx.nn.inference_mode(eqx.combine(params, static), not training)
        return add(
            window,
            lambda new, batch: sums(
                model, state if new is None else new, step, training, *batch
            ),
        )

    @jax.jit
    def take_step(params, state, step, window):
        def mean(params):
            totals, new = total(params, state, step, True, window)
            return totals["loss"][0] / totals["loss"][1], (totals, new)

        (loss, aux), grads = jax.value_and_grad(mean, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), *aux, loss

    losses, epochs = [], []
    for _ in range(EPOCHS):
        of_steps = []
        for start in range(0, len(data), accumulated):
            window = data[start : start + accumulated]
            params, totals, state, loss = take_step(params, state, len(losses), window)
            losses.append(float(loss))
            of_steps.append(totals)
        epochs.append(means(jax.tree.map(lambda *each: sum(each), *of_steps)))
    others = FORMS[name].data(OTHERS, seed=1)
    found, _ = total(params, state, len(losses), False, others)
    return losses, epochs, means(found), jax.tree.leaves(params)


def trained(options, kind, strategy, data, others=None, **keywords):
    """Returns the numbers of `by_hand`, from a trainer."""
    model, state = make_model(kind)
    recorder = Recorder()
    trainer = quiet(
        model, optax.sgd(RATE), strategy=strategy, state=state, callbacks=[recorder],
        **options, **keywords,
    )  # fmt: skip
    history = trainer.fit(data, others or None, max_epochs=EPOCHS).history
    params = eqx.filter(trainer.model, eqx.is_inexact_array)
    return recorder.losses, history, params


SPLIT = [("la**.weight", PartitionSpec(None, "model"))]
"""Inputs of `layers` in an MLP, and of `last` in a NormNet, which has no `layers`."""
ACCUMULATED, TWICE = {"accumulate_grad_batches": 2}, {"steps_per_execution": 2}
GRID = {"data": 2, "model": 2}
LAYOUTS = {
    "Sharded on 8": (lambda: Sharded(8), {}),
    "Pmap on 8": (lambda: Pmap(8), {}),
    "FSDP on 8, a stack": (lambda: FSDP(8), {}),
    "ZeRO on 8": (lambda: ZeRO(devices=8), {}),
    "one device": (SingleDevice, {}),
    "FSDP on 8": (lambda: FSDP(8), {}),
    "Sharded on 8, accumulating": (lambda: Sharded(8), ACCUMULATED),
    "FSDP on 8, a stack, accumulating": (lambda: FSDP(8), ACCUMULATED),
    "Sharded on 8, two steps": (lambda: Sharded(8), TWICE),
    "Pmap on 2, accumulating": (lambda: Pmap(2), ACCUMULATED),
    "TensorParallel": (lambda: TensorParallel(GRID, SPLIT, devices=4), {}),
    "FSDP on 2, a stack, two steps": (lambda: FSDP(2), TWICE),
    "one device, accumulating": (SingleDevice, ACCUMULATED),
}
CASES = [
    (form, layout)
    for form, layout in itertools.product(FORMS, LAYOUTS)
    if not ("state" in form and "stack" in layout)
]


def choose_quick():
    """Each form once, in a layout of its own; forms of a kind in different ones."""
    layouts = itertools.cycle(LAYOUTS)
    for form in FORMS:
        yield form, next(layout for layout in layouts if (form, layout) in CASES)


@pytest.mark.slow_but(*map("-".join, choose_quick()))
@pytest.mark.parametrize("form, layout", CASES, ids=map("-".join, CASES))
def test_a_form_trains_and_validates_as_in_a_loop_by_hand(form, layout):
    make_strategy, keywords = LAYOUTS[layout]
    kind = "stack" if "stack" in layout else "norm" if "state" in form else "mlp"
    accumulated = keywords.get("accumulate_grad_batches", 1)
    losses, epochs, tested, params = by_hand(form, kind, accumulated)

    data, others = FORMS[form].data(RAGGED), FORMS[form].data(OTHERS, seed=1)
    found, history, ours = trained(
        FORMS[form].options, kind, make_strategy(), data, others, **keywords
    )
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for name, value in tested.items():
        expected = [epoch[name] for epoch in epochs]
        np.testing.assert_allclose(history[name], expected, rtol=1e-5, err_msg=name)
        assert history[f"val_{name}"][-1] == pytest.approx(value, rel=1e-5), name
    assert_close(ours, params, rtol=1e-4)


def dropped(model, x, y, keys):
    drop = eqx.nn.Dropout(0.3)
    return squares(model, jax.vmap(lambda x, key: drop(x, key=key))(x, keys), y)


def mixed(model, x, y, key):
    other = jax.random.permutation(key, len(x))
    share = jax.random.beta(key, 2.0, 2.0)
    return squares(model, share * x + (1 - share) * x[other], y).mean()


def noisy(model, x, y, *, key, training):
    drawn = model(x + jax.random.normal(key, x.shape)) - y
    return jnp.abs(eqx.nn.Dropout(0.4)(drawn, key=key, inference=not training)).sum()


def noisy_batch(model, x, y, keys, training):
    def one(x, y, key):
        return noisy(model, x, y, key=key, training=training)

    return jax.vmap(one)(x, y, keys)


DRAWN = {
    "dropout by keys": (dropped, dropped),
    "mixed by the key": (mixed, mixed),
    "an example's noise": (per_example(noisy), noisy_batch),
}
"""A loss, and the same as it is written for the batch of one device."""
DRAWN_IN = {name: each for name, each in LAYOUTS.items() if "one device" not in name}
QUICK_DRAWN = [
    "dropout by keys-FSDP on 8, a stack",
    "mixed by the key-Sharded on 8, accumulating",
    "an example's noise-Pmap on 2, accumulating",
]


@functools.cache
def on_one_device(form, kind, **keywords):
    options, data = {"loss_fn": DRAWN[form][1]}, batches(RAGGED)
    return trained(options, kind, SingleDevice(), data, data[2:], **keywords)


@pytest.mark.slow_but(*QUICK_DRAWN)
@pytest.mark.parametrize("layout", DRAWN_IN)
@pytest.mark.parametrize("form", DRAWN)
def test_what_is_drawn_is_drawn_as_on_one_device(form, layout):
    (make_strategy, keywords), data = LAYOUTS[layout], batches(RAGGED)
    options, kind = {"loss_fn": DRAWN[form][0]}, "stack" if "stack" in layout else "mlp"
    accumulation = ACCUMULATED if keywords == ACCUMULATED else {}
    expected = on_one_device(form, kind, **accumulation)
    found = trained(options, kind, make_strategy(), data, data[2:], **keywords)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for name in "loss", "val_loss":
        np.testing.assert_allclose(found[1][name], expected[1][name], rtol=1e-5)
    assert_close(found[2], expected[2], rtol=1e-4)


def test_keys_are_as_many_as_rows_of_the_batch():
    shapes = []

    def loss_fn(model, x, y, key, keys):
        shapes.append((len(x), keys.shape, key.shape))
        return squares(model, x, y)

    trained({"loss_fn": loss_fn}, "mlp", Sharded(8), batches((12, 6)), batches((5,)))
    assert {*shapes} == {(rows, (rows,), ()) for rows in (12, 6, 5)}
