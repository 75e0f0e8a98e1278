"""The placed state of a run, and compiled steps taken on it."""

from .engine import Engine, wait
from .hyperparams import RATES
from .options import StepOptions
from .programs import Kind

__all__ = [
    "Engine",
    "Kind",
    "RATES",
    "StepOptions",
    "wait",
]
