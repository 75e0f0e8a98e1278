"""Imports of packages that only extras need."""

import importlib
import warnings
from typing import Any


def import_package(module: str, extra: str, who: str) -> Any:
    """Imports a module for `who`; the error names its package if it is missing.

    The command to install it does not name `jaxdp`: on the public index this name
    belongs to another library, with the same import name.
    """
    try:
        with warnings.catch_warnings():
            # Warnings of its dependencies, about which the user can do nothing.
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{who} needs {package}, which is not installed; run"
            f" `pip install {package}` (it is in this library's extra `{extra}`)."
        ) from error
