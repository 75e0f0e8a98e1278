"""The placed state of a run, and compiled steps taken on it."""

from . import passes
from .engine import Engine
from .fetching import Fetching
from .hyperparams import RATES
from .in_flight import num_in_flight, wait
from .step import Kind, StepOptions
