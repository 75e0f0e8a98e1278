"""Which checkpoints stay, by their scores."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..history import rank

Scores = Mapping[int, float | None]
"""Of each step that is saved: what was measured on its weights, or None."""


def as_json(scores: Scores) -> list[Any]:
    """Rows for JSON, which lacks NaN and infinity: scores are texts."""
    return [[step, s if s is None else str(s)] for step, s in scores.items()]


def from_json(rows: list[Any]) -> dict[int, float | None]:
    """The inverse of `as_json`."""
    return {step: s if s is None else float(s) for step, s in rows}


class Keeping(NamedTuple):
    """What is kept: the best, the newest, or both.

    Attributes:
        mode: whether "min" or "max" is best.
        top_k: how many of the best; -1 is all.
        last: whether the newest is kept, whatever its score.
    """

    mode: str
    top_k: int
    last: bool

    def ranked(self, scores: Scores) -> list[int]:
        """Steps with a score, the best first, NaN last; of equals the older first."""
        scored = [
            (rank(s, self.mode), step) for step, s in scores.items() if s is not None
        ]
        return [step for _, step in sorted(scored)]

    def kept(self, scores: Scores, needed: int | None = None) -> set[int]:
        """Which steps stay. What has no score stays while it is the newest of all.

        Args:
            scores: of all steps.
            needed: one that stays until there is a newer one.
        """
        if self.top_k == -1:
            return set(scores)
        kept = set(self.ranked(scores)[: self.top_k])
        newest = max(scores, default=None)
        is_last = self.last or newest == needed
        if newest is not None and (is_last or self.top_k and scores[newest] is None):
            kept.add(newest)
        return kept
