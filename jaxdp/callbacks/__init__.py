"""What watches and steers a fit. Write your own by overriding `Callback`'s hooks."""

from .base import Callback
from .donate import DonateBuffers
from .early_stopping import EarlyStopping
from .learning_rate import LearningRateMonitor
from .live_plot import LivePlot
from .loggers import CSVLogger, Logger, TensorBoardLogger
from .model_checkpoint import ModelCheckpoint
from .nan_guard import NanGuard
from .preemption import Preemption
from .progress import ProgressBar
from .stall_watch import StallWatch
from .timer import Timer

__all__ = [
    "CSVLogger",
    "Callback",
    "DonateBuffers",
    "EarlyStopping",
    "LearningRateMonitor",
    "LivePlot",
    "Logger",
    "ModelCheckpoint",
    "NanGuard",
    "Preemption",
    "ProgressBar",
    "StallWatch",
    "TensorBoardLogger",
    "Timer",
]
