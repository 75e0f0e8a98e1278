"""The placed state of a run, and compiled steps taken on it."""

from .engine import Engine, wait
from .fetching import Fetching
from .hyperparams import RATES
from .programs import Kind, StepOptions
