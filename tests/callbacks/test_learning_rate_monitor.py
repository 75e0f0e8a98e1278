"""The learning rate of a step, found in any optax optimizer."""

import equinox as eqx
import jax
import numpy as np
import optax
import optax.contrib
import pytest
from toys import batches

from jaxdp import Callback, Sharded, SingleDevice, Trainer
from jaxdp.callbacks import LearningRateMonitor

SCHEDULE = optax.linear_schedule(1e-2, 0.0, 10)
STEPS = [1e-2, 9e-3, 8e-3, 7e-3]


def make_model():
    return eqx.nn.Linear(4, 3, key=jax.random.key(0))


def labels(weight, bias):
    """A tree like the model; as a function, for optax would call a model."""
    tree = eqx.tree_at(lambda m: (m.weight, m.bias), make_model(), (weight, bias))
    return lambda params: tree


class Rates(Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, metrics, batch_idx):
        names = [name for name in metrics if name.startswith("lr")]
        self.seen.append({name: float(metrics[name]) for name in names})


def rates_of(optimizer, monitor=None, **options):
    """The rates of four steps, by name."""
    rates = Rates()
    options = {"strategy": SingleDevice(), "loss": "cross_entropy"} | options
    trainer = Trainer(
        make_model(),
        optimizer,
        callbacks=[monitor or LearningRateMonitor(), rates],
        enable_progress_bar=False,
        **options,
    )
    trainer.fit(batches(8, 8, 8, 8))
    return {name: [seen[name] for seen in rates.seen] for name in rates.seen[0]}


SCHEDULED = {
    "adam": lambda s: optax.adam(s),
    "adamw": lambda s: optax.adamw(s, weight_decay=0.1),
    "sgd": lambda s: optax.sgd(s),
    "momentum": lambda s: optax.sgd(s, momentum=0.9, nesterov=True),
    "lion": lambda s: optax.lion(s),
    "lamb": lambda s: optax.lamb(s),
    "adafactor": lambda s: optax.adafactor(s),
    "clipped": lambda s: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(s)),
    "by hand": lambda s: optax.chain(
        optax.scale_by_adam(), optax.scale_by_schedule(lambda count: -s(count))
    ),
    "in two": lambda s: optax.chain(
        optax.scale_by_adam(),
        optax.scale_by_schedule(lambda count: s(count) * 100),
        optax.scale(-0.01),
    ),
    "scaled before": lambda s: optax.chain(optax.scale(8.0), optax.adam(s)),
    "named": lambda s: optax.named_chain(("z", optax.clip(1.0)), ("a", optax.adam(s))),
    "wrapped": lambda s: optax.apply_if_finite(optax.flatten(optax.adam(s)), 3),
    "injected": lambda s: optax.inject_hyperparams(optax.adamw)(learning_rate=s),
    "injected lr": lambda s: optax.inject_hyperparams(
        lambda lr: optax.chain(optax.clip(1.0), optax.adam(lr))
    )(lr=s),
    "injected inside": lambda s: optax.chain(
        optax.clip(1.0), optax.inject_hyperparams(optax.sgd)(learning_rate=s)
    ),
    "injected else": lambda s: optax.chain(
        optax.inject_hyperparams(optax.scale_by_adam)(b1=lambda count: 0.9),
        optax.scale_by_learning_rate(s),
    ),
    "all masked": lambda s: optax.masked(optax.adam(s), True),
}


@pytest.mark.parametrize("name", SCHEDULED)
def test_a_schedule_is_found_and_evaluated_for_this_step(name):
    assert rates_of(SCHEDULED[name](SCHEDULE)) == {"lr": pytest.approx(STEPS)}


@pytest.mark.parametrize(
    ("optimizer", "rate"),
    [
        (optax.adam(3e-4), 3e-4),
        (optax.sgd(0.2), 0.2),
        (optax.chain(optax.scale(2.0), optax.sgd(0.1)), 0.2),
        (optax.chain(optax.adam(1e-2), optax.scale(0.5)), 5e-3),
        (optax.inject_hyperparams(optax.adam)(1e-3), 1e-3),
        (optax.contrib.schedule_free_adamw(0.1, warmup_steps=None), 0.1),
        (optax.contrib.prodigy(0.5), 0.5),
    ],
)
def test_a_constant_is_found(optimizer, rate):
    assert rates_of(optimizer) == {"lr": pytest.approx([rate] * 4)}


def test_the_default_optimizer_has_its_rate():
    assert rates_of(None) == {"lr": pytest.approx([1e-3] * 4)}


def test_clipping_and_many_devices_change_nothing():
    found = rates_of(optax.adam(SCHEDULE), strategy=Sharded(), gradient_clip_val=1.0)
    assert found == {"lr": pytest.approx(STEPS)}


def test_groups_of_leaves_have_their_labels():
    optimizer = optax.partition(
        {"slow": optax.adam(SCHEDULE), "fast": optax.sgd(0.5)}, labels("slow", "fast")
    )
    optimizer = optax.chain(optimizer, optax.scale(0.1))
    expected = {"lr/slow": [0.1 * s for s in STEPS], "lr/fast": [0.05] * 4}
    assert rates_of(optimizer) == {k: pytest.approx(v) for k, v in expected.items()}


def test_frozen_groups_have_no_rate():
    optimizer = optax.partition(
        {"on": optax.adam(SCHEDULE), "off": optax.set_to_zero()}, labels("on", "off")
    )
    assert rates_of(optimizer) == {"lr/on": pytest.approx(STEPS)}


def test_masked_stages_are_numbered():
    optimizer = optax.chain(
        optax.masked(optax.adam(SCHEDULE), labels(True, False)),
        optax.masked(optax.sgd(0.5), labels(False, True)),
    )
    found = rates_of(optimizer)
    assert found == {"lr/0": pytest.approx(STEPS), "lr/1": pytest.approx([0.5] * 4)}
    optimizer = optax.chain(
        optax.adam(SCHEDULE), optax.masked(optax.scale(0.1), labels(True, False))
    )
    found = rates_of(optimizer)
    assert found["lr"] == pytest.approx(STEPS)
    assert found["lr/0"] == pytest.approx([0.1 * s for s in STEPS])


def test_multi_steps_shows_the_rate_of_the_latest_update():
    found = rates_of(
        optax.MultiSteps(optax.adam(SCHEDULE), 2).gradient_transformation()
    )
    assert found == {"lr": pytest.approx([1e-2, 1e-2, 1e-2, 9e-3])}


def test_a_schedule_can_be_given():
    optimizer = optax.rprop(0.1)
    found = rates_of(optimizer, LearningRateMonitor(SCHEDULE))
    assert found == {"lr": pytest.approx(STEPS)}
    found = rates_of(optimizer, LearningRateMonitor(0.3, name="lr_of_rprop"))
    assert found == {"lr_of_rprop": pytest.approx([0.3] * 4)}


def test_an_optimizer_without_a_rate_says_what_to_do():
    message = r"found no learning rate.*LearningRateMonitor\(schedule=.*inject_hyperp"
    with pytest.raises(ValueError, match=message):
        rates_of(optax.chain(optax.clip(1.0), optax.scale_by_adam()))


@pytest.mark.parametrize(
    "optimizer", [optax.rprop(0.1), optax.optimistic_gradient_descent(0.1)]
)
def test_an_optimizer_that_hides_its_rate_says_what_to_do(optimizer):
    message = r"`optax.scale_by_\w+`.* to itself. Pass `LearningRateMonitor\(schedule="
    with pytest.raises(ValueError, match=message):
        rates_of(optimizer)


def test_schedules_that_cannot_be_told_apart_are_refused():
    inner = optax.adam(SCHEDULE)

    class Twice:
        """Keeps the state of a schedule that its closure does not show."""

        def init(self, params):
            return inner.init(params), inner.init(params)

        def update(self, updates, state, params=None):
            return inner.update(updates, state[0], params)[0], state

    hidden = Twice()
    optimizer = optax.chain(
        optax.GradientTransformation(hidden.init, hidden.update), optax.sgd(SCHEDULE)
    )
    message = "`optimizer` has 1 schedules but its state counts the updates of 3"
    with pytest.raises(ValueError, match=message):
        rates_of(optimizer)


def test_the_rate_is_the_factor_of_the_update():
    class Updates(Callback):
        def inside_step(self, grads, updates, state):
            return {"grad": grads.weight, "update": updates.weight}

        def on_train_batch_end(self, trainer, metrics, batch_idx):
            lr = metrics["lr"]
            np.testing.assert_allclose(
                metrics["update"], -lr * metrics["grad"], rtol=1e-5
            )

    trainer = Trainer(
        make_model(),
        optax.sgd(SCHEDULE),
        callbacks=[LearningRateMonitor(), Updates()],
        enable_progress_bar=False,
        loss="cross_entropy",
    )
    trainer.fit(batches(8, 8, 8))
