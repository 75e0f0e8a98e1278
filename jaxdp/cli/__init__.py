"""The command line: `python -m jaxdp doctor | plan | report | compare | export`."""

from .commands import main

__all__ = ["main"]
