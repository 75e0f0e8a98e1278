"""Several processes: how they start, exchange values, wait for each other, and end."""

from .process_group import PeriodicVote, ProcessGroup, get_process_group
from .row_blocks import RowBlocks, find_row_blocks, make_global_array
from .signals import (
    SIGNALS,
    Preempted,
    SignalHandler,
    format_error_line,
    is_graceful_stop,
    log_stop,
)
from .start import find_missing_initialize, initialize

__all__ = ["initialize"]
