"""Several processes: how they start, agree, meet, and end together."""

from .start import first_line, forgotten, initialize, lifeline, together

__all__ = ["first_line", "forgotten", "initialize", "lifeline", "together"]
