"""The plan of a script's training: the script runs up to where it would train."""

import contextlib
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from ..fit import instead_of_training
from ..trainer import Trainer


class _Planned(BaseException):
    """Leaves the script from inside of `fit`. No `except Exception` stops it."""

    def __init__(self, plan: Any):
        self.plan = plan


def plan_script(script: str, arguments: Sequence[str], **options: Any) -> Any:
    """The plan of the first `fit` (or `steps`) that a script comes to.

    Args:
        script: its path.
        arguments: for the script.
        options: for `Trainer.plan`.
    """
    if not os.path.isfile(script):
        raise FileNotFoundError(f"`{script}`: there is no such file.")

    def plan(trainer: Trainer, train_loader: Any) -> NoReturn:
        raise _Planned(trainer.plan(train_loader, **options))

    with _as_main(script, arguments), instead_of_training(plan):
        try:
            runpy.run_path(script, run_name="__main__")
        except _Planned as planned:
            return planned.plan
        except SystemExit as error:
            if error.code:
                raise ValueError(
                    f"{script} ended with exit code {error.code} before its `fit`."
                ) from error
    raise ValueError(
        f"{script} ended without a call of `Trainer.fit` or `Trainer.steps`, so there"
        " is nothing to plan. (It ran as a main program, with these arguments:"
        f" {list(arguments)}.)"
    )


@contextlib.contextmanager
def _as_main(script: str, arguments: Sequence[str]) -> Iterator[None]:
    """`sys.argv` and `sys.path` as when the script is started itself."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
