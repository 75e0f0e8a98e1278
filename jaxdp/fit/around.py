"""What stands around a fit: what may keep it from starting, and what comes last.

Whatever happens inside, callbacks hear of it, and tidy up.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NoReturn

import equinox as eqx
import jax

from ..basics.console import log_info
from ..basics.process import refuse_to_train_in_a_worker
from ..callbacks.base import Hooks
from ..distributed import Preempted
from ..step import InferenceModel

if TYPE_CHECKING:
    from jaxdp import Trainer

Instead = Callable[[Any, Any], NoReturn]
"""Given the trainer and its `train_loader`; it leaves by an exception."""

_ASKED: Final[ContextVar[Instead | None]] = ContextVar("instead", default=None)


@contextlib.contextmanager
def instead_of_training(function: Instead) -> Iterator[None]:
    """Inside, `Trainer.fit` and `Trainer.steps` call `function` before all else.

    So `python -m jaxdp plan` stops a script where it would train.
    """
    token = _ASKED.set(function)
    try:
        yield
    finally:
        _ASKED.reset(token)


def check_may_train(trainer: "Trainer", method: str, train_loader: Any) -> None:
    """What `fit` and `steps` begin with: whether they are to train, and may."""
    refuse_to_train_in_a_worker()  # before it can open the run's own files
    if (function := _ASKED.get()) is not None:
        function(trainer, train_loader)
    if trainer.run.doing == "a fit":
        raise RuntimeError(
            f"`{method}` was called while a fit of the same trainer is running, from a"
            " callback perhaps; use a Trainer of its own."
        )
    trainer.run.check_is_settled(f"`{method}`")
    if trainer.run.progress.global_step == 0:
        _tell_of_inference(trainer.run.recipe.model)


def _tell_of_inference(model: Any) -> None:
    """Says which layers of a model that is to be trained are in inference mode."""
    layers: Counter[str] = Counter()

    def count(node: Any) -> bool:
        is_layer = isinstance(node, eqx.Module)
        does_nothing = getattr(node, "p", None) == 0  # a dropout of nothing
        if is_layer and getattr(node, "inference", None) is True and not does_nothing:
            layers[type(node).__name__] += 1
        return False

    jax.tree.leaves(model, is_leaf=count)  # it is asked of every node
    if not layers:
        return
    listed = ", ".join(f"{number} {name}" for name, number in sorted(layers.items()))
    remedy = "`eqx.nn.inference_mode(model, False)` ends that, if it is not on purpose."
    if isinstance(model, InferenceModel):
        remedy = (
            "`inference_model()` is made to be called; to train, pass `trainer.model`"
            " and `state=trainer.model_state` instead."
        )
    log_info(
        f"layers of the model are in inference mode, and stay so in training: {listed}"
        f" (no dropout, running statistics that do not move). {remedy}"
    )


@contextlib.contextmanager
def doing(trainer: "Trainer", what: str, hooks: Hooks) -> Iterator[None]:
    """Around what callbacks are `setup` for; ends with their `teardown`."""
    outer, trainer.run.doing = trainer.run.doing, what
    try:
        yield
    except BaseException as exception:
        with noting(exception):
            hooks.teardown(trainer)
        raise
    else:
        hooks.teardown(trainer)
    finally:
        trainer.run.doing = outer


@contextlib.contextmanager
def noting(exception: BaseException) -> Iterator[None]:
    """Keeps a second exception from hiding the first."""
    try:
        yield
    except Exception as second:
        text = f"{type(second).__name__}: {second}"
        exception.add_note(f"and after that: {text}")
        if isinstance(exception, Preempted):  # whose notes nobody gets to see
            log_info(f"{exception.signal}: {text}")
