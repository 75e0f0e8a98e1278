"""The callbacks that a trainer has without being given any."""

from collections.abc import Iterable

import jax

from ..basics.console import warn
from ..callbacks.base import Callback
from ..callbacks.lockstep import Lockstep
from ..callbacks.progress_bar import ProgressBar
from ..distributed import forgotten


def with_defaults(
    callbacks: Iterable[Callback], *, progress_bar: bool
) -> list[Callback]:
    """The user's callbacks, and what they lack, with several processes too."""
    complete, in_lockstep = list(callbacks), jax.process_count() > 1
    if not in_lockstep and (warning := forgotten()):
        warn(warning)
    if progress_bar and not any(isinstance(own, ProgressBar) for own in complete):
        # First, so that it has cleared its line before the others print.
        complete.insert(0, ProgressBar())
    if in_lockstep:
        # Before the others, so that processes meet before anything happens at a hook.
        guards = [callback for callback in complete if isinstance(callback, Lockstep)]
        others = [
            callback for callback in complete if not isinstance(callback, Lockstep)
        ]
        complete = (guards or [Lockstep()]) + others
    return complete
