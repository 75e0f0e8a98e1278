"""Trials that are reported at each validation, and pruned."""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import Mlp, batches

from jaxdp import Ensemble, Trainer
from jaxdp.callbacks import Callback, ModelCheckpoint

optuna = pytest.importorskip("optuna")
from jaxdp.callbacks import OptunaPruning  # noqa: E402

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Values(Callback):
    """Logs values that are known before."""

    def __init__(self, values, member=None):
        self.values, self.name = values, "val_known"
        self.name += "" if member is None else f"[{member}]"

    def on_validation_end(self, trainer, metrics):
        trainer.log(self.name, self.values[trainer.current_epoch])


def trainer_of(callbacks, **options):
    options = {"loss": "cross_entropy", "enable_progress_bar": False} | options
    model = options.pop("model", Mlp(jax.random.key(0)))
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)
    return Trainer(model, optimizer, callbacks=callbacks, **options)


def study_of(upper, **options):
    """A study that prunes what is above `upper`."""
    return optuna.create_study(
        pruner=optuna.pruners.ThresholdPruner(upper=upper), **options
    )


def test_a_trial_is_told_each_validation_and_pruned_by_its_study():
    ended = []

    class Ends(Callback):
        def teardown(self, trainer):
            ended.append(trainer.current_epoch)

    def objective(trial):
        values = [1.0, 0.5, 3.0, 0.1] if trial.number else [1.0, 0.5, 0.25, 0.1]
        pruning = OptunaPruning(trial, "val_known")
        trainer = trainer_of([Values(values), pruning, Ends()])
        return trainer.fit(batches(16), batches(16), max_epochs=4)["val_known"][-1]

    study = study_of(2.0)
    study.optimize(objective, n_trials=2)
    done, pruned = study.trials
    states = optuna.trial.TrialState
    assert (done.state, pruned.state) == (states.COMPLETE, states.PRUNED)
    assert done.value == 0.1
    assert done.intermediate_values == {0: 1.0, 1: 0.5, 2: 0.25, 3: 0.1}
    assert pruned.intermediate_values == {0: 1.0, 1: 0.5, 2: 3.0}
    assert ended == [4, 2]


def test_reports_go_on_where_a_resumed_trial_was(tmp_path):
    def fit(trial, epochs, ckpt_path):
        pruning = OptunaPruning(trial, "loss")  # of the training
        trainer = trainer_of([pruning, ModelCheckpoint(tmp_path)])
        trainer.fit(batches(16), max_epochs=epochs, ckpt_path=ckpt_path)

    study = study_of(1e9)
    trial = study.ask()
    fit(trial, 2, None)
    fit(trial, 3, "auto")
    assert [*study.trials[0].intermediate_values] == [0, 1, 2]


def test_the_members_of_an_ensemble_are_a_batch_of_trials():
    study = study_of(2.0)
    trials = [study.ask() for _ in range(3)]
    rates = [trial.suggest_float("rate", 1e-3, 1e-1, log=True) for trial in trials]
    models = jax.tree.map(
        lambda leaf: jnp.stack([leaf] * 3) if eqx.is_array(leaf) else leaf,
        Mlp(jax.random.key(0)),
    )
    values = [1, 1, 1, 1], [1, 9, 1, 1], [1, 1, 9, 1]
    known = [Values([float(v) for v in of], i) for i, of in enumerate(values)]
    whole = Values([1.0] * 4)
    pruning = OptunaPruning(trials, "val_known")
    ensemble = Ensemble(3, learning_rate=rates)
    trainer = trainer_of([whole, *known, pruning], model=models, ensemble=ensemble)
    history = trainer.fit(batches(16), batches(16), max_epochs=4)
    assert pruning.pruned == [1, 2]
    reported = [len(trial.intermediate_values) for trial in study.trials]
    assert reported == [4, 2, 3]
    for number, trial in enumerate(trials):
        state = optuna.trial.TrialState.PRUNED if number in pruning.pruned else None
        value = None if state else history[f"val_loss[{number}]"][-1]
        study.tell(trial, value, state)
    assert study.best_trial.number == 0

    values[0][1] = 9.0
    known[0].values[0] = known[1].values[0] = known[2].values[0] = 9.0
    trials = [study.ask() for _ in range(3)]
    pruning = OptunaPruning(trials, "val_known")
    trainer = trainer_of([whole, *known, pruning], model=models, ensemble=ensemble)
    with pytest.raises(optuna.TrialPruned, match="after 1 reports of val_known"):
        trainer.fit(batches(16), batches(16), max_epochs=4)


def test_wrong_trials_are_named():
    with pytest.raises(TypeError, match="`trial` must be an optuna.Trial"):
        OptunaPruning(None, "val_loss")
    several = optuna.create_study(directions=["minimize", "maximize"])
    with pytest.raises(ValueError, match="several objectives"):
        OptunaPruning(several.ask(), "val_loss")
    study = study_of(2.0)
    trainer = trainer_of([OptunaPruning([study.ask()], "val_loss")])
    with pytest.raises(ValueError, match="a list of 1 trials, and the Trainer has no"):
        trainer.fit(batches(16), batches(16))
    trainer = trainer_of([OptunaPruning(study.ask(), "val_los")])
    with pytest.raises(ValueError, match="nothing of that name is logged"):
        trainer.fit(batches(16), batches(16))
    assert np.isfinite(trainer.validate(batches(16))["val_loss"])


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch):
    trial = study_of(2.0).ask()
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match="`pip install optuna`"):
        OptunaPruning(trial)
