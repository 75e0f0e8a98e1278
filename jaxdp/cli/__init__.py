"""The command line: `python -m jaxdp run | doctor | plan | report | ...`."""

from .commands import main

__all__ = ["main"]
