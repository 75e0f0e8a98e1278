"""Finds what to train with, by trying: the learning rate.

The largest batch that fits is `trainer.plan(loader).largest_batch()`, from the compiled
program.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .callbacks.learning_rate_monitor import LearningRateMonitor
from .reports import save_figure
from .trainer import Trainer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SMOOTHING: Final = 0.9
"""Of the exponential mean of losses, against noise from batch to batch."""


class LRFinder:
    """The losses of a learning-rate range test.

    Attributes:
        results: `{"lr": [...], "loss": [...]}`, a float for each step, the loss being
            that before the step with that rate.
    """

    def __init__(self, rates: list[float], losses: list[float]):
        self.results = {"lr": rates, "loss": losses}

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """The rate at which the smoothed loss falls fastest, or None if none does.

        Args:
            skip_begin: steps to leave out at the begin.
            skip_end: and at the end.
        """
        losses = np.array(self._smoothed())
        last = len(losses) - skip_end
        kept = slice(skip_begin, last if last > skip_begin else skip_begin)
        rates, losses = np.array(self.results["lr"])[kept], losses[kept]
        fine = np.isfinite(losses)
        rates, losses = rates[fine], losses[fine]
        if len(losses) < 2:
            return None
        slopes = np.gradient(losses, np.log(rates))
        steepest = int(np.argmin(slopes))
        # A flat line falls, too, by what rounding makes of it.
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
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "Drawing needs matplotlib, which is not installed; run"
                ' `pip install "jaxdp[examples]"`.'
            ) from error
        figure = Figure(figsize=(6.0, 3.6), dpi=120, layout="constrained")
        axes = figure.add_subplot()
        rates, losses = self.results["lr"], self.results["loss"]
        axes.plot(rates, losses, color="0.8", linewidth=1, label="loss")
        axes.plot(rates, self._smoothed(), color="C0", label="smoothed")
        finite = [loss for loss in losses if math.isfinite(loss)]
        if finite:
            low, first = min(finite), finite[0]
            margin = max(first - low, abs(first) * 0.05, 1e-12)
            axes.set_ylim(low - 0.15 * margin, first + 1.5 * margin)
        best = self.suggestion() if suggest else None
        if best is not None:
            axes.axvline(
                best, color="C1", linestyle="--", label=f"suggestion {best:.2g}"
            )
        axes.set_xscale("log")
        axes.set_xlabel("learning rate")
        axes.set_ylabel("loss")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        if path is not None:
            save_figure(figure, path)
        return figure

    def _smoothed(self) -> list[float]:
        mean, smoothed = 0.0, []
        for count, loss in enumerate(self.results["loss"], 1):
            mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
            smoothed.append(mean / (1 - _SMOOTHING**count))
        return smoothed


def lr_find(
    trainer: Trainer,
    train_loader: Iterable[Any],
    *,
    min_lr: float = 1e-8,
    max_lr: float = 1.0,
    num_training: int = 100,
    mode: str = "exponential",
    early_stop_threshold: float | None = 4.0,
    optimizer: Callable[[float], optax.GradientTransformation] | None = None,
) -> LRFinder:
    """A learning-rate range test (Smith, arXiv:1506.01186): the loss of steps whose
    rate grows from `min_lr` to `max_lr`.

        found = lr_find(trainer, loader)
        found.plot("lr.png")
        trainer = Trainer(model, optax.adam(found.suggestion()))

    The steps are taken by a copy of the trainer, from the weights that it has now and a
    fresh optimizer: the trainer, its history and its callbacks stay as they are, and so
    do generators of a torch loader.

    Args:
        trainer: with the model, loss, strategy and so on to try.
        train_loader: as for `fit`; read from its start, again and again if it is short.
        min_lr: the first rate.
        max_lr: the last rate.
        num_training: how many steps.
        mode: "exponential" or "linear" growth.
        early_stop_threshold: stops when the loss is so many times the best one, or is
            not finite; None never stops.
        optimizer: makes the optimizer for a rate, `optax.adam` say. By default the
            trainer's own is used, with its updates rescaled by the rate to try over its
            own rate, which must then be found as by `LearningRateMonitor`. (Its
            updates must be proportional to its rate, as those of optax's are.)
    """
    if not 0 < min_lr < max_lr:
        raise ValueError(
            f"`min_lr`={min_lr} and `max_lr`={max_lr} must be positive, and the first"
            " less than the second."
        )
    if num_training < 2:
        raise ValueError(f"`num_training`={num_training} must be 2 steps or more.")
    if mode not in ("exponential", "linear"):
        raise ValueError(f"`mode`={mode!r} must be 'exponential' or 'linear'.")
    space = np.geomspace if mode == "exponential" else np.linspace
    rates = space(min_lr, max_lr, num_training)
    if optimizer is not None:
        tried = _rescaled(optimizer(1.0), None, rates)
    else:
        own = trainer.arguments["optimizer"]
        tried = _rescaled(own, LearningRateMonitor(), rates)
    twin = _twin(trainer, tried)
    losses: list[float] = []
    with _generators_kept(train_loader):
        for metrics in _endless(twin, train_loader, num_training):
            losses.append(
                float(metrics["loss"])
            )  # waits: the next step may be the last
            best = min(losses)
            if early_stop_threshold is None:
                continue
            limit = best + (early_stop_threshold - 1) * abs(best)
            if not math.isfinite(losses[-1]) or len(losses) > 10 and losses[-1] > limit:
                break
    return LRFinder([float(rate) for rate in rates[: len(losses)]], losses)


def _rescaled(
    optimizer: optax.GradientTransformation,
    monitor: LearningRateMonitor | None,
    rates: np.ndarray,
) -> optax.GradientTransformationExtraArgs:
    """`optimizer`, with the rates of `rates` in the place of its own.

    Args:
        optimizer: whose rate `monitor` finds, or is 1 without it.
        monitor: set up here.
        rates: one for each step.
    """
    inner = optax.with_extra_args_support(optimizer)
    if monitor is not None:
        monitor.setup(_Holder(inner))
    table = jnp.asarray(rates, jnp.float32)

    def init(params: Any) -> Any:
        return inner.init(params), jnp.zeros((), jnp.int32)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        own, count = state
        updates, own = inner.update(updates, own, params, **extra)
        rate = table[jnp.minimum(count, len(table) - 1)]
        if monitor is not None:
            found = monitor.inside_step(None, None, _Holder(opt_state=own))
            rate = rate / next(iter(found.values()))
        scaled = jax.tree.map(lambda u: u * rate.astype(u.dtype), updates)
        return scaled, (own, count + 1)

    return optax.GradientTransformationExtraArgs(init, update)


class _Holder:
    """What `LearningRateMonitor` looks at of a trainer and of a state."""

    def __init__(self, optimizer: Any = None, opt_state: Any = None):
        self.optimizer, self.opt_state = optimizer, opt_state


def _twin(trainer: Trainer, optimizer: Any) -> Trainer:
    """A trainer of the same model, which shares nothing that changes."""
    fresh = trainer._engine is None
    model = trainer.model if fresh else trainer.model_of(trainer.state)
    changed = {
        "model": model,
        "state": trainer.model_state,
        "optimizer": optimizer,
        "callbacks": (),
        "enable_progress_bar": False,
    }
    return Trainer(**{**trainer.arguments, **changed})


def _endless(twin: Trainer, loader: Any, count: int) -> Iterator[Any]:
    """Steps over epoch after epoch, `count` in all."""
    done = 0
    while done < count:
        before = done
        for metrics in twin.steps(loader):
            yield metrics
            done += 1
            if done == count:
                return
        if done == before:
            return


class _generators_kept:
    """Gives the generators that a torch loader was given back as they were."""

    def __init__(self, loader: Any):
        owners = loader, getattr(loader, "sampler", None)
        found: list[Any] = [getattr(owner, "generator", None) for owner in owners]
        self._kept = [(g, g.get_state()) for g in found if hasattr(g, "get_state")]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        for generator, state in self._kept:
            generator.set_state(state)
