"""The learning rate of a step, as the state of `optax.inject_hyperparams` has it."""

import collections

import equinox as eqx
import optax
import pytest
from toys import On, batches, linear, linear_on_one_device, read_table

from jaxdp import Sharded
from jaxdp.callbacks import CSVLogger, LearningRateMonitor

SCHEDULE = optax.linear_schedule(1e-2, 0.0, 10)
STEPS = [1e-2, 9e-3, 8e-3, 7e-3]


def labels(weight, bias):
    """A tree like the model; as a function, for optax would call a model."""
    tree = eqx.tree_at(lambda m: (m.weight, m.bias), linear(), (weight, bias))
    return lambda params: tree


def injected(make, rate):
    return optax.inject_hyperparams(make)(learning_rate=rate)


def make(optimizer, *callbacks, **options):
    optimizer = optimizer or optax.adamw(1e-3)
    return linear_on_one_device(*callbacks, optimizer=optimizer, **options)


def rates_of(optimizer, monitor=None, **options):
    """Returns the rates of four steps, by name."""
    rates = collections.defaultdict(list)

    def see(trainer, metrics, batch_idx):
        for name in metrics:
            if name.startswith("lr"):
                rates[name].append(float(metrics[name]))

    sees = On(on_train_batch_end=see)
    trainer = make(optimizer, monitor or LearningRateMonitor(), sees, **options)
    history = trainer.fit(batches(8, 8, 8, 8))
    in_history = {name: history[name] for name in history if name.startswith("lr")}
    assert in_history == {name: seen[-1:] for name, seen in rates.items()}
    return rates


INJECTED = {
    "whole": lambda s: injected(optax.adamw, s),
    "lr": lambda s: optax.inject_hyperparams(
        lambda lr: optax.chain(optax.clip(1.0), optax.adam(lr))
    )(lr=s),
    "inside": lambda s: optax.chain(optax.clip(1.0), injected(optax.sgd, s)),
    "wrapped": lambda s: optax.apply_if_finite(
        optax.flatten(injected(optax.sgd, s)), 3
    ),
    "beside another": lambda s: optax.chain(
        optax.inject_hyperparams(optax.scale_by_adam)(b1=0.9), injected(optax.sgd, s)
    ),
}


@pytest.mark.parametrize("name", INJECTED)
def test_a_schedule_in_the_state_shows_the_rate_of_this_step(name):
    assert rates_of(INJECTED[name](SCHEDULE)) == {"lr": pytest.approx(STEPS)}


def test_numbers_clipping_and_many_devices():
    assert rates_of(injected(optax.adam, 1e-3)) == {"lr": pytest.approx([1e-3] * 4)}
    optimizer = injected(optax.adam, SCHEDULE)
    rates = rates_of(optimizer, strategy=Sharded(), gradient_clip_val=1.0)
    assert rates == {"lr": pytest.approx(STEPS)}


def test_groups_of_leaves_have_their_labels():
    groups = {"slow": injected(optax.adam, SCHEDULE), "fast": injected(optax.sgd, 0.5)}
    slow, fast = pytest.approx(STEPS), pytest.approx([0.5] * 4)
    rates = rates_of(optax.partition(groups, labels("slow", "fast")))
    assert rates == {"lr/slow": slow, "lr/fast": fast}
    optimizer = optax.chain(
        optax.masked(injected(optax.adam, SCHEDULE), labels(True, False)),
        optax.masked(injected(optax.sgd, 0.5), labels(False, True)),
    )
    assert rates_of(optimizer) == {"lr/0": slow, "lr/1": fast}
    scaled = optax.inject_hyperparams(optax.scale)(step_size=0.5)
    found = rates_of(optax.chain(injected(optax.sgd, 0.1), scaled))
    assert {name: seen[0] for name, seen in found.items()} == {
        "lr/learning_rate": pytest.approx(0.1),
        "lr/step_size": pytest.approx(0.5),
    }


def test_multi_steps_shows_the_rate_of_the_latest_update():
    several = optax.MultiSteps(injected(optax.adam, SCHEDULE), 2)
    found = rates_of(several.gradient_transformation())["lr"]
    assert found[1:] == pytest.approx([1e-2, 1e-2, 9e-3])


def test_a_schedule_can_be_given():
    optimizer = optax.adam(SCHEDULE)
    found = rates_of(optimizer, LearningRateMonitor(SCHEDULE))
    assert found == {"lr": pytest.approx(STEPS)}
    found = rates_of(optimizer, LearningRateMonitor(0.3, name="lr_of_adam"))
    assert found == {"lr_of_adam": pytest.approx([0.3] * 4)}


@pytest.mark.parametrize("optimizer, listed", [
    (None, "there are none"),
    (optax.adam(SCHEDULE), "there are none"),
    (optax.inject_hyperparams(optax.scale_by_adam)(b1=0.9), "b1"),
])  # fmt: skip
def test_an_optimizer_without_a_rate_in_its_state_is_refused(optimizer, listed):
    message = rf"keeps no learning rate.*\({listed}.*inject_hyperp.*Monitor\(schedule="
    with pytest.raises(ValueError, match=message):
        rates_of(optimizer)


def test_an_epoch_has_the_rate_of_its_last_step(tmp_path):
    def halve(trainer, metrics):
        rate = trainer.hyperparams["learning_rate"]
        trainer.set_hyperparams(learning_rate=rate / 2)

    halves = On(on_validation_end=halve)
    callbacks = halves, LearningRateMonitor(), CSVLogger(tmp_path)
    trainer = make(injected(optax.sgd, 0.5), *callbacks)
    history = trainer.fit(batches(8, 8), batches(8), max_epochs=3)
    assert history["lr"] == [0.5, 0.25, 0.125]
    rows = read_table(tmp_path)
    assert [float(row["epoch_lr"]) for row in rows] == history["lr"]
