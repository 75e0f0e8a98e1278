"""A fit, from its first batch to its last checkpoint."""

from .instead import instead_of_training, leave_if_asked
from .limits import Wanted
from .run import Run

__all__ = ["Run", "Wanted", "instead_of_training", "leave_if_asked"]
