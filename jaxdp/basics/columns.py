"""The columns of a run's table: what they are called, and what the names tell."""

import csv
import re
from pathlib import Path
from typing import Final

PLAN: Final = ".plan.txt"
"""The end of the file that `CSVLogger` writes the plan to."""
EPOCH: Final = "epoch_"
VALIDATION: Final = "val_"
THROUGHPUT: Final = "throughput/"


def read_table(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The columns and the rows of a table, without a torn one at its end."""
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        lines = list(file)
    # A run may be writing its last row at this moment, or was killed then.
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    reader = csv.DictReader(lines, restval="")
    columns = list(reader.fieldnames or [])
    return columns, [{name: row[name] for name in columns} for row in reader]


_LARGER_IS_BETTER: Final = re.compile(
    "acc|auc|auroc|bleu|dice|f1|fbeta|iou|jaccard|kappa|mfu|ndcg"
    "|per_s|precision|psnr|recall|rouge|sensitivity|specificity|ssim|top_"
    "|(^|_)(map|mrr|r2)(_|$)"
)
_SMALLER_IS_BETTER: Final = re.compile("(loss|error|err)$")
_IS_AN_ERROR: Final = re.compile(
    "loss|error|entropy|perplexity"
    "|(^|_)(err|mse|rmse|mae|mape|huber|nll|ppl|wer|cer|fid|kl|regret)(_|$)"
)


def larger_is_better(name: str) -> bool:
    """Whether a metric of that name is to be maximised, as far as names tell."""
    name = name.partition("[")[0].lower()  # without the number of a member
    is_loss = _SMALLER_IS_BETTER.search(name)
    return not is_loss and _LARGER_IS_BETTER.search(name) is not None


def best_mode(name: str, mode: str = "auto") -> str:
    """Which values of a metric are best, the `"min"` or the `"max"`: as `mode` says;
    if that is `"auto"`, as the name tells, and `"min"` if it tells nothing."""
    if mode == "auto":
        return mode_of_name(name) or "min"
    return mode


def mode_of_name(name: str) -> str | None:
    """`"min"` or `"max"`, if the name of a metric tells which is better."""
    if larger_is_better(name):
        return "max"
    return "min" if _IS_AN_ERROR.search(name.partition("[")[0].lower()) else None
