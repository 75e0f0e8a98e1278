"""Messages to the user: on the logger "jaxdp", as warnings, and on streams."""

import contextlib
import functools
import logging
import sys
import warnings
from collections.abc import Container, Iterable, Sequence
from typing import Any

from . import coordination
from .tracebacks import find_user_frame, get_module_name

_logger = logging.getLogger("jaxdp")
_logger.setLevel(logging.INFO)


_ignore_errors = contextlib.suppress(AttributeError, OSError, ValueError)


class SafeStream:
    """A text file, or None, whose errors are ignored: they are no reason to end a run.

    The terminal may be closed, `tee` have ended, or the disk of the log be full. It
    equals the file itself, so that tqdm takes both for the same stream.
    """

    def __init__(self, file: Any):
        self.file = file  # None if started with `2>&-`, or without a console

    def write(self, text: str) -> None:
        with _ignore_errors:
            self.file.write(text)

    def flush(self) -> None:
        with _ignore_errors:
            self.file.flush()

    def isatty(self) -> bool:
        with _ignore_errors:
            return bool(self.file.isatty())
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("file"), name)

    def __eq__(self, other: object) -> bool:
        return self.file == (other.file if isinstance(other, SafeStream) else other)


class _Stderr(logging.Handler):
    """Writes to the current `sys.stderr`, above progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm = sys.modules.get("tqdm.std")
        write: Any = print if tqdm is None else tqdm.tqdm.write
        write(f"jaxdp: {record.getMessage()}", file=SafeStream(sys.stderr))


# A program that has set up logging gets the messages there. In other programs a package
# that is imported later may add handlers, which would print each message twice.
if not logging.getLogger().handlers:
    _logger.addHandler(_Stderr())
    _logger.propagate = False


def log_info(message: str, *, all_processes: bool = False) -> None:
    """Logs a message that needs no action: on process 0, or on all processes."""
    if all_processes or coordination.process_index() == 0:
        _logger.info(message)


@functools.cache
def log_info_once(message: str) -> None:
    """Logs a message unless it was logged before."""
    log_info(message)


def warn(message: str) -> None:
    """Warns, at the user's line that led here."""
    frame = find_user_frame(sys._getframe(1))
    # Python keeps a module's shown warnings there.
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    where = frame.f_code.co_filename, frame.f_lineno, get_module_name(frame)
    warnings.warn_explicit(message, UserWarning, *where, registry)


def join_numbers(noun: str, numbers: Iterable[int]) -> str:
    """Returns "process 1", or "processes 1, 2 and 5"."""
    *first, last = map(str, sorted(numbers))
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{plural} {', '.join(first)} and {last}" if first else f"{noun} {last}"


def add_article(noun: str) -> str:
    """Returns "an int", "an ndarray", "an MLP" or "a str"."""
    starts = (*"aeio", "nd", "mlp", "lstm")
    return f"{'an' if noun.lower().startswith(starts) else 'a'} {noun}"


def join_some(names: Iterable[str], between: str = ", ") -> str:
    """Returns "a, b, c, d, e and 4 more"."""
    names = list(names)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return between.join(names[:5]) + more


def format_columns(
    rows: Iterable[Sequence[str]], right: Container[int] = ()
) -> list[str]:
    """Formats the lines of a table; the columns numbered in `right` align right."""
    columns = []
    for place, cells in enumerate(zip(*rows, strict=True)):
        width, align = max(map(len, cells)), ">" if place in right else "<"
        columns.append([f"{cell:{align}{width}}" for cell in cells])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
