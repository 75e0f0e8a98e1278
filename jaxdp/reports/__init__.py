"""What a run did: its curves, its page, and several runs side by side."""

from .figures import Curve, draw, metric_curves, to_png
from .page import write_comparison, write_report
from .runs import (
    comparison,
    differences,
    in_words,
    read_run,
    read_table,
    run_of_history,
)
from .summary import Layer, Summary, summarize
