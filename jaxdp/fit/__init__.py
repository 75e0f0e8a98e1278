"""A fit, from its first batch to its last checkpoint."""

from .around import instead_of_training
from .limits import Wanted
from .pass_metrics import Metric, PassMetric
from .run import Run, begin_anew
from .surface import shapes_of
