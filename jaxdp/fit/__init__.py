"""A fit, from its first batch to its last checkpoint."""

from .lifecycle import replace_training
from .pass_metrics import Metric, PassMetric
from .progress import FitArguments
from .run import Run, TrainerConfig
from .trainer_methods import get_shapes
