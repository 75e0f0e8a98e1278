"""Reports of a run: its page, and several runs side by side."""

from .runs import (
    compare_runs,
    list_differences,
    make_run,
    read_run,
    report_trainer,
    write_comparison,
    write_report,
)
from .summary import Layer, Summary, summarize
