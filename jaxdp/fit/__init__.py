"""A fit, from its first batch to its last checkpoint."""

from .limits import Wanted
from .run import Run

__all__ = ["Run", "Wanted"]
