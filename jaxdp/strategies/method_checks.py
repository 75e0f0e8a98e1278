"""Checks the methods and the mesh of a user's strategy before anything runs."""

import inspect
from types import MethodType
from typing import Final

from ..basics.arguments import bind_method, format_method
from ..basics.console import warn
from ..basics.other_libraries import find_near
from .base import DataParallel

_METHODS: Final = {
    name: method
    for name, method in vars(DataParallel).items()
    if inspect.isfunction(method) and not name.startswith("_")
}
"""The methods of a strategy that a subclass may override."""


def check_mesh(strategy: DataParallel) -> None:
    """Raises for a strategy without a mesh to place arrays on."""
    places = strategy.place != MethodType(DataParallel.place, strategy)
    if strategy.mesh.empty and not places:
        raise ValueError(
            f"`strategy`: `{type(strategy).__name__}` has no `mesh`: call"
            " `super().__init__(...)` in its `__init__`, or set `mesh`, or override"
            " `place` and `compile`."
        )


def check_methods(strategy: DataParallel) -> None:
    """Raises for a method that is called with other arguments, and for a missing mesh;
    warns of names that look like a misspelt method."""
    kind = type(strategy)
    if kind.prepare.__module__.startswith("jaxdp."):  # another may make a mesh
        check_mesh(strategy)
    classes = [cls for cls in kind.__mro__ if not cls.__module__.startswith("jaxdp.")]
    custom = {name for each in (*classes, strategy) for name in vars(each)}
    # Helpers may have names like `placed`, or names like a method beside that method.
    inherited = {name for name in _METHODS if len(name) > 7} - custom
    for name in sorted(custom):
        where = f"`{kind.__name__}.{name}`"
        if name in _METHODS:
            bind_method(where, getattr(strategy, name), _METHODS[name])
        elif name.startswith("_"):
            continue
        elif callable(inspect.getattr_static(strategy, name)):
            if near := find_near(name, inherited, 0.88):
                warn(
                    f"{where} is no method of a strategy, so nothing calls it; did you"
                    f" mean `{format_method(_METHODS[near])}`?"
                )
