"""The train state on the devices, and the compiled steps that advance it."""

from .compiled_step import SlowInLoop, StepKind, StepOptions
from .engine import Engine
from .in_flight import num_in_flight, wait
from .program import Program
