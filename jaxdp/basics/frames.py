"""Whose a frame of the stack is: the user's, ours, or between the two."""

import sys
from types import FrameType
from typing import Final

OURS: Final = {"jaxdp", "jax", "jaxlib", "equinox"}
BETWEEN: Final = {
    *("beartype", "jaxtyping", "numpy", "torch"),
    *sys.stdlib_module_names,
}
"""Through which a user's code may be called."""


def module_of(frame: FrameType) -> str:
    """The full name of the module that a frame's code is in."""
    return str(frame.f_globals.get("__name__", ""))


def package_of(frame: FrameType) -> str:
    """The package of that module."""
    return module_of(frame).partition(".")[0]


def innermost_of_user(frame: FrameType) -> FrameType:
    """The user's frame that led to `frame`, the nearest one; `frame` if none did."""
    user_frame: FrameType | None = frame
    while user_frame is not None and package_of(user_frame) in OURS | BETWEEN:
        user_frame = user_frame.f_back
    return user_frame or frame
