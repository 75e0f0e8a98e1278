"""The costs of a step, read from the compiled program before it runs."""

from . import hlo
from .estimate import Bound, Estimate, Memory, Remedy, Traffic
from .hardware import Hardware, hardware_of
from .plan import Plan, Scaling
from .planning import plan_running_step, plan_step
from .products import make_loop_scope as repeated

__all__ = [
    "Bound",
    "Estimate",
    "Hardware",
    "Memory",
    "Plan",
    "Remedy",
    "Scaling",
    "Traffic",
    "hardware_of",
    "hlo",
    "plan_running_step",
    "plan_step",
    "repeated",
]
