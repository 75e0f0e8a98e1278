"""What a run did: its curves, its page, and several runs side by side."""

from .figures import Curve, draw, metric_curves, save_figure, to_png
from .layout import layout
from .page import write_comparison, write_report
from .runs import comparison, differences, number, read_run, run_of_history

__all__ = [
    "Curve",
    "comparison",
    "differences",
    "draw",
    "layout",
    "metric_curves",
    "number",
    "read_run",
    "run_of_history",
    "save_figure",
    "to_png",
    "write_comparison",
    "write_report",
]
