"""What a run did: its page, and several runs side by side."""

from .page import write_comparison, write_report
from .runs import comparison, differences, read_run, run_of_history
from .summary import Layer, Summary, summarize
