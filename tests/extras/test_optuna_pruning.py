"""Trials that are reported at each validation, and pruned."""

import pytest
from toys import On, batches, linear_on_one_device, scores

from jaxdp.callbacks import ModelCheckpoint

optuna = pytest.importorskip("optuna")
from jaxdp.callbacks import OptunaPruning  # noqa: E402

optuna.logging.set_verbosity(optuna.logging.WARNING)


def study_of(upper):
    """A study that prunes what is above `upper`."""
    return optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=upper))


def test_a_trial_is_told_each_validation_and_pruned_by_its_study():
    ended = []

    def end(trainer):
        ended.append(trainer.current_epoch)

    def objective(trial):
        values = [1.0, 0.5, 3.0, 0.1] if trial.number else [1.0, 0.5, 0.25, 0.1]
        pruning = OptunaPruning(trial, "val_known")
        known = scores(values, "val_known")
        trainer = linear_on_one_device(known, pruning, On(teardown=end))
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
        trainer = linear_on_one_device(pruning, ModelCheckpoint(tmp_path))
        trainer.fit(batches(16), max_epochs=epochs, ckpt_path=ckpt_path)

    study = study_of(1e9)
    trial = study.ask()
    fit(trial, 2, None)
    fit(trial, 3, "auto")
    assert [*study.trials[0].intermediate_values] == [0, 1, 2]
