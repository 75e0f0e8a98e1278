"""The learning rate of a step, as the state of `optax.inject_hyperparams` has it."""

import collections

import equinox as eqx
import optax
import pytest
from toys import On, batches, injected, linear, linear_on_one_device, read_table

from jaxdp import Sharded
from jaxdp.callbacks import CSVLogger, LearningRateMonitor

SCHEDULE = optax.linear_schedule(1e-2, 0.0, 10)
STEPS = pytest.approx([1e-2, 9e-3, 8e-3, 7e-3])
HALF = pytest.approx([0.5] * 4)


def labels(weight, bias):
    """A tree like the model; as a function, for optax would call a model."""
    tree = eqx.tree_at(lambda m: (m.weight, m.bias), linear(), (weight, bias))
    return lambda params: tree


def rates_of(optimizer, monitor=None, **options):
    """Returns the rates of four steps, by name."""
    rates = collections.defaultdict(list)

    def see(trainer, metrics, batch_idx):
        for name in metrics:
            if name.startswith("lr"):
                rates[name].append(float(metrics[name]))

    callbacks = monitor or LearningRateMonitor(), On(on_train_batch_end=see)
    trainer = linear_on_one_device(*callbacks, optimizer=optimizer, **options)
    history = trainer.fit(batches(8, 8, 8, 8))
    in_history = {name: history[name] for name in history if name.startswith("lr")}
    assert in_history == {name: seen[-1:] for name, seen in rates.items()}
    return rates


BESIDE = optax.inject_hyperparams(optax.scale_by_adam)(b1=0.9)
SCALED = optax.inject_hyperparams(optax.scale)(step_size=0.5)
GROUPS = {"slow": injected(SCHEDULE, optax.adam), "fast": injected(0.5)}


@pytest.mark.parametrize("optimizer, expected", [
    (injected(0.5, optax.adam), {"lr": HALF}),
    (injected(SCHEDULE, optax.adamw), {"lr": STEPS}),
    (optax.inject_hyperparams(lambda lr: optax.chain(optax.adam(lr)))(lr=SCHEDULE),
     {"lr": STEPS}),
    (optax.chain(optax.clip(1.0), injected(SCHEDULE)), {"lr": STEPS}),
    (optax.apply_if_finite(optax.flatten(injected(SCHEDULE)), 3), {"lr": STEPS}),
    (optax.chain(BESIDE, injected(SCHEDULE)), {"lr": STEPS}),
    (optax.partition(GROUPS, labels("slow", "fast")),
     {"lr/slow": STEPS, "lr/fast": HALF}),
    (optax.chain(optax.masked(GROUPS["slow"], labels(True, False)),
                 optax.masked(GROUPS["fast"], labels(False, True))),
     {"lr/0": STEPS, "lr/1": HALF}),
    (optax.chain(injected(SCHEDULE), SCALED),
     {"lr/learning_rate": STEPS, "lr/step_size": HALF}),
])  # fmt: skip
def test_the_state_shows_the_rates_of_this_step(optimizer, expected):
    assert rates_of(optimizer) == expected


def test_many_devices_multi_steps_and_given_schedules():
    options = {"strategy": Sharded(), "gradient_clip_val": 1.0}
    assert rates_of(injected(SCHEDULE, optax.adam), **options) == {"lr": STEPS}
    several = optax.MultiSteps(injected(SCHEDULE, optax.adam), 2)
    found = rates_of(several.gradient_transformation())["lr"]
    assert found[1:] == pytest.approx([1e-2, 1e-2, 9e-3])
    optimizer = optax.adam(SCHEDULE)
    assert rates_of(optimizer, LearningRateMonitor(SCHEDULE)) == {"lr": STEPS}
    found = rates_of(optimizer, LearningRateMonitor(0.5, name="lr_of_adam"))
    assert found == {"lr_of_adam": HALF}


def test_an_epoch_has_the_rate_of_its_last_step(tmp_path):
    def halve(trainer, metrics):
        rate = trainer.hyperparams["learning_rate"]
        trainer.set_hyperparams(learning_rate=rate / 2)

    callbacks = On(on_validation_end=halve), LearningRateMonitor(), CSVLogger(tmp_path)
    trainer = linear_on_one_device(*callbacks, optimizer=injected(0.5))
    history = trainer.fit(batches(8, 8), batches(8), max_epochs=3)
    assert history["lr"] == [0.5, 0.25, 0.125]
    rows = read_table(tmp_path)
    assert [float(row["epoch_lr"]) for row in rows] == history["lr"]
