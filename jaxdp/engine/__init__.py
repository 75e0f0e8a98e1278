"""The train state on the devices, and the compiled steps that advance it."""

from .engine import Engine
from .in_flight import num_in_flight, wait
from .step import Program, SlowInLoop, StepKind, StepOptions
