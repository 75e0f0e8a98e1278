"""Tracebacks of a user's mistakes, without the frames that are none of the user's.

A mistake in a model stands behind some 25 frames of this package and of JAX, which say
nothing of it. JAX leaves out its own, and so does this; `JAX_TRACEBACK_FILTERING=off`
(or `jax.config.jax_traceback_filtering`) has them all shown, for debuggers too.
"""

import functools
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final

import jax

OURS: Final = {"jaxdp", "jax", "jaxlib", "equinox"}
BETWEEN: Final = {
    *("beartype", "jaxtyping", "numpy", "torch"),
    *sys.stdlib_module_names,
}
"""Through which a user's code may be called."""


def get_module_name(frame: FrameType) -> str:
    """The full name of the module that a frame's code is in."""
    return str(frame.f_globals.get("__name__", ""))


def get_package(frame: FrameType) -> str:
    """The package of that module."""
    return get_module_name(frame).partition(".")[0]


def find_user_frame(frame: FrameType) -> FrameType:
    """The user's frame that led to `frame`, the nearest one; `frame` if none did."""
    user_frame: FrameType | None = frame
    while user_frame is not None and get_package(user_frame) in OURS | BETWEEN:
        user_frame = user_frame.f_back
    return user_frame or frame


_NOTE: Final = (
    "(Frames of jaxdp and JAX are left out; JAX_TRACEBACK_FILTERING=off shows them.)"
)


class NoteOnError:  # noqa: N801
    """A context that adds a note to an exception from inside."""

    def __init__(
        self,
        note: str,
        kinds: type[Exception] | tuple[type[Exception], ...] = Exception,
    ):
        self._note, self._kinds = note, kinds

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, self._kinds):
            error.add_note(self._note)


def note_callback(
    error: BaseException, function: Callable[..., Any], hook: str = ""
) -> None:
    """Adds a note that says which callback's method, or partial of one, has raised."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", type(function).__name__)
    owner = type(function.__self__).__name__ if hasattr(function, "__self__") else name
    error.add_note(f"raised by the callback {owner}" + (hook and f" in {hook}"))


class TracebackFilter:
    """A context around what calls a user's code, in a public method.

    An exception that has come through some leaves it with the frames of that code and
    of what it called, but for those of JAX and this package. Others leave as they are.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        is_wanted = jax.config.jax_traceback_filtering != "off"  # pyright: ignore
        if not isinstance(error, Exception) or not is_wanted:
            return
        before = error.__traceback__

        # Of what it was raised from, too, which is printed before it.
        chain: list[BaseException] = []
        link: BaseException | None = error
        while link is not None and link not in chain:
            link.__traceback__ = _keep_user_frames(link.__traceback__)
            chain.append(link)
            link = link.__cause__ or link.__context__

        notes = getattr(error, "__notes__", [])
        is_told = any("JAX_TRACEBACK_FILTERING" in note for note in notes)
        if error.__traceback__ is not before and not is_told:
            error.add_note(_NOTE)


def _keep_user_frames(traceback: TracebackType | None) -> TracebackType | None:
    """A user's frames and those after them that are not ours; all if there are none."""
    entries: list[TracebackType] = []
    entry = traceback
    while entry is not None:
        frame = entry.tb_frame
        package = get_package(frame)
        # Equinox's layers say where in a model it was.
        is_ours = package in OURS and not get_module_name(frame).startswith(
            "equinox.nn."
        )
        if not is_ours and (entries or package not in BETWEEN):
            entries.append(entry)
        entry = entry.tb_next

    shown: TracebackType | None = None
    for step in reversed(entries):
        shown = TracebackType(shown, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return shown or traceback
