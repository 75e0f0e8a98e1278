"""Several processes: how they start, exchange values, wait for each other, and end."""

from typing import Any

import jaxdp

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


def __getattr__(name: str) -> Any:
    return jaxdp.open_extra(__name__, name)
