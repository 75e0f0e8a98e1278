"""`per_example`: a loss of one example, which is vmapped, padded and split for it."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import NormNet, Recorder, Stacked, batches, bits, counting

from jaxdp import (
    FSDP,
    Bitwise,
    Ensemble,
    Members,
    Part,
    PassMetric,
    Pmap,
    Sharded,
    SingleDevice,
    TensorParallel,
    Trainer,
    Whole,
    ZeRO,
    per_example,
)

RAGGED = 16, 12, 16, 5
softmax = optax.softmax_cross_entropy_with_integer_labels


def linear():
    return eqx.nn.Linear(4, 3, key=jax.random.key(0))


def quiet(loss_fn, strategy=None, model=None, **options):
    return Trainer(
        linear() if model is None else model,
        options.pop("optimizer", optax.sgd(0.1)),
        loss_fn=loss_fn,
        strategy=strategy or SingleDevice(),
        enable_progress_bar=False,
        **options,
    )


def train(loss_fn, strategy=None, model=None, data=None, **options):
    """Losses of every step, the history and the parameters, of two epochs."""
    recorder = Recorder()
    trainer = quiet(loss_fn, strategy, model, callbacks=[recorder], **options)
    data = batches(*RAGGED) if data is None else data
    history = trainer.fit(data, data[-2:], max_epochs=2)
    params = jax.tree.leaves(eqx.filter(trainer.model, eqx.is_array))
    return recorder.losses, history.history, params


def assert_same_numbers(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, values in expected[1].items():
        if not name.endswith("time"):
            np.testing.assert_allclose(found[1][name], values, rtol=1e-5, err_msg=name)
    for ours, theirs in zip(found[2], expected[2], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


# Each is a function of one example, and what it is for a batch.


def plain(model, x, y):
    return softmax(model(x), y)


def noisy(model, x, y, key):
    return softmax(model(x + jax.random.normal(key, x.shape)), y)


def noisy_batch(model, x, y, keys):
    return jax.vmap(lambda x, y, key: noisy(model, x, y, key))(x, y, keys)


def measured(model, x, y):
    logits = model(x)
    return softmax(logits, y), {"hits": logits.argmax() == y, "size": jnp.abs(x).sum()}


def weighted(model, x, y):
    return softmax(model(x), y), jnp.abs(x).sum()


def weighted_metrics(model, x, y):
    loss, weight = weighted(model, x, y)
    return (loss, weight), {"hits": (model(x).argmax() == y, y > 0), "loss0": loss}


def scheduled(model, x, y, step, *, training):
    return plain(model, x, y) * (1 + step) if training else plain(model, x, y)


def scheduled_batch(model, x, y, step, training):
    return jax.vmap(lambda x, y: scheduled(model, x, y, step, training=training))(x, y)


def keyed(model, x, y, *, key, training):
    return eqx.nn.Dropout(0.4)(model(x), key=key, inference=not training)[y]


def keyed_batch(model, x, y, keys, training):
    return jax.vmap(lambda x, y, key: keyed(model, x, y, key=key, training=training))(
        x, y, keys
    )


def over_rows(function):
    def of_batch(model, x, y):
        return jax.vmap(functools.partial(function, model))(x, y)

    return of_batch


FORMS = {
    "a scalar": (plain, over_rows(plain)),
    "metrics": (measured, over_rows(measured)),
    "a weight": (weighted, over_rows(weighted)),
    "weights of metrics": (weighted_metrics, over_rows(weighted_metrics)),
    "a key": (noisy, noisy_batch),
    "a key and training": (keyed, keyed_batch),
    "a step and training": (scheduled, scheduled_batch),
    "a partial": (functools.partial(scheduled, training=False), over_rows(plain)),
}

LAYOUTS = {
    "one device": (SingleDevice, {}),
    "Sharded": (lambda: Sharded(8), {"steps_per_execution": 2}),
    "Pmap": (lambda: Pmap(8), {"accumulate_grad_batches": 2}),
    "FSDP": (lambda: FSDP(8), {}),
    "ZeRO": (lambda: ZeRO(devices=8), {"accumulate_grad_batches": 2}),
    "TensorParallel": (lambda: TensorParallel({"data": 4, "model": 2}), {}),
}


@functools.cache
def vmapped(form, **options):
    """The numbers of the loss over a batch, on one device."""
    return train(FORMS[form][1], **options)


@pytest.mark.slow_but(
    "a scalar-Sharded",
    "metrics-Pmap",
    "a weight-FSDP",
    "weights of metrics-ZeRO",
    "a key-Pmap",
    "a key and training-Sharded",
    "a step and training-Sharded",
    "a partial-one device",
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
def test_the_numbers_are_those_of_a_loss_that_vmaps(form, layout):
    make_strategy, options = LAYOUTS[layout]
    name = "accumulate_grad_batches"
    accumulation = {name: options[name]} if name in options else {}
    found = train(per_example(FORMS[form][0]), make_strategy(), **options)
    assert_same_numbers(found, vmapped(form, **accumulation))


@pytest.mark.parametrize("kind", [Sharded, Pmap, FSDP])
def test_ragged_batches_are_padded_to_one_program(kind):
    shapes = set()

    def loss(model, x, y):
        shapes.add((x.shape, y.shape))
        return plain(model, x, y)

    strategy = counting(kind)
    train(per_example(loss), strategy, data=batches(16, 16, 11, 5))
    assert strategy.count == 1
    assert shapes == {((4,), ())}


OPTAX = {
    optax.squared_error: False,
    optax.l2_loss: False,
    optax.huber_loss: False,
    optax.log_cosh: False,
    optax.sigmoid_binary_cross_entropy: False,
    optax.softmax_cross_entropy: False,
    softmax: True,
}
"""Whether each takes labels."""


@pytest.mark.slow_but("squared_error", "softmax_cross_entropy_with_integer_labels")
@pytest.mark.parametrize("loss", OPTAX, ids=lambda loss: loss.__name__)
def test_losses_of_optax_are_of_one_example_and_others_are_not(loss):
    def of_batch(prediction, target):
        return loss(prediction, target)

    data = batches(16, 5)
    if not OPTAX[loss]:
        data = [(x, np.eye(3, dtype=np.float32)[y]) for x, y in data]
    runs = {}
    for criterion in (loss, of_batch):
        strategy, recorder = counting(Sharded), Recorder()
        quiet(None, strategy, loss=criterion, callbacks=[recorder]).fit(data)
        runs[criterion] = strategy.count, recorder.losses
    assert [count for count, _ in runs.values()] == [1, 2]
    np.testing.assert_allclose(runs[loss][1], runs[of_batch][1], rtol=1e-5)


@pytest.mark.parametrize("kind", [SingleDevice, Sharded])
def test_padding_is_copies_of_rows_that_do_not_count(kind):
    """A logarithm of zeros would spoil the gradients."""

    def loss(model, x, y):
        return jnp.log(jnp.abs(x).sum()) * plain(model, x, y), {"one": 1.0, "y": y}

    data = batches(16, 5)
    _, history, params = train(per_example(loss), kind(), data=data)
    assert all(np.isfinite(leaf).all() for leaf in params)
    assert history["one"] == [1.0, 1.0] and history["val_one"] == [1.0, 1.0]
    labels = np.concatenate([y for _, y in data])
    assert history["y"] == pytest.approx([labels.mean()] * 2)


@pytest.mark.parametrize("name", ["keys", "mask", "state"])
def test_names_of_a_batch_are_refused(name):
    losses = {
        "keys": lambda model, x, y, keys: 0.0,
        "mask": lambda model, x, y, *, mask: 0.0,
        "state": lambda model, state, x, y: 0.0,
    }
    with pytest.raises((TypeError, ValueError), match=f"`{name}`") as caught:
        quiet(per_example(losses[name])).fit(batches(8))
    assert "per_example" in str(caught.value)


ARRAYS = {
    "the loss": lambda model, x, y: model(x),
    "metric 'logits'": lambda model, x, y: (x[0], {"logits": model(x)}),
    "a weight": lambda model, x, y: (plain(model, x, y), x),
    "metric 'pair'": lambda model, x, y: (x[0], {"pair": (x[0], x)}),
}


@pytest.mark.parametrize("what", ARRAYS)
def test_what_is_not_a_scalar_of_one_example_is_refused(what):
    """Even if it has as many values as the batch has rows."""
    match = f"`loss_fn`: {what.replace('a weight', 'the loss')}"
    for rows in (3, 4, 8):
        with pytest.raises(ValueError, match=match):
            quiet(per_example(ARRAYS[what]), Sharded()).fit(batches(rows))


@pytest.mark.parametrize("function", [None, 3, "mse", linear().weight, lambda: 0])
def test_only_functions_of_an_example_can_be_of_one(function):
    with pytest.raises(TypeError, match="per_example|takes nothing"):
        per_example(function)


def test_a_model_with_state_is_refused():
    model, state = eqx.nn.make_with_state(NormNet)(jax.random.key(0))
    with pytest.raises((TypeError, ValueError), match="state") as caught:
        quiet(per_example(plain), model=model, state=state).fit(batches(8))
    assert "per_example" in str(caught.value)


@pytest.mark.parametrize("number", [2, True, np.float32(2)])
def test_a_weight_may_be_a_constant(number):
    """That of all rows is the same, so the mean is that without weights."""

    def loss(model, x, y):
        return plain(model, x, y), {"m": (x[0], number), "n": number}

    def of_batch(model, x, y):
        return over_rows(plain)(model, x, y), {
            "m": x[:, 0], "n": jnp.full(len(x), number * 1.0)
        }  # fmt: skip

    data = batches(16, 5)
    found = train(per_example(loss), Sharded(), data=data)
    assert_same_numbers(found, train(of_batch, data=data))


def test_a_whole_comes_as_the_array_itself():
    table = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    shapes = set()

    def of_tuple(model, x, table, y):
        shapes.add((x.shape, table.shape, y.shape))
        return softmax(model(x) + table @ x, y)

    def of_dict(model, batch):
        return of_tuple(model, batch["in"]["x"], batch["in"]["table"], batch["y"])

    def by_hand(model, x, y):
        return softmax(jax.vmap(model)(x) + x @ table.T, y)

    data = batches(16, 11, 4)
    expected = train(by_hand, data=data)
    tuples = [(x, Whole(table), y) for x, y in data]
    dicts = [{"in": {"x": x, "table": Whole(table)}, "y": y} for x, y in data]
    for strategy in (SingleDevice(), Sharded(), FSDP()):
        for loss, each in ((of_tuple, tuples), (of_dict, dicts)):
            found = train(per_example(loss), strategy, data=each)
            assert_same_numbers(found, expected)
    assert shapes == {((4,), (3, 4), ())}


def test_a_batch_that_is_no_tuple_is_one_argument():
    """Lists are what loaders of torch make of tuples."""
    data = batches(16, 5)

    def of_dict(model, batch):
        assert {*batch} == {"x", "y"}
        return plain(model, batch["x"], batch["y"])

    def of_nested(model, x, rest):
        return plain(model, x, rest[0]["y"])

    forms = [
        (of_dict, [{"x": x, "y": y} for x, y in data]),
        (plain, [[x, y] for x, y in data]),
        (of_nested, [(x, [{"y": y}]) for x, y in data]),
    ]
    expected = train(over_rows(plain), data=data)
    for loss, each in forms:
        assert_same_numbers(train(per_example(loss), Sharded(), data=each), expected)

    def of_array(model, x):
        assert x.shape == (4,)
        return jnp.square(model(x)).sum()

    arrays = [x for x, _ in data]
    expected = train(
        lambda model, x: jnp.square(jax.vmap(model)(x)).sum(1), data=arrays
    )
    assert_same_numbers(train(per_example(of_array), Sharded(), data=arrays), expected)


class Two(eqx.Module):
    a: eqx.nn.Linear
    b: eqx.nn.Linear

    def __init__(self):
        self.a, self.b = linear(), eqx.nn.Linear(3, 3, key=jax.random.key(1))


def test_parts_may_be_of_one_example():
    def first(model, x, y, key):
        noise = jax.random.normal(key, x.shape)
        return softmax(model.b(model.a(x + noise)), y), {"size": jnp.abs(x).sum()}

    def first_of_batch(model, x, y, keys):
        return jax.vmap(functools.partial(first, model))(x, y, keys)

    def second(model, x, y):
        return softmax(jax.vmap(model.b)(jax.vmap(model.a)(x)), y).mean()

    def parts(loss):
        optimizer = optax.sgd(0.1)
        return [Part("a", loss, optimizer), Part("b", second, optimizer, every=2)]

    def fit(loss, strategy):
        recorder = Recorder()
        trainer = Trainer(
            Two(), parts(loss), strategy=strategy, callbacks=[recorder],
            enable_progress_bar=False,
        )  # fmt: skip
        history = trainer.fit(batches(16, 16, 12, 5), max_epochs=2).history
        params = jax.tree.leaves(eqx.filter(trainer.model, eqx.is_array))
        return recorder.losses, history, params

    expected = fit(first_of_batch, SingleDevice())
    for strategy in (SingleDevice(), Sharded()):
        assert_same_numbers(fit(per_example(first), strategy), expected)


@pytest.mark.slow_cases("Members")
@pytest.mark.parametrize("kind", [SingleDevice, Members])
def test_members_of_an_ensemble_have_their_own_keys(kind):
    make = eqx.filter_vmap(lambda key: eqx.nn.Linear(4, 3, key=key))
    many = make(jax.random.split(jax.random.key(0), 2))

    def fit(loss_fn, strategy):
        trainer = quiet(loss_fn, strategy, many, ensemble=Ensemble(2))
        data = batches(16, 5)
        history = trainer.fit(data, data, max_epochs=2).history
        return [], history, jax.tree.leaves(eqx.filter(trainer.model, eqx.is_array))

    found = fit(per_example(noisy), Members(2) if kind is Members else kind())
    assert found[1]["loss[0]"] != found[1]["loss[1]"]
    assert_same_numbers(found, fit(noisy_batch, SingleDevice()))


def test_it_may_be_called_by_hand():
    model, (x, y) = linear(), batches(6)[0]
    keys = jax.random.split(jax.random.key(2), 6)

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def mean(model, loss):
        return loss(model, x, y).mean()

    found, expected = mean(model, per_example(plain)), mean(model, over_rows(plain))
    jax.tree.map(lambda *two: np.testing.assert_allclose(*two, 1e-6), found, expected)

    values = per_example(noisy)(model, x, y, keys=keys)
    np.testing.assert_allclose(values, noisy_batch(model, x, y, keys), rtol=1e-6)

    for training in (True, False):
        found = per_example(keyed)(model, x, y, keys=keys, training=training)
        expected = keyed_batch(model, x, y, keys, training)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        found = per_example(scheduled)(model, x, y, training=training, step=3)
        expected = scheduled_batch(model, x, y, 3, training)
        np.testing.assert_allclose(found, expected, rtol=1e-6)

    (loss, weight), metrics = per_example(weighted_metrics)(model, x, y)
    assert loss.shape == weight.shape == metrics["loss0"].shape == (6,)
    assert [each.shape for each in metrics["hits"]] == [(6,), (6,)]

    table = np.ones((3, 4), np.float32)
    found = per_example(lambda model, x, table: (table @ x).sum())(
        model, x, Whole(table)
    )
    np.testing.assert_allclose(found, (x @ table.T).sum(axis=1), rtol=1e-5)
    found = per_example(lambda model, batch: batch["x"].sum())(model, {"x": x, "y": y})
    np.testing.assert_allclose(found, x.sum(axis=1), rtol=1e-5)


def test_predictions_and_targets_may_be_kept():
    """They have the shapes that the model gives them."""

    def loss(model, x, y):
        logits = model(x)
        return softmax(logits, y), {"predictions": logits, "targets": y}

    def accuracy(predictions, targets):
        assert predictions.shape == (21, 3) and targets.shape == (21,)
        return (predictions.argmax(axis=1) == targets).mean()

    data = batches(16, 5)
    trainer = quiet(
        per_example(loss), Sharded(), metrics={"accuracy": PassMetric(accuracy)}
    )
    x, y = (np.concatenate(each) for each in zip(*data, strict=True))
    expected = (np.argmax(jax.vmap(linear())(x), axis=1) == y).mean()
    assert trainer.validate(data)["val_accuracy"] == pytest.approx(expected)


def penalised(model, x, y):
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    return plain(model, x, y) + 0.01 * sum(jnp.square(leaf).sum() for leaf in leaves)


def test_shards_of_a_block_are_gathered_by_its_calls_alone():
    """All at once, or by XLA, a loss may use any weights."""
    data = batches(16, 5)
    expected = train(over_rows(plain), model=Stacked(), data=data)
    found = train(per_example(plain), FSDP(min_size=1), Stacked(), data)
    assert_same_numbers(found, expected)

    with pytest.raises((TypeError, ValueError, RuntimeError), match='gather="once"'):
        quiet(per_example(penalised), FSDP(min_size=1), Stacked()).fit(data)

    expected = train(over_rows(penalised), model=Stacked(), data=data)
    for loss_fn, strategy in (
        (per_example(penalised), FSDP(min_size=1, gather="once")),
        (per_example(penalised), Sharded()),
        (over_rows(penalised), FSDP(min_size=1)),
    ):
        assert_same_numbers(train(loss_fn, strategy, Stacked(), data), expected)


class Branching(Stacked):
    """Calls its blocks in a branch, for some of the rows."""

    def __call__(self, x):
        h = self.first(x)
        h = jax.lax.cond(x[0] > 0, lambda: self.blocks(h), lambda: h)
        return self.last(jnp.tanh(h))


class Settling(Stacked):
    """Calls its blocks until a row has settled."""

    def __call__(self, x):
        h = jax.lax.while_loop(
            lambda h: jnp.abs(h).sum() > 1.0,
            lambda h: jnp.tanh(self.blocks(h)) / 2,
            jax.lax.stop_gradient(self.first(x)),
        )
        h = jax.lax.stop_gradient(h)
        return self.last(jnp.tanh(self.blocks(h)))


@pytest.mark.parametrize("kind", [Branching, Settling])
def test_devices_may_not_differ_in_which_blocks_they_gather(kind):
    """They would wait for each other, or sum gradients of other rows."""
    data = batches(16, 5)
    with pytest.raises(ValueError, match='gather="once"'):
        quiet(per_example(plain), FSDP(min_size=1), kind()).plan(data)
    expected = train(over_rows(plain), model=kind(), data=data)
    for loss_fn, strategy in (
        (per_example(plain), FSDP(min_size=1, gather="once")),
        (over_rows(plain), FSDP(min_size=1)),
    ):
        assert_same_numbers(train(loss_fn, strategy, kind(), data), expected)


def test_bitwise_takes_it_and_refuses_a_loss_of_a_batch():
    with pytest.raises((TypeError, ValueError), match="per_example"):
        quiet(over_rows(plain), Bitwise(Sharded())).fit(batches(16))

    def final(devices):
        trainer = quiet(per_example(noisy), Bitwise(Sharded(devices)))
        trainer.fit(batches(16, 11), max_epochs=2)
        return bits(eqx.filter(trainer.model, eqx.is_array))

    assert final(1) == final(8)


def test_a_scalar_of_one_example_is_no_mean_of_a_batch(caplog):
    data = batches(16, 5)
    train(per_example(measured), Sharded(), data=data)
    assert "is a scalar" not in caplog.text


@pytest.mark.parametrize(
    "options",
    [{"loss": per_example(jnp.add)}, {"metrics": {"a": per_example(jnp.add)}}],
)
def test_it_is_no_criterion(options):
    with pytest.raises(TypeError, match="pass it as `loss_fn`"):
        Trainer(linear(), **options)
