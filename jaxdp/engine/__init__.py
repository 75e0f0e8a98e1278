"""The placed state of a run, and compiled steps taken on it."""

from .engine import Engine, wait
from .hyperparams import RATES
from .programs import Kind, StepOptions

__all__ = [
    "Engine",
    "Kind",
    "RATES",
    "StepOptions",
    "wait",
]
