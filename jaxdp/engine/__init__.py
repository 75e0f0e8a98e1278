"""The placed state of a run, and compiled steps taken on it."""

from .engine import Block, Engine, wait
from .hyperparams import RATES
from .options import StepOptions
from .programs import Kind

__all__ = [
    "Block",
    "Engine",
    "Kind",
    "RATES",
    "StepOptions",
    "wait",
]
