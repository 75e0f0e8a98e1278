"""What the library tells the user, on the logger "jaxdp"."""

import logging
import sys
from collections.abc import Iterable

from . import coordination

_logger = logging.getLogger("jaxdp")
_logger.setLevel(logging.INFO)


class _Stderr(logging.Handler):
    """To the present `sys.stderr`, clear of progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        text = f"jaxdp: {record.getMessage()}"
        tqdm = sys.modules.get("tqdm.std")
        if tqdm is not None:
            tqdm.tqdm.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr)


# A program that has set up logging before gets the messages there. One that has not
# may still be given handlers later, by a package it imports; those would say it twice.
if not logging.getLogger().handlers:
    _logger.addHandler(_Stderr())
    _logger.propagate = False


def say(message: str, *, everywhere: bool = False) -> None:
    """Tells the user something that needs no action.

    Args:
        message: a sentence or two.
        everywhere: whether all processes say it, if there are several, not only one.
    """
    if everywhere or coordination.index() == 0:
        _logger.info(message)


def listed(noun: str, numbers: Iterable[int]) -> str:
    """process 1; processes 1, 2 and 5; ports 61000 to 61007."""
    *first, last = sorted(numbers)
    if not first:
        return f"{noun} {last}"
    plural = noun + ("es" if noun.endswith("s") else "s")
    if len(first) > 2 and last - first[0] == len(first):
        return f"{plural} {first[0]} to {last}"
    return f"{plural} {', '.join(map(str, first))} and {last}"
