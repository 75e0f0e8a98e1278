"""Which of the two a pair is: a loss and its weights, not a loss and a metric."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import batches

from jaxdp import FSDP, Part, Pmap, Sharded, SingleDevice, Trainer

softmax = optax.softmax_cross_entropy_with_integer_labels


def linear():
    return eqx.nn.Linear(4, 3, key=jax.random.key(0))


def results(model, x, y):
    logits = jax.vmap(model)(x)
    return softmax(logits, y), logits


def hits(model, x, y):
    loss, logits = results(model, x, y)
    return loss, logits.argmax(-1) == y


def count(model, x, y):
    loss, logits = results(model, x, y)
    return loss, (logits > 0).sum(axis=1)


def focal(model, x, y):
    loss, _ = results(model, x, y)
    return loss, jnp.exp(-loss)


@jax.checkpoint
@jax.jit
def inside(model, x, y):
    return hits(model, x, y)


def by_scan(model, x, y):
    def body(seen, row):
        loss, hit = jax.tree.map(lambda a: a[0], hits(model, *(r[None] for r in row)))
        return seen + loss, (loss, hit)

    return jax.lax.scan(body, 0.0, (x, y))[1]


def by_cond(model, x, y):
    loss, hit = hits(model, x, y)
    weight = jax.lax.cond(x.sum() > 0, lambda: hit, lambda: jnp.ones_like(hit))
    return loss, weight.astype(float)


def stopped(model, x, y):
    loss, logits = results(model, x, y)
    hit = logits.argmax(-1) == y
    return loss, jax.lax.stop_gradient(hit.astype(float) + 1)


def stopped_model(model, x, y):
    loss, _ = results(model, x, y)
    arrays, static = eqx.partition(model, eqx.is_array)
    model = eqx.combine(jax.lax.stop_gradient(arrays), static)
    return loss, 1 + hits(model, x, y)[1]


def scanned_mask(model, x, y):
    """The losses are of the model, and the weights come through the same loop."""

    def body(seen, row):
        x, y = row
        loss = softmax(model(x), y)
        return seen + loss, (loss, x[0] > 0)

    return jax.lax.scan(body, 0.0, (x, y))[1]


def of_data(model, x, y):
    return results(model, x, y)[0], (y != 1)


def in_a_dict(model, x, y):
    loss, hit = hits(model, x, y)
    return loss, {"hits": hit, "precision": (hit, results(model, x, y)[1][:, 0] > 0)}


STRATEGIES = {
    "one": SingleDevice, "jit": Sharded, "pmap": Pmap, "fsdp": lambda: FSDP(min_size=1)
}  # fmt: skip


def fit(loss_fn, strategy="jit", **options):
    trainer = Trainer(
        linear(), loss_fn=loss_fn, strategy=STRATEGIES[strategy](),
        enable_progress_bar=False, **options,
    )  # fmt: skip
    data = batches(16, 11)
    return trainer.fit(data, data, max_epochs=1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_of_parameters_are_refused(strategy):
    with pytest.raises(ValueError, match="depends on the model's par.*into a dict"):
        fit(focal, strategy)


def test_they_are_refused_wherever_a_loss_may_be():
    def criterion(prediction, target):
        return softmax(prediction, target), jax.nn.softmax(prediction)[:, 0]

    for trainer in (
        Trainer(linear(), loss=criterion),
        Trainer(linear(), [Part("weight", focal, optax.sgd(0.1))]),
        Trainer(linear(), loss_fn=focal, accumulate_grad_batches=2),
        Trainer(linear(), loss_fn=focal, steps_per_execution=2),
        Trainer(linear(), loss_fn=focal, precision="bf16-mixed"),
    ):
        with pytest.raises(ValueError, match="depends on the model's parameters"):
            trainer.fit(batches(8, 8))


@pytest.mark.parametrize("loss_fn", [stopped, stopped_model, scanned_mask, of_data])
def test_constant_weights_are_taken_and_said_once(loss_fn, caplog):
    history = fit(loss_fn)
    note = "the loss is a pair (values, weights): the second is the weight"
    assert caplog.text.count(note) == 1

    sums = [loss_fn(linear(), *batch) for batch in batches(16, 11)]
    total = np.sum([np.sum(loss * weight) for loss, weight in sums])
    weight = np.sum([np.sum(weight) for _, weight in sums])
    assert history["loss"][0] == pytest.approx(total / weight, abs=0.05)


def test_frozen_leaves_are_no_parameters():
    def loss_fn(models, x, y):
        student, teacher = models.layers
        return results(student, x, y)[0], 1 + hits(teacher, x, y)[1]

    models = eqx.nn.Sequential([linear(), linear()])
    spec = eqx.tree_at(
        lambda tree: tree.layers[0].weight, jax.tree.map(lambda _: False, models), True
    )
    Trainer(models, loss_fn=loss_fn, filter_spec=spec, enable_progress_bar=False).fit(
        batches(16)
    )


def test_metrics_may_have_weights_of_parameters(caplog):
    assert {*fit(in_a_dict)} >= {"hits", "precision", "val_precision"}
    assert caplog.text.count("metric 'precision' is a pair") == 1
    assert "the loss is a pair" not in caplog.text
