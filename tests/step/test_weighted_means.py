"""Weighted means: batches `(x, y, weight)`, and values that come with weights."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import Recorder, batches

from jaxdp import FSDP, Bitwise, Pmap, Sharded, SingleDevice, Trainer

softmax = optax.softmax_cross_entropy_with_integer_labels
SIZES = 16, 11, 16, 3


def weighted(seed=1):
    """Ragged batches with weights of all sizes, some of them 0."""
    generator = np.random.default_rng(seed)
    weights = [generator.gamma(0.5, size=n).astype(np.float32) for n in SIZES]
    for each in weights:
        each[::5] = 0
    pairs = zip(batches(*SIZES), weights, strict=True)
    return [(x, y, weight) for (x, y), weight in pairs]


def linear():
    return eqx.nn.Linear(4, 3, key=jax.random.key(0))


def per_token(model, x, y):
    """Losses `(rows, 4)`, one for each of the features, and hits."""
    logits = jax.vmap(model)(x)[:, None] * x[:, :, None]
    labels = jnp.broadcast_to(y[:, None], x.shape)
    return softmax(logits, labels), logits.argmax(-1) == labels


def by_hand(data, sums_of, accumulate=1):
    """The losses of a loop in plain JAX, the model, and the sums of each step."""
    model, optimizer = linear(), optax.adam(0.05)
    state = optimizer.init(model)

    def mean(model, windows):
        found = [sums_of(model, *batch) for batch in windows]
        return sum(f[0] for f in found) / sum(f[1] for f in found)

    losses, sums = [], []
    for start in range(0, len(data), accumulate):
        window = data[start : start + accumulate]
        sums += [sums_of(model, *batch) for batch in window]
        loss, grads = jax.value_and_grad(mean)(model, window)
        updates, state = optimizer.update(grads, state)
        model = eqx.apply_updates(model, updates)
        losses.append(float(loss))
    return losses, model, np.asarray(sums).sum(0)


def trained(data, strategy, **options):
    recorder = Recorder()
    trainer = Trainer(
        linear(), optax.adam(0.05), strategy=strategy, callbacks=[recorder],
        enable_progress_bar=False, **options,
    )  # fmt: skip
    trainer.fit(data, data, max_epochs=1)
    return trainer, recorder.losses


LAYOUTS = {
    "one": lambda: (SingleDevice(), {}),
    "jit": lambda: (Sharded(), {"steps_per_execution": 2}),
    "pmap": lambda: (Pmap(), {"accumulate_grad_batches": 3}),
    "fsdp": lambda: (FSDP(min_size=1), {"accumulate_grad_batches": 2}),
    "bits": lambda: (Bitwise(Sharded()), {}),
}


@pytest.mark.slow_but("one", "fsdp")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_third_element_weighs_rows_in_the_loss_and_the_metrics(layout):
    def sums_of(model, x, y, weight):
        logits = jax.vmap(model)(x)
        hits = (logits.argmax(-1) == y) * weight
        return (softmax(logits, y) * weight).sum(), weight.sum(), hits.sum()

    (strategy, options), data = LAYOUTS[layout](), weighted()
    accumulate = options.get("accumulate_grad_batches", 1)
    losses, model, (loss, weight, hits) = by_hand(data, sums_of, accumulate)
    trainer, found = trained(
        data, strategy, loss="cross_entropy", metrics=["accuracy"], **options
    )
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    np.testing.assert_allclose(trainer.model.weight, model.weight, rtol=1e-4)
    history = trainer.history
    assert history["loss"] == pytest.approx([loss / weight], rel=1e-5)
    assert history["accuracy"] == pytest.approx([hits / weight], rel=1e-5)

    loss, weight, hits = np.sum([sums_of(model, *batch) for batch in data], axis=0)
    assert history["val_loss"] == pytest.approx([loss / weight], rel=1e-4)
    assert history["val_accuracy"] == pytest.approx([hits / weight], rel=1e-4)
    assert len(trainer.predict(data)) == sum(SIZES)  # from x alone


@pytest.mark.slow_but("one")
@pytest.mark.parametrize("layout", ["one", "jit", "fsdp"])
def test_values_with_masks_are_means_over_tokens(layout):
    """Of whole steps and epochs: not means of the means of rows or batches."""

    def loss_fn(model, x, y):
        mask = x > 0
        losses, hits = per_token(model, x, y)
        plain = jnp.ones(len(x))
        return (losses, mask), {"hits": (hits, mask), "plain": plain}

    def sums_of(model, x, y):
        losses, hits = per_token(model, x, y)
        return (losses * (x > 0)).sum(), (x > 0).sum(), (hits & (x > 0)).sum()

    (strategy, options), data = LAYOUTS[layout](), batches(*SIZES)
    accumulate = options.get("accumulate_grad_batches", 1)
    losses, model, (loss, mask, hits) = by_hand(data, sums_of, accumulate)
    trainer, found = trained(data, strategy, loss_fn=loss_fn, **options)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    history = trainer.history
    assert history["loss"] == pytest.approx([loss / mask], rel=1e-5)
    assert history["hits"] == pytest.approx([hits / mask], rel=1e-5)
    assert history["plain"] == [1.0]

    loss, mask, hits = np.sum([sums_of(model, *batch) for batch in data], axis=0)
    assert history["val_hits"] == pytest.approx([hits / mask], rel=1e-4)


def test_weights_of_a_criterion_and_of_the_batch_are_multiplied():
    def masked(prediction, target):
        return (prediction - target) ** 2, jnp.abs(target)

    x = batches(9)[0][0]
    weight, y = np.arange(9, dtype=np.int64), x[:, :3]
    trainer = Trainer(
        linear(), loss=masked, metrics={"same": masked}, enable_progress_bar=False
    )
    found = trainer.validate([(x[:5], y[:5], weight[:5]), (x[5:], y[5:], weight[5:])])
    error = np.square(jax.vmap(linear())(x) - y)
    expected = np.average(error, weights=np.abs(y) * weight[:, None])
    assert found == {
        "val_loss": pytest.approx(expected), "val_same": pytest.approx(expected)
    }  # fmt: skip


def test_a_step_without_any_weight_changes_nothing_and_counts_for_nothing():
    data = [(x, y, np.ones(len(x), bool)) for x, y in batches(16, 16)]
    empty = [(x, y, np.zeros(len(x), bool)) for x, y in batches(16)]
    options = {"loss": "cross_entropy", "enable_progress_bar": False}
    trainer = Trainer(linear(), optax.sgd(0.1), **options)
    other = Trainer(linear(), optax.sgd(0.1), **options)
    losses = [float(m["loss"]) for m in trainer.steps(data[:1] + empty + data[1:])]
    assert losses.pop(1) == 0
    assert losses == [float(m["loss"]) for m in other.steps(data)]
    np.testing.assert_array_equal(trainer.model.weight, other.model.weight)
    assert trainer.validate(data + empty) == trainer.validate(data)
    assert np.isnan(trainer.validate(empty)["val_loss"])


def test_an_epoch_that_is_resumed_has_the_weights_of_its_beginning(tmp_path):
    def new():
        return Trainer(linear(), loss="cross_entropy", enable_progress_bar=False)

    whole, first, second = new(), new(), new()
    whole.fit(weighted(), max_epochs=1)
    first.fit(weighted(), max_steps=2)
    second.load(first.save(tmp_path / "saved"))
    second.fit(weighted(), max_epochs=1)
    assert second.history["loss"] == whole.history["loss"]


def test_weights_that_depend_on_other_rows_are_of_the_real_ones():
    def loss_fn(model, x, y):
        losses = softmax(jax.vmap(model)(x), y)
        return losses, jax.nn.softmax(x[:, 0])

    data = batches(16, 5)
    trainer = Trainer(linear(), loss_fn=loss_fn, enable_progress_bar=False)
    trainer.fit(data[:1], data, max_epochs=1)  # the second would be padded to 16
    sums = [
        (np.sum(loss * weight), np.sum(weight))
        for loss, weight in (loss_fn(trainer.model, *batch) for batch in data)
    ]
    loss, weight = np.sum(sums, axis=0)
    assert trainer.history["val_loss"] == pytest.approx([loss / weight], rel=1e-5)


def test_that_batches_have_weights_is_said_once(caplog):
    trained(weighted(), SingleDevice(), loss="cross_entropy")
    assert caplog.text.count("batches are (x, y, weight): the loss and metrics") == 1


ONES = np.ones(8, np.float32)


def mean(prediction, target):
    return jnp.mean(prediction)


@pytest.mark.parametrize(
    "options, weight, error, match",
    [
        ({"loss": "cross_entropy"}, {"a": ONES}, TypeError, "must be an array .rows,."),
        ({"loss": "cross_entropy"}, np.ones((8, 2)), ValueError, r"shape \(8, 2\)"),
        ({"loss": mean}, ONES, ValueError, r"values of shape \(\) and"),
        ({"metrics": {"m": mean}}, ONES, ValueError, "return no mean, which can't be"),
        ({"loss": "cross_entropy"}, -ONES, ValueError, "0 or more.* has -1.0. For fac"),
        (
            {"loss": lambda p, t: p.mean(1)},
            ONES - 2 * np.eye(8)[3],
            ValueError,
            "has -1",
        ),
        ({"loss_fn": lambda m, x, *b: (x[0], 1.0)}, ONES, ValueError, "into a dict"),
        ({"loss_fn": lambda m, x, *b: (b[0], b[1])}, ONES, TypeError, "dtype int32"),
    ],
)
def test_what_can_not_be_weighted_is_refused(options, weight, error, match):
    x, y = batches(8)[0]
    trainer = Trainer(linear(), enable_progress_bar=False, **options)
    with pytest.raises(error, match=match):
        trainer.fit([(x, y, weight)])
