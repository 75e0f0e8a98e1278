"""A fit, from its first batch to its last checkpoint."""

from .limits import Limits
from .progress import Progress

__all__ = [
    "Limits",
    "Progress",
]
