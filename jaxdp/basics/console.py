"""Messages to the user: on the logger "jaxdp", as warnings, and on streams."""

import contextlib
import functools
import logging
import sys
import warnings
from collections.abc import Container, Iterable, Sequence
from typing import Any, Final

from . import coordination
from .tracebacks import find_user_frame, get_module_name

_WARNING_REGISTRY: Final = "__warningregistry__"
"""The name of the global in which Python keeps the shown warnings of a module."""

_logger = logging.getLogger("jaxdp")
_logger.setLevel(logging.INFO)


class SafeStream:
    """A text file, or None, whose errors are ignored: they are no reason to end a run.

    The terminal may be closed, `tee` have ended, or the disk of the log be full. It
    equals the file itself, so that tqdm takes both for the same stream.
    """

    def __init__(self, file: Any):
        self.file = file  # None if started with `2>&-`, or without a console

    def write(self, text: str) -> None:
        """Writes the text, or does nothing if that fails."""
        with contextlib.suppress(AttributeError, OSError, ValueError):
            self.file.write(text)

    def flush(self) -> None:
        """Flushes the file, or does nothing if that fails."""
        with contextlib.suppress(AttributeError, OSError, ValueError):
            self.file.flush()

    def isatty(self) -> bool:
        """Returns True for a terminal."""
        with contextlib.suppress(AttributeError, OSError, ValueError):
            return bool(self.file.isatty())
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("file"), name)

    def __eq__(self, other: object) -> bool:
        return self.file == (other.file if isinstance(other, SafeStream) else other)


class _Stderr(logging.Handler):
    """Writes to the current `sys.stderr`, above progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        text, out = f"jaxdp: {record.getMessage()}", SafeStream(sys.stderr)
        tqdm = sys.modules.get("tqdm.std")
        if tqdm is not None:
            tqdm.tqdm.write(text, file=out)
        else:
            print(text, file=out)  # pyright: ignore


# A program that has set up logging gets the messages there. In other programs a package
# that is imported later may add handlers, which would print each message twice.
if not logging.getLogger().handlers:
    _logger.addHandler(_Stderr())
    _logger.propagate = False


def log_info(message: str, *, all_processes: bool = False) -> None:
    """Logs a message that needs no action: on process 0, or on all processes."""
    if all_processes or coordination.process_index() == 0:
        _logger.info(message)


def log_debug(message: str) -> None:
    """Logs a message at the level DEBUG, on this process."""
    _logger.debug(message)


@functools.cache
def log_info_once(message: str) -> None:
    """Logs a message unless it was logged before."""
    log_info(message)


def warn(message: str) -> None:
    """Warns, at the user's line that led here."""
    frame = find_user_frame(sys._getframe(1))
    registry = frame.f_globals.setdefault(_WARNING_REGISTRY, {})
    where = frame.f_code.co_filename, frame.f_lineno, get_module_name(frame)
    warnings.warn_explicit(message, UserWarning, *where, registry)


def join_numbers(noun: str, numbers: Iterable[int]) -> str:
    """Returns "process 1", or "processes 1, 2 and 5"."""
    *first, last = sorted(numbers)
    if not first:
        return f"{noun} {last}"
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{plural} {', '.join(map(str, first))} and {last}"


def join_some(names: Iterable[str], between: str = ", ") -> str:
    """Returns "a, b, c, d, e and 4 more"."""
    names = list(names)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return between.join(names[:5]) + more


def format_columns(
    rows: Iterable[Sequence[str]], right: Container[int] = ()
) -> list[str]:
    """Formats the lines of a table; the columns numbered in `right` align right."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [
        [
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
    return ["  ".join(row).rstrip() for row in padded]
