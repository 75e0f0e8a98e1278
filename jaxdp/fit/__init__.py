"""A fit, from its first batch to its last checkpoint."""

from .around import instead_of_training
from .pass_metrics import Metric, PassMetric
from .progress import Wanted
from .run import Recipe, Run, begin_anew
from .surface import shapes_of
