"""Finds a learning rate by trying many.

`trainer.plan(loader).largest_batch()` finds the largest batch, from compiled programs.
"""

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import optax

from ..basics.arguments import check_count, checks_arguments
from ..basics.console import log_info
from ..data.loader_state import LoaderState
from ..engine.hyperparams import find_hyperparams
from ..fit import checks
from ..trainer import Trainer
from .figures import Curve, draw, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SMOOTHING: Final = 0.98
"""The factor of the exponential mean of losses, as in Lightning."""


class LRFinder:
    """The losses of a learning-rate range test.

    Attributes:
        results: `{"lr": [...], "loss": [...]}`, with a float for each step: its rate,
            and the loss before the step.
    """

    def __init__(self, rates: list[float], losses: list[float]):
        self.results = {"lr": rates, "loss": losses}

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Returns the rate at which the smoothed loss falls fastest, or None.

        Args:
            skip_begin: how many steps to leave out at the beginning.
            skip_end: how many to leave out at the end.
        """
        losses = np.array(self._smooth_losses())  # on the host
        last = len(losses) - skip_end
        selected = slice(skip_begin, last if last > skip_begin else skip_begin)
        rates = np.array(self.results["lr"])[selected]  # on the host
        losses = losses[selected]
        fine = np.isfinite(losses)
        rates, losses = rates[fine], losses[fine]
        if len(losses) < 2:
            return None
        slopes = np.gradient(losses, np.log(rates))
        steepest = int(np.argmin(slopes))
        # Rounding makes even a flat line fall somewhere.
        falls = slopes[steepest] < -1e-6 * np.abs(losses).max()
        return float(rates[steepest]) if falls else None

    def plot(
        self, path: str | os.PathLike[str] | None = None, suggest: bool = True
    ) -> "Figure":
        """Draws the loss over the rate.

        Args:
            path: where to save the picture too.
            suggest: whether to mark the `suggestion`.
        """
        rates, losses = self.results["lr"], self.results["loss"]
        curves = [
            Curve("loss", list(zip(rates, losses, strict=True)), "0.8"),
            Curve(
                "smoothed", list(zip(rates, self._smooth_losses(), strict=True)), "C0"
            ),
        ]
        figure = draw({"loss": curves}, "learning rate")
        (axes,) = figure.axes
        axes.set_xscale("log")
        axes.set_yscale("linear")
        finite = [loss for loss in losses if math.isfinite(loss)]
        if finite:  # a loss that explodes would flatten the rest of the curve
            low, first = min(finite), finite[0]
            margin = max(first - low, abs(first) * 0.05, 1e-12)
            axes.set_ylim(low - 0.15 * margin, first + 1.5 * margin)
        best = self.suggestion() if suggest else None
        if best is not None:
            label = f"suggestion {best:.2g}"
            axes.axvline(best, color="C1", linestyle="--", label=label)
            axes.legend(frameon=False)
        if path is not None:
            save_figure(figure, path)
        return figure

    def _smooth_losses(self) -> list[float]:
        """Exponential means of the losses."""
        total, weight, means = 0.0, 0.0, []
        for loss in self.results["loss"]:
            total = _SMOOTHING * total + (1 - _SMOOTHING) * loss
            weight = _SMOOTHING * weight + (1 - _SMOOTHING)
            means.append(total / weight)
        return means


@checks_arguments
def lr_find(
    trainer: Trainer,
    train_loader: Iterable[Any],
    *,
    optimizer: Callable[[float], optax.GradientTransformation],
    min_lr: float = 1e-8,
    max_lr: float = 1.0,
    num_training: int = 100,
    mode: Literal["exponential", "linear"] = "exponential",
    early_stop_threshold: float | None = 4.0,
) -> LRFinder:
    """Takes steps whose rate grows from `min_lr` to `max_lr`, and returns their losses.

        found = lr_find(trainer, loader, optimizer=optax.adam)
        found.plot("lr.png")
        trainer = Trainer(model, optax.adam(found.suggestion()))

    This is the range test of Smith (arXiv:1506.01186). A copy of the trainer takes the
    steps, with its present weights and a new optimizer. The trainer, its history and
    its callbacks stay as they are, and so do the generators of a torch loader.

    Args:
        trainer: with the model, loss, strategy and so on to try.
        train_loader: as for `fit`; read from its start, again and again if it is short.
        optimizer: a function from a rate to an optimizer, such as `optax.adam`. Its
            updates must be proportional to the rate, as those of optax are.
        min_lr: the first rate.
        max_lr: the last rate.
        num_training: how many steps.
        mode: "exponential" or "linear" growth.
        early_stop_threshold: stops when the smoothed loss (over some 50 steps) is this
            many times the best one; None never stops. A loss that is not finite is the
            last one in any case.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"`trainer` must be a jaxdp.Trainer; got {trainer!r}.")
    if not 0 < min_lr < max_lr:
        raise ValueError(
            f"`min_lr`={min_lr} and `max_lr`={max_lr} must be positive, and the first"
            " less than the second."
        )
    check_count("num_training", num_training, 2)

    if checks.is_list_of_parts(trainer.run.arguments["optimizer"]):
        raise ValueError(
            "`lr_find` works for one optimizer, but this trainer has a list of"
            " parts. Make a Trainer for one part: its `loss_fn`, its optimizer"
            " and a `filter_spec` of its leaves."
        )
    space = np.geomspace if mode == "exponential" else np.linspace
    rates = space(min_lr, max_lr, num_training).tolist()

    # A copy takes the steps; the trainer does not change.
    twin = _make_twin(trainer, optimizer)
    hyperparams = find_hyperparams(twin.run.engine.state)
    rate_name = max(hyperparams, key=lambda name: hyperparams[name].index)
    shape = hyperparams[rate_name].leaf.shape  # one for each member of an ensemble
    epochs = (twin.steps(train_loader) for _ in rates)
    steps = itertools.chain.from_iterable(epochs)
    losses: list[float] = []
    finder = LRFinder(rates, losses)
    best = math.inf
    with contextlib.ExitStack() as stack:
        # The generators and samplers of a torch loader end as they were.
        loader_state = LoaderState(train_loader, "train_loader", has_index_lists=True)
        stack.callback(loader_state.restore, loader_state.read())
        for rate in rates:
            twin.set_hyperparams(**{rate_name: np.full(shape, rate)})
            if (metrics := next(steps, None)) is None:
                break  # an empty loader
            # waits for the device: the next step may be the last
            losses.append(float(metrics["loss"]))
            if not math.isfinite(losses[-1]):
                log_info(f"`lr_find` ends at a rate of {rate:.3g}: {losses[-1]} loss")
                break
            smoothed = finder._smooth_losses()[-1]
            best = min(best, smoothed)
            if early_stop_threshold is None or len(losses) <= 10:
                continue
            if smoothed > best + (early_stop_threshold - 1) * abs(best):
                break
    finder.results["lr"] = rates[: len(losses)]
    return finder


def _make_twin(trainer: Trainer, optimizer: Callable[[float], Any]) -> Trainer:
    """Makes a trainer of the same model, which shares no state.

    The last hyperparameter of its optimizer is the rate.
    """
    fresh = not trainer.run.has_engine
    model = trainer.model if fresh else trainer.run.model_of(trainer.state)
    scale = optax.inject_hyperparams(optax.scale)(step_size=1.0)
    changed = {
        "model": model,
        "state": trainer.model_state,
        "optimizer": optax.chain(optimizer(1.0), scale),
        "callbacks": (),
        "enable_progress_bar": False,
        "steps_per_execution": 1,
    }
    return Trainer(**{**trainer.run.arguments, **changed})
