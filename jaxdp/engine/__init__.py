"""The placed state of a run, and compiled steps taken on it."""

from .engine import Engine
from .pace import num_in_flight, wait
from .program import Program
from .state import (
    RATES,
    hyperparam_values,
    hyperparams_in,
    leaves_to_set,
)
from .step import Kind, StepOptions
