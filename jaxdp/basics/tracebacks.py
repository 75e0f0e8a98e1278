"""Tracebacks of a user's mistakes, without the frames of this package and of JAX.

An error in a model has some 25 such frames above it, which don't help to find it. JAX
filters its own frames. `JAX_TRACEBACK_FILTERING=off` (or
`jax.config.jax_traceback_filtering`) shows all of them, also in debuggers.
"""

import functools
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final

import jax

OURS: Final = {"jaxdp", "jax", "jaxlib", "equinox"}
BETWEEN: Final = {"beartype", "jaxtyping", "numpy", "torch", *sys.stdlib_module_names}
"""Packages through which this package may call a user's code."""


def get_module_name(frame: FrameType) -> str:
    """Returns the full name of the module of a frame's code."""
    return str(frame.f_globals.get("__name__", ""))


def find_user_frame(frame: FrameType) -> FrameType:
    """Returns the nearest user's frame that led to `frame`, or else `frame`."""
    user_frame: FrameType | None = frame
    while user_frame is not None and _get_package(user_frame) in OURS | BETWEEN:
        user_frame = user_frame.f_back
    return user_frame or frame


def _get_package(frame: FrameType) -> str:
    return get_module_name(frame).partition(".")[0]


class NoteOnError:  # noqa: N801
    """A context that adds a note to an exception of its block."""

    def __init__(self, note: str):
        self._note = note

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, Exception):
            error.add_note(self._note)


def note_callback(
    error: BaseException, function: Callable[..., Any], hook: str = ""
) -> None:
    """Adds a note with the callback whose method, or partial of one, has raised."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", type(function).__name__)
    owner = type(function.__self__).__name__ if hasattr(function, "__self__") else name
    error.add_note(f"raised by the callback {owner}" + (hook and f" in {hook}"))


class TracebackFilter:
    """A context in public methods, which filters the tracebacks of exceptions.

    It keeps the frames of the user's code and of the code that it called, without the
    frames of JAX and of this package. A traceback without the user's code stays as it
    is.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        is_off = jax.config.jax_traceback_filtering == "off"  # pyright: ignore
        if not isinstance(error, Exception) or is_off:
            return
        before, link = error.__traceback__, error
        while link is not None:  # Python prints its causes, too
            link.__traceback__ = _keep_user_frames(link.__traceback__)
            link = link.__cause__ or link.__context__
        notes = "".join(getattr(error, "__notes__", []))
        if error.__traceback__ is not before and "JAX_TRACEBACK_FILTERING" not in notes:
            error.add_note(
                "(Frames of jaxdp and JAX are left out; JAX_TRACEBACK_FILTERING=off"
                " shows them.)"
            )


def _keep_user_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Keeps the user's frames and those below them that are not ours; all if none."""
    entries: list[TracebackType] = []
    entry = traceback
    while entry is not None:
        package, name = _get_package(entry.tb_frame), get_module_name(entry.tb_frame)
        # The frames of Equinox's layers show the place in the model.
        is_ours = package in OURS and not name.startswith("equinox.nn.")
        if not is_ours and (entries or package not in BETWEEN):
            entries.append(entry)
        entry = entry.tb_next

    kept: TracebackType | None = None
    for each in reversed(entries):
        kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept or traceback
