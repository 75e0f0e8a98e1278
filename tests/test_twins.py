"""A run that is killed anywhere is the same run afterwards, whatever it uses."""

import warnings

import equinox as eqx
import jax
import optax
import pytest
from toys import NormNet, batches
from twins import check_twins

from jaxdp import FSDP, Bitwise, Sharded, SingleDevice, Trainer
from jaxdp.callbacks import (
    EarlyStopping,
    GradientMonitor,
    LearningRateMonitor,
    NanGuard,
    WeightAveraging,
)

pytestmark = pytest.mark.slow


DATA, VAL = batches(8, 8, 8, 8, 5), batches(8, 8, seed=1)
MANY = optax.MultiSteps(
    optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.cosine_decay_schedule(1e-2, 10)
    ),
    2,
).gradient_transformation()


def stops(monitor="val_loss", patience=2):
    return lambda: EarlyStopping(monitor, patience=patience, min_delta=10.0)


# What makes the trainer, what is passed to `fit`, and the boundaries to resume from.
CASES = {
    "max_steps": ({}, {"max_steps": 7}, {6, 8, 9}),
    "max_steps at an epoch's end": ({}, {"max_steps": 5}, {5, 6}),
    "max_steps in blocks": ({"steps_per_execution": 4}, {"max_steps": 7}, {2, 4}),
    "max_steps, validations": ({}, {"max_steps": 7, "val_check_interval": 2}, {8}),
    "validations by a share": ({}, {"max_epochs": 2, "val_check_interval": 0.4}, {2}),
    "accumulation": (
        {"accumulate_grad_batches": 2},
        {"max_epochs": 2, "val_check_interval": 2},
        {1, 3, 4},
    ),
    "blocks": (
        {"steps_per_execution": 3},
        {"max_epochs": 2, "val_check_interval": 2},
        {1, 3, 4},
    ),
    "early stopping": ({"cbs": [stops()]}, {"max_epochs": 6}, {17, 18}),
    "early stopping inside an epoch": (
        {"cbs": [stops()]},
        {"max_epochs": 6, "val_check_interval": 2},
        {2, 5},
    ),
    "early stopping by the loss": (
        {"cbs": [stops("loss", 1)], "val": None},
        {"max_epochs": 6},
        {6, 12},
    ),
    "averaged weights": (
        {"cbs": [lambda: WeightAveraging(0.5)]},
        {"max_epochs": 2},
        {3, 6},
    ),
    "a schedule": (
        {"opt": MANY, "cbs": [LearningRateMonitor]},
        {"max_epochs": 2},
        {3, 6},
    ),
    "guards": (
        {"cbs": [GradientMonitor, NanGuard]},
        {"max_epochs": 2},
        {2},
    ),
    "16-mixed": ({"precision": "16-mixed"}, {"max_epochs": 2}, {2}),
    "bf16-true": ({"precision": "bf16-true"}, {"max_epochs": 2}, {2}),
    "FSDP": ({"strategy": FSDP(min_size=1)}, {"max_epochs": 2}, {2}),
    "bitwise": (
        {"strategy": Bitwise(Sharded(4))},
        {"max_epochs": 2},
        {2},
    ),
    "overfit_batches": ({}, {"max_epochs": 2, "overfit_batches": 3}, {2, 5}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_as_its_twin(tmp_path, case):
    options, settings, which = CASES[case]
    options = {"strategy": SingleDevice(), **options}
    cbs, val = options.pop("cbs", ()), options.pop("val", VAL)
    optimizer = options.pop("opt", optax.adam(1e-2))

    def make(own):
        return Trainer(
            eqx.nn.Linear(4, 3, key=jax.random.key(0)),
            optimizer,
            loss="cross_entropy",
            callbacks=[*[new() for new in cbs], *own],
            enable_progress_bar=False,
            **options,
        )

    def fit(trainer, **more):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`fit` has nothing to do")
            trainer.fit(DATA, val, **settings, **more)

    blocks = "steps_per_execution" in options
    check_twins(tmp_path, make, fit, which, every_step=not blocks)


def test_running_statistics_go_on_too(tmp_path):
    def make(own):
        model, state = eqx.nn.make_with_state(NormNet)(jax.random.key(0))
        return Trainer(
            model,
            optax.adam(1e-2),
            loss="cross_entropy",
            state=state,
            callbacks=own,
            strategy=Sharded(2),
            enable_progress_bar=False,
        )

    check_twins(tmp_path, make, lambda t, **k: t.fit(DATA, VAL, max_epochs=2, **k), {3})


def test_a_run_that_was_to_stop_goes_on_with_more_patience(tmp_path):
    def trainer(patience):
        return Trainer(
            eqx.nn.Linear(4, 3, key=jax.random.key(0)),
            loss="cross_entropy",
            callbacks=[stops(patience=patience)()],
            strategy=SingleDevice(),
            enable_progress_bar=False,
        )

    first = trainer(1)
    first.fit(DATA, VAL, max_epochs=9)
    assert first.current_epoch == 2
    path = first.save(tmp_path / "saved")
    for patience, epochs in ((1, 2), (3, 4)):
        again = trainer(patience)
        again.fit(DATA, VAL, max_epochs=9, ckpt_path=path)
        assert again.current_epoch == epochs
