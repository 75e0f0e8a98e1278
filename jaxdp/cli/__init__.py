"""The command line: `python -m jaxdp doctor | plan | report | ...`."""

from .commands import main

__all__ = ["main"]
