"""Ends trials of Optuna early, as the pruner of the study decides."""

from typing import Any

from ..basics.arguments import checks_arguments
from ..callbacks.base import Trainer
from ..callbacks.monitor import MonitorCallback, check_validates_before_end
from ..distributed import get_process_group
from .import_package import import_package


class OptunaPruning(MonitorCallback):
    """Reports a value to an Optuna trial, and ends the fit of a trial to be pruned.

        def objective(trial):
            rate = trial.suggest_float("rate", 1e-4, 1e-1, log=True)
            pruning = OptunaPruning(trial, "val_loss")
            trainer = Trainer(model, optax.adam(rate), callbacks=[pruning])
            return trainer.fit(train, val, max_epochs=20)["val_loss"][-1]

    It reports after every validation when `monitor` begins with `val_`, and after every
    training epoch otherwise; the first report is that of step 0. A fit that is pruned
    raises `optuna.TrialPruned`, in all processes alike.

    Args:
        trial: an `optuna.Trial`. With several processes, only process 0 asks its
            trial, and the others may pass None. With `Trainer(ensemble=n)` the value
            is the mean over the members.
        monitor: name of an epoch's value, such as `"val_loss"`; the study knows in
            which direction it gets better.
    """

    @checks_arguments
    def __init__(self, trial: Any, monitor: str = "val_loss"):
        self.monitor = monitor
        self._optuna = import_package("optuna", "optuna", "`OptunaPruning`")
        is_needed = trial is not None or get_process_group().index == 0
        if is_needed and not callable(getattr(trial, "should_prune", None)):
            raise TypeError(
                "`trial` must be an optuna.Trial, as `study.ask()` returns it; got"
                f" {trial!r} of type {type(trial).__name__}."
            )
        if len(getattr(getattr(trial, "study", None), "directions", "1")) > 1:
            raise ValueError(
                "`trial` is of a study with several objectives, which Optuna does not"
                " prune. Leave OptunaPruning out."
            )
        self.trial: Any = trial
        self._reports = 0

    def on_fit_start(self, trainer: Trainer) -> None:
        super().on_fit_start(trainer)
        check_validates_before_end(self, trainer)

    def check(self, trainer: Trainer, value: float) -> None:
        def report() -> bool:
            self.trial.report(value, self._reports)
            return self.trial.should_prune()

        should_prune = get_process_group().run_on_rank_zero(
            "reporting to Optuna", report
        )
        self._reports += 1
        if should_prune:
            raise self._optuna.TrialPruned(
                f"pruned after {self._reports} reports of {self.monitor}, the last one"
                f" {value:.6g}"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"reports": self._reports}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._reports = state["reports"]
