"""What a step costs, read from the compiled program before it runs."""

from ..basics.hardware import Hardware
from ..step import repeated
from . import hlo
from .parts import Bound, Estimate, Memory, Traffic
from .plan import Plan, Scaling
from .planner import Planner, of_running

__all__ = [
    "Bound",
    "Estimate",
    "Hardware",
    "Memory",
    "Plan",
    "Planner",
    "Scaling",
    "Traffic",
    "hlo",
    "of_running",
    "repeated",
]
