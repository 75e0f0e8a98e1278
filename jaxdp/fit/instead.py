"""What happens instead of training, where somebody only wants to know what would."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NoReturn

from ..basics.process import refuse_to_train_in_a_worker

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


def leave_if_asked(trainer: "Trainer", train_loader: Any) -> None:
    """What `fit` and `steps` begin with."""
    refuse_to_train_in_a_worker()  # before it can open the run's own files
    if (function := _ASKED.get()) is not None:
        function(trainer, train_loader)
