"""Packages that not everybody has, imported when they are needed."""

import importlib
import warnings
from typing import Any


def import_extra(module: str, who: str, extra: str) -> Any:
    """A module that `who` needs, of a package that an extra of this one installs."""
    try:
        with warnings.catch_warnings():
            # Of their own dependencies; nobody here can do anything about it.
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{who} needs {module.partition('.')[0]}, which is not installed; run"
            f' `pip install "jaxdp[{extra}]"`.'
        ) from error
