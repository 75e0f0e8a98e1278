"""What is written for a batch gets the batch: the numbers of a loop by hand.

Every form is a `loss_fn`, a criterion or a metric that uses the batch as a user may:
its size, its order, its mean. Its numbers are those of a plain loop on one device, on
any number of devices and for any batch size.
"""

import functools
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from toys import NormNet, Recorder, Stacked

from jaxdp import (
    FSDP,
    Pmap,
    Sharded,
    SingleDevice,
    TensorParallel,
    Trainer,
    ZeRO,
)

KEY = jax.random.key(3)
RATE = 0.05
EPOCHS = 2
RAGGED = 16, 16, 12, 6
"""Eight devices divide the first two sizes only."""
FULL = 16, 16, 16, 16

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def batches(sizes, seed=0):
    """Batches of 4 features and 3 targets."""
    if not sizes:
        return []
    x = np.random.default_rng(seed).normal(size=(sum(sizes), 4)).astype(np.float32)
    parts = np.split(x, np.cumsum(sizes)[:-1])
    return [(part, np.sin(2 * part[:, :3])) for part in parts]


def mlp():
    return eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0))


def normed():
    return eqx.nn.make_with_state(NormNet)(jax.random.key(0))


def squares(model, x, y):
    """One value for each row, by that row alone."""
    return jnp.square(jax.vmap(model)(x) - y).sum(axis=1)


def row_loss(model, row):
    x, y = row
    return jnp.square(model(x) - y).sum()


# Sizes and places.


def second_half_alone(model, x, y):
    return squares(model, x[len(x) // 2 :], y[len(y) // 2 :]).mean()


WEIGHTS = np.linspace(0.5, 2.0, 16, dtype=np.float32)


def places_as_weights(model, x, y):
    return squares(model, x, y), 1.0 + jnp.arange(len(y)) / len(y)


# Other rows.


def neighbours(model, x, y):
    rolled = jnp.roll(jax.vmap(model)(x), 1, axis=0)
    return squares(model, x, y) + 0.1 * jnp.abs(rolled - y).sum(axis=1)


def two_halves(model, x, y):
    half = len(x) // 2
    views = jax.vmap(model)(x)
    apart = jnp.square(views[:half] - views[half : 2 * half]).sum(axis=1)
    return squares(model, x, y).mean() + 0.1 * apart.mean()


def hardest_quarter(model, x, y):
    return jnp.sort(squares(model, x, y))[-(len(x) // 4) :].mean()


def centred(model, x, y):
    prediction = jax.vmap(model)(x)
    centre = jax.lax.stop_gradient(prediction.mean(axis=0, keepdims=True))
    return jnp.square(prediction - centre - y).sum(axis=1)


# Constants.


def paired_by_constant_key(model, x, y):
    other = jax.random.permutation(KEY, len(x))
    return squares(model, (x + x[other]) / 2, (y + y[other]) / 2)


def weights_of_sixteen(model, x, y):
    return squares(model, x, y) * jnp.asarray(WEIGHTS)


def penalised(model, x, y):
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    return squares(model, x, y) + 0.01 * sum(jnp.square(leaf).sum() for leaf in leaves)


# Loops.


def scanned(model, x, y):
    """Each row beside the mean of those before it."""

    def body(carry, row):
        total, count = carry
        value = row_loss(model, row)
        return (total + value, count + 1), value + 0.1 * total / count

    return jax.lax.scan(body, (0.0, 1.0), (x, y))[1]


# Those that are told which rows are real.


def masked_mean(model, x, y, mask):
    values = jnp.where(mask, squares(model, x, y), 0.0)
    return values.sum() / mask.sum()


LOSSES = {
    "values over the size": lambda model, x, y: squares(model, x, y) / x.shape[0],
    "a sum over the size": lambda model, x, y: (squares(model, x, y) / len(x)).sum(),
    "a size as a factor": lambda model, x, y: squares(model, x, y).mean() * len(x) / 9,
    "the second half alone": second_half_alone,
    "places as weights": places_as_weights,
    "neighbours": neighbours,
    "two halves": two_halves,
    "the hardest quarter": hardest_quarter,
    "centred": centred,
    "pairs by a constant key": paired_by_constant_key,
    "weights of sixteen rows": weights_of_sixteen,
    "a penalty on all weights": penalised,
    "a scan over rows": scanned,
    "a mean by the mask": masked_mean,
}


def off_centre(prediction, target):
    centre = prediction.mean(axis=0, keepdims=True)
    return jnp.abs(prediction - centre - target).sum(axis=1)


CRITERIA = {
    "a criterion off the centre": off_centre,
    "a criterion over the size": lambda prediction, target: (
        jnp.square(prediction - target).sum() / len(target)
    ),
    "a criterion of pairs": lambda prediction, target: cross_entropy(
        prediction @ target.T, jnp.arange(len(target))
    ),
    "a criterion by places": lambda prediction, target: (
        jnp.square(prediction - target).sum(axis=1),
        1.0 + jnp.arange(len(target)),
    ),
}


def of_state(model, state, x, y):
    """Predictions by statistics of the batch, and the new statistics."""
    over_rows = jax.vmap(
        model, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
    )
    return over_rows(x, state)


def mean_with_state(model, x, y, state):
    prediction, state = of_state(model, state, x, y)
    return jnp.square(prediction - y).sum(axis=1).mean(), state


def values_with_state(model, x, y, state):
    prediction, state = of_state(model, state, x, y)
    return jnp.square(prediction - y).sum(axis=1) / len(y), state


def criterion_with_state(criterion):
    def loss(model, x, y, state):
        prediction, state = of_state(model, state, x, y)
        return criterion(prediction, y), state

    return loss


def mean_squares(prediction, target):
    return jnp.square(prediction - target).mean(axis=1)


STATEFUL = {
    "a mean with state": mean_with_state,
    "values with state": values_with_state,
}
STATEFUL_CRITERIA = {
    "a named loss with state": ("mse", mean_squares),
    "a criterion with state": (off_centre, off_centre),
}


def find_form(name):
    """Arguments of the trainer, and what a loop by hand calls: it takes a state."""

    def without_state(loss):
        return lambda model, x, y, state: (loss(model, x, y), state)

    if name in LOSSES:
        loss_fn = LOSSES[name]

        def loss(model, x, y):
            masks = [jnp.ones(len(x), bool)] if name in MASKED else []
            return loss_fn(model, x, y, *masks)

        return {"loss_fn": loss_fn}, without_state(loss)
    if name in CRITERIA:
        criterion = CRITERIA[name]
        return {"loss": criterion}, without_state(
            lambda model, x, y: criterion(jax.vmap(model)(x), y)
        )
    if name in STATEFUL:
        return {"loss_fn": STATEFUL[name]}, STATEFUL[name]
    loss, criterion = STATEFUL_CRITERIA[name]
    return {"loss": loss}, criterion_with_state(criterion)


FORMS = [*LOSSES, *CRITERIA, *STATEFUL, *STATEFUL_CRITERIA]
WITH_STATE = {*STATEFUL, *STATEFUL_CRITERIA}
MASKED = {name for name in LOSSES if "mask" in name}


def sums_of(result, rows):
    """The sum of a batch's values and that of their weights."""
    if isinstance(result, tuple):
        values, weights = result
        return (values * weights).sum(), weights.sum()
    return (result * rows, rows) if result.ndim == 0 else (result.sum(), rows)


def mean_by_hand(loss, model, state, data):
    """The mean over batches; the weight of all and the state after them."""
    sums = []
    for x, y in data:
        result, state = loss(model, x, y, state)
        sums.append(sums_of(result, len(x)))
    totals, weights = zip(*sums, strict=True)
    return sum(totals) / sum(weights), (sum(weights), state)


def make_model(kind):
    return {"mlp": lambda: (mlp(), None), "stack": lambda: (Stacked(), None)}.get(
        kind, normed
    )()


@functools.cache
def by_hand(name, kind, sizes, others, accumulated=1):
    """Losses of steps, of epochs and of a validation, and the parameters."""
    _, loss = find_form(name)
    model, state = make_model(kind)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    optimizer = optax.sgd(RATE)
    optimizer_state = optimizer.init(params)

    @jax.jit
    def step(params, optimizer_state, state, window):
        def mean(params):
            return mean_by_hand(loss, eqx.combine(params, static), state, window)

        (value, aux), grads = jax.value_and_grad(mean, has_aux=True)(params)
        updates, optimizer_state = optimizer.update(grads, optimizer_state)
        params = optax.apply_updates(params, updates)
        return params, optimizer_state, aux, value

    losses, weights, data = [], [], batches(sizes)
    for _ in range(EPOCHS):
        for start in range(0, len(data), accumulated):
            window = data[start : start + accumulated]
            params, optimizer_state, (weight, state), value = step(
                params, optimizer_state, state, window
            )
            losses.append(float(value))
            weights.append(float(weight))
    epochs = np.average(
        np.reshape(losses, (EPOCHS, -1)), 1, np.reshape(weights, (EPOCHS, -1))
    )
    model = eqx.nn.inference_mode(eqx.combine(params, static))
    found, _ = mean_by_hand(loss, model, state, batches(others, seed=1))
    return losses, epochs, found, jax.tree.leaves(params)


def trained(options, kind, strategy, sizes, others=(), **keywords):
    """What `by_hand` gives, by a trainer; and the trainer."""
    model, state = make_model(kind)
    recorder = Recorder()
    trainer = Trainer(
        model, optax.sgd(RATE), strategy=strategy, state=state, callbacks=[recorder],
        enable_progress_bar=False, **options, **keywords,
    )  # fmt: skip
    history = trainer.fit(
        batches(sizes), batches(others, seed=1) or None, max_epochs=EPOCHS
    )
    params = jax.tree.leaves(eqx.filter(trainer.model, eqx.is_inexact_array))
    found = history["val_loss"][-1] if others else None
    return recorder.losses, history["loss"], found, params, trainer


def assert_same_numbers(found, expected):
    *losses, params = expected
    for ours, theirs in zip(found, losses, strict=False):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    for ours, theirs in zip(found[-1], params, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


SPLIT = [("*layers[0].weight", PartitionSpec("model"))]

LAYOUTS = {
    "Sharded on 8": (lambda: Sharded(8), {}),
    "Pmap on 8": (lambda: Pmap(8), {}),
    "FSDP on 8, a stack": (lambda: FSDP(8), {}),
    "ZeRO on 8": (lambda: ZeRO(devices=8), {}),
    "one device": (SingleDevice, {}),
    "FSDP on 8": (lambda: FSDP(8), {}),
    "Sharded on 8, accumulating": (lambda: Sharded(8), {"accumulate_grad_batches": 2}),
    "Sharded on 2": (lambda: Sharded(2), {}),
    "FSDP on 8, a stack, accumulating": (
        lambda: FSDP(8),
        {"accumulate_grad_batches": 2},
    ),
    "Sharded on 8, two steps": (lambda: Sharded(8), {"steps_per_execution": 2}),
    "Pmap on 2, accumulating": (lambda: Pmap(2), {"accumulate_grad_batches": 2}),
    "TensorParallel": (
        lambda: TensorParallel({"data": 2, "model": 2}, SPLIT, devices=4),
        {},
    ),
    "FSDP on 2, a stack, two steps": (lambda: FSDP(2), {"steps_per_execution": 2}),
    "one device, accumulating": (SingleDevice, {"accumulate_grad_batches": 2}),
    "ZeRO on 2, accumulating": (
        lambda: ZeRO(devices=2),
        {"accumulate_grad_batches": 2},
    ),
    "Pmap on 8, two steps": (lambda: Pmap(8), {"steps_per_execution": 2}),
    "FSDP on 1": (lambda: FSDP(1), {}),
    "one device, two steps": (SingleDevice, {"steps_per_execution": 2}),
}


def is_fitting(form, layout):
    return not (form in WITH_STATE and "stack" in layout)


def choose_quick():
    """Each form once, in a layout of its own; forms of a kind in different ones."""
    layouts = itertools.cycle(LAYOUTS)
    for form in FORMS:
        yield form, next(layout for layout in layouts if is_fitting(form, layout))


CASES = [
    (form, layout)
    for form, layout in itertools.product(FORMS, LAYOUTS)
    if is_fitting(form, layout)
]


@pytest.mark.slow_but(*map("-".join, choose_quick()))
@pytest.mark.parametrize("form, layout", CASES, ids=map("-".join, CASES))
def test_a_form_trains_and_validates_as_in_a_loop_by_hand(form, layout):
    make_strategy, keywords = LAYOUTS[layout]
    options, _ = find_form(form)
    kind = "norm" if form in WITH_STATE else "stack" if "stack" in layout else "mlp"
    is_of_sixteen = form == "weights of sixteen rows"
    sizes = FULL if is_of_sixteen else RAGGED
    others = (16, 16) if is_of_sixteen else (16, 6)
    accumulated = keywords.get("accumulate_grad_batches", 1)
    *found, _ = trained(options, kind, make_strategy(), sizes, others, **keywords)
    assert_same_numbers(found, by_hand(form, kind, sizes, others, accumulated))


def spread(prediction, target):
    return jnp.square(prediction - prediction.mean(axis=0, keepdims=True)).sum(axis=1)


METRICS = {
    "spread": spread,
    "deviation": lambda prediction, target: jnp.std(prediction),
    "ranks": lambda prediction, target: (
        jnp.argsort(jnp.argsort(prediction[:, 0])) / len(target)
    ),
    "late": lambda prediction, target: (
        jnp.abs(prediction - target).sum(axis=1),
        1.0 + jnp.arange(len(target)),
    ),
}


@pytest.mark.slow_but("Sharded on 8", "FSDP on 8, a stack")
@pytest.mark.parametrize(
    "layout", [name for name, (_, keywords) in LAYOUTS.items() if not keywords]
)
def test_metrics_see_the_batch_as_it_came(layout):
    """Beside a loss that is written for one example."""
    steps = []

    class Steps(Recorder):
        def on_train_batch_end(self, trainer, metrics, batch_idx):
            steps.append({name: float(metrics[name]) for name in METRICS})

    kind, sizes = "stack" if "stack" in layout else "mlp", (16, 12, 6)
    model, _ = make_model(kind)
    trainer = Trainer(
        model, optax.sgd(0.0), loss="mse", metrics=METRICS, callbacks=[Steps()],
        strategy=LAYOUTS[layout][0](), enable_progress_bar=False,
    )  # fmt: skip
    data = batches(sizes)
    history = trainer.fit(data, data, max_epochs=1)
    for name, metric in METRICS.items():
        results = [metric(jax.vmap(model)(x), y) for x, y in data]
        sums = [sums_of(each, len(x)) for each, (x, _) in zip(results, data)]  # noqa: B905
        totals, weights = np.transpose(sums)
        found = [step[name] for step in steps]
        np.testing.assert_allclose(found, totals / weights, rtol=1e-5)
        expected = pytest.approx(totals.sum() / weights.sum(), rel=1e-5)
        assert history[name][0] == expected
        assert history[f"val_{name}"][0] == expected


def dropped(model, x, y, keys):
    drop = eqx.nn.Dropout(0.3)
    return squares(model, jax.vmap(lambda x, key: drop(x, key=key))(x, keys), y)


def mixed(model, x, y, key):
    other = jax.random.permutation(key, len(x))
    share = jax.random.beta(key, 2.0, 2.0)
    return squares(model, share * x + (1 - share) * x[other], y).mean()


def by_the_first_key(model, x, y, keys):
    return squares(model, x + jax.random.normal(keys[0], x.shape), y) / len(y)


DRAWN = {
    "dropout by keys": dropped,
    "mixed by the key": mixed,
    "noise by the first of keys": by_the_first_key,
}
DRAWN_IN = {name: each for name, each in LAYOUTS.items() if "one device" not in name}
QUICK_DRAWN = [
    "dropout by keys-FSDP on 8, a stack",
    "mixed by the key-Sharded on 8, accumulating",
    "noise by the first of keys-Pmap on 8",
]


@functools.cache
def on_one_device(form, kind, **keywords):
    options = {"loss_fn": DRAWN[form]}
    *found, _ = trained(options, kind, SingleDevice(), RAGGED, RAGGED[2:], **keywords)
    return found


@pytest.mark.slow_but(*QUICK_DRAWN)
@pytest.mark.parametrize("layout", DRAWN_IN)
@pytest.mark.parametrize("form", DRAWN)
def test_what_is_drawn_is_drawn_as_on_one_device(form, layout):
    make_strategy, keywords = LAYOUTS[layout]
    options, kind = {"loss_fn": DRAWN[form]}, "stack" if "stack" in layout else "mlp"
    name = "accumulate_grad_batches"
    accumulation = {name: keywords[name]} if name in keywords else {}
    *found, _ = trained(options, kind, make_strategy(), RAGGED, RAGGED[2:], **keywords)
    assert_same_numbers(found, on_one_device(form, kind, **accumulation))


def test_keys_are_as_many_as_rows_of_the_batch():
    shapes = []

    def loss_fn(model, x, y, key, keys):
        shapes.append((len(x), keys.shape, key.shape))
        return squares(model, x, y)

    trained({"loss_fn": loss_fn}, "mlp", Sharded(8), (12, 6), (5,))
    assert {*shapes} == {(rows, (rows,), ()) for rows in (12, 6, 5)}
