"""What a step costs, read from the compiled program before it runs."""

from ..step import repeated
from . import hlo
from .hardware import Hardware
from .plan import Plan, Scaling
from .reading import Bound, Estimate, Memory, Traffic

__all__ = [
    "Bound",
    "Estimate",
    "Hardware",
    "Memory",
    "Plan",
    "Scaling",
    "Traffic",
    "hlo",
    "repeated",
]
