"""What a run did: its page, and several runs side by side."""

from .runs import (
    comparison,
    differences,
    read_run,
    report_trainer,
    run_of_history,
    write_comparison,
    write_report,
)
from .summary import Layer, Summary, summarize
