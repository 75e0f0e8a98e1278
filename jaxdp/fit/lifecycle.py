"""Decides who may use the state of a trainer now: what is running, and how it ends.

`run_activity` sets `run.doing`, and `check_may_train` refuses to train within a fit.
Within a call of several steps the state is ahead of the counters, and
`check_between_dispatches` refuses to save or load it. `DeviceState`
(`engine/device_state.py`) refuses arrays that a failed step has overwritten.
`SignalHandler` (`distributed/signals.py`) holds signals back until a boundary.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NoReturn

from ..basics.console import log_info
from ..basics.process import refuse_to_train_in_a_worker
from ..callbacks.base import Hooks
from ..distributed import Preempted, log_stop

if TYPE_CHECKING:
    from jaxdp import Trainer

    from .run import Run

FIT: Final = "a fit"
STEPS: Final = "a loop of steps"
"""Values of `run.doing`, beside the names of the methods that run a pass."""

Replacement = Callable[[Any, Any], NoReturn]
"""Called with the trainer and its `train_loader`; it raises."""

_REPLACEMENT: Final[ContextVar[Replacement | None]] = ContextVar(
    "replacement", default=None
)


@contextlib.contextmanager
def replace_training(function: Replacement) -> Iterator[None]:
    """Makes `Trainer.fit` and `Trainer.steps` call `function` first, within the block.

    `python -m jaxdp plan` stops a script this way where it would train.
    """
    token = _REPLACEMENT.set(function)
    try:
        yield
    finally:
        _REPLACEMENT.reset(token)


def check_may_train(trainer: "Trainer", method: str, train_loader: Any) -> None:
    """Raises if `fit` or `steps` may not train now."""
    refuse_to_train_in_a_worker()  # before the worker can open the files of the run
    if (function := _REPLACEMENT.get()) is not None:
        function(trainer, train_loader)
    if trainer.run.is_fitting:
        raise RuntimeError(
            f"`{method}` was called while a fit of the same trainer is running, from a"
            " callback perhaps; use a Trainer of its own."
        )
    check_between_dispatches(trainer.run, f"`{method}`")


def check_between_dispatches(run: "Run", what: str) -> None:
    """Raises within a dispatch of several steps: the state is ahead of counters."""
    step, ahead = run.progress.global_step, run.progress.ahead
    if ahead:
        raise RuntimeError(
            f"{what} was called after step {step}, but the state is that of step"
            f" {step + ahead}, with which the call of several steps ends"
            f" (`steps_per_execution`): do it there, as `on_boundary` does."
        )


@contextlib.contextmanager
def run_activity(
    trainer: "Trainer",
    activity: str,
    hooks: Hooks,
    end: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """Sets `run.doing` to `activity`; calls `end` and `teardown` after the block.

    If the block raises, `on_exception` is called first, but not of a loop of the
    caller. An error of these hooks is raised, or is a note of the error before it.
    """
    outer, trainer.run.doing = trainer.run.doing, activity
    try:
        try:
            yield
        except BaseException as exception:
            if activity != STEPS:
                with attach_second_error(exception):
                    hooks.on_exception(trainer, exception)
            with attach_second_error(exception):
                end()
            raise
        end()
    except BaseException as exception:
        with attach_second_error(exception):
            hooks.teardown(trainer)
        log_stop(exception)
        raise
    else:
        hooks.teardown(trainer)
    finally:
        trainer.run.doing = outer


@contextlib.contextmanager
def attach_second_error(exception: BaseException) -> Iterator[None]:
    """Adds a second exception as a note to the first, which the second would hide.

    It raises the second if the first is that of a loop which its caller has left.
    """
    try:
        yield
    except Exception as second:
        if isinstance(exception, GeneratorExit):
            raise
        text = f"{type(second).__name__}: {second}"
        exception.add_note(f"and after that: {text}")
        if isinstance(exception, Preempted):  # Python prints no notes of Preempted
            log_info(f"{exception.signal}: {text}")
            exception.later_error = exception.later_error or second
