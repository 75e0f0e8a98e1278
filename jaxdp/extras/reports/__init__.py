"""Reports of a run: its page, and several runs side by side."""

from .runs import (
    compare_runs,
    make_run,
    read_run,
    report_trainer,
    tabulate_differences,
    write_report,
)
from .summary import Layer, Summary, summarize
