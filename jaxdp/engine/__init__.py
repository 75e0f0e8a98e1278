"""The placed state of a run, and compiled steps taken on it."""

from . import passes
from .engine import Engine
from .hyperparams import RATES
from .pace import num_in_flight, wait
from .passes import Fetching
from .step import Kind, StepOptions
