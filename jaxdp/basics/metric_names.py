"""What the name of a metric tells."""

import re
from typing import Final

_LARGER_IS_BETTER: Final = re.compile(
    "acc|auc|auroc|bleu|dice|f1|fbeta|iou|jaccard|kappa|mfu|ndcg"
    "|per_s|precision|psnr|recall|rouge|sensitivity|specificity|ssim|top_"
    "|(^|_)(map|mrr|r2)(_|$)"
)
_SMALLER_IS_BETTER: Final = re.compile("(loss|error|err)$")


def larger_is_better(name: str) -> bool:
    """Whether a metric of that name is to be maximised, as far as names tell."""
    name = name.partition("[")[0].lower()  # without the number of a member
    is_loss = _SMALLER_IS_BETTER.search(name)
    return not is_loss and _LARGER_IS_BETTER.search(name) is not None
