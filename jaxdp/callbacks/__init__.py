"""What watches and steers a fit. Write your own by overriding `Callback`'s hooks."""

from typing import TYPE_CHECKING, Any

from .base import Callback
from .donate import DonateBuffers
from .early_stopping import EarlyStopping
from .gradient_monitor import GradientMonitor
from .learning_rate import LearningRateMonitor
from .live_plot import LivePlot
from .loggers import CSVLogger, Logger, TensorBoardLogger
from .mlflow_logger import MLFlowLogger
from .nan_guard import NanGuard
from .profiler import Profiler
from .progress import ProgressBar
from .throughput import ThroughputMonitor
from .timer import Timer
from .wandb_logger import WandbLogger
from .weight_averaging import WeightAveraging

if TYPE_CHECKING:
    from .model_checkpoint import ModelCheckpoint

__all__ = [
    "CSVLogger",
    "Callback",
    "DonateBuffers",
    "EarlyStopping",
    "GradientMonitor",
    "LearningRateMonitor",
    "LivePlot",
    "Logger",
    "MLFlowLogger",
    "ModelCheckpoint",
    "NanGuard",
    "Profiler",
    "ProgressBar",
    "TensorBoardLogger",
    "ThroughputMonitor",
    "Timer",
    "WandbLogger",
    "WeightAveraging",
]


def __getattr__(name: str) -> Any:
    # Orbax takes a second to import, so only those who save pay for it.
    if name == "ModelCheckpoint":
        from .model_checkpoint import ModelCheckpoint

        return ModelCheckpoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
