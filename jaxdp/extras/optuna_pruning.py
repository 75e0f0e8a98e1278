"""Ends trials of Optuna early, as the pruner of the study decides."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..basics.arguments import checks_arguments
from ..basics.environment import import_extra
from ..callbacks.base import Trainer
from ..callbacks.monitor import MonitorCallback, announce, check_monitor
from ..distributed import get_process_group


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
        trial: an `optuna.Trial`. With several processes that of the first one is asked,
            and the others may pass None. With `Trainer(ensemble=n)` a list of n trials,
            one for each member: a pruned member is not reported again, and the fit ends
            when all are pruned. (A single trial gets the mean over the members.)
        monitor: name of an epoch's value, such as `"val_loss"`; the study knows in
            which direction it gets better. Members report theirs by number,
            `val_loss[0]`.

    Attributes:
        pruned: the numbers of the members that are pruned, in order.
    """

    @checks_arguments
    def __init__(self, trial: Any, monitor: str = "val_loss"):
        super().__init__(monitor, 0, 0.0, None)
        self._optuna = import_extra("optuna", "`OptunaPruning`", "optuna")
        self._is_several = isinstance(trial, Sequence)
        self.trials = list(trial) if self._is_several else [trial]
        for one in self.trials:
            if one is None and get_process_group().index:
                continue
            if not callable(getattr(one, "should_prune", None)):
                raise TypeError(
                    "`trial` must be an optuna.Trial, as `study.ask()` returns it, or a"
                    f" list of them; got {one!r} of type {type(one).__name__}."
                )
            if len(getattr(getattr(one, "study", None), "directions", "1")) > 1:
                raise ValueError(
                    "`trial` is of a study with several objectives, which Optuna does"
                    " not prune. Leave OptunaPruning out."
                )
        self.pruned: list[int] = []
        self._reports = 0

    def on_fit_start(self, trainer: Trainer) -> None:
        ensemble = trainer.run.arguments["ensemble"]
        size = None if ensemble is None else ensemble.size
        if self._is_several and size != len(self.trials):
            members = "no `ensemble`" if size is None else f"{size} members"
            raise ValueError(
                f"`trial` is a list of {len(self.trials)} trials, and the Trainer has"
                f" {members}; pass as many trials as there are members."
            )
        for name in self._names():
            check_monitor(trainer, self, name)

    def check(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        def report() -> list[int]:
            """Reports the values; returns the members that the study prunes."""
            to_prune = []
            for member, (name, trial) in enumerate(
                zip(self._names(), self.trials, strict=True)
            ):
                if member not in self.pruned:
                    trial.report(values[name], self._reports)
                    to_prune += [member] if trial.should_prune() else []
            return to_prune

        newly = get_process_group().run_on_rank_zero("reporting to Optuna", report)
        self._reports += 1
        self.pruned += newly
        if len(self.pruned) == len(self.trials):
            raise self._optuna.TrialPruned(
                f"pruned after {self._reports} reports of {self.monitor}, the last one"
                f" {values[self.monitor]:.6g}"
            )
        if newly:
            announce(trainer, "OptunaPruning", f"members {newly} are pruned")

    def _names(self) -> list[str]:
        if not self._is_several:
            return [self.monitor]
        return [f"{self.monitor}[{member}]" for member in range(len(self.trials))]

    def state_dict(self) -> dict[str, Any]:
        return {"reports": self._reports, "pruned": list(self.pruned)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._reports, self.pruned = state["reports"], list(state["pruned"])
