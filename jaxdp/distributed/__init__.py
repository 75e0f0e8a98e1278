"""Several processes: how they start, agree, meet, and end together."""

from .meetings import Processes, Pulse, find_processes
from .row_blocks import RowBlocks, put, row_blocks
from .signals import SIGNALS, Interrupts, Preempted, first_line, is_stop, tell
from .start import forgotten, initialize

__all__ = [
    "Interrupts",
    "Preempted",
    "Processes",
    "Pulse",
    "RowBlocks",
    "SIGNALS",
    "find_processes",
    "first_line",
    "forgotten",
    "initialize",
    "is_stop",
    "put",
    "row_blocks",
    "tell",
]
