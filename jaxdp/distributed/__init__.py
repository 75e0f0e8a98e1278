"""Several processes: how they start, agree, meet, and end together."""

from .meetings import Processes, Pulse, find_processes
from .row_blocks import RowBlocks, put, row_blocks
from .signals import SIGNALS, Interrupts, Preempted, first_line, is_stop, tell
from .start import forgotten, initialize

__all__ = ["initialize"]
