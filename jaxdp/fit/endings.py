"""What comes last, whatever happens before it: callbacks hear of it, and tidy up."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..basics.console import say
from ..callbacks.base import Hooks
from ..distributed import Preempted

if TYPE_CHECKING:
    from jaxdp import Trainer


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
            say(f"{exception.signal}: {text}")
