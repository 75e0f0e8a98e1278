"""The callbacks that a trainer has without being given any."""

from collections.abc import Iterable

from ..callbacks.base import Callback
from ..callbacks.lockstep import Lockstep
from ..callbacks.progress_bar import ProgressBar
from ..supervisor import channel
from .supervised import Supervised


def with_defaults(
    callbacks: Iterable[Callback], *, progress_bar: bool, in_lockstep: bool
) -> list[Callback]:
    """The user's callbacks, and what they lack where processes train `in_lockstep`.

    Raises:
        ValueError: if they do, and `python -m jaxdp run` has started this one.
    """
    found = [each for each in callbacks if not isinstance(each, Supervised)]
    if (line := channel()) is not None:
        if in_lockstep:
            raise ValueError(
                "`python -m jaxdp run` restarts one process, but this is one of"
                " several that train together: only their launcher can restart"
                " them, all together."
            )
        # Last, because a snapshot knows what the others did at its step.
        found.append(Supervised(line))
    if progress_bar and not any(isinstance(each, ProgressBar) for each in found):
        # First, so that it has cleared its line before the others print.
        found.insert(0, ProgressBar())
    if in_lockstep:
        # Before the others, so that processes meet before anything happens at a hook.
        guards = [each for each in found if isinstance(each, Lockstep)]
        others = [each for each in found if not isinstance(each, Lockstep)]
        found = (guards or [Lockstep()]) + others
    return found
