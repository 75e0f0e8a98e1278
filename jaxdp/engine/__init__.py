"""The placed state of a run, and compiled steps taken on it."""

from .engine import Engine
from .pace import num_in_flight, wait
from .step import Kind, Program, StepOptions
