"""What watches and steers a fit. Write your own by overriding `Callback`'s hooks."""

from .base import Callback
from .donate import DonateBuffers
from .early_stopping import EarlyStopping
from .gradient_monitor import GradientMonitor
from .learning_rate import LearningRateMonitor
from .live_plot import LivePlot
from .lockstep import Lockstep
from .loggers import CSVLogger, Logger, TensorBoardLogger
from .mlflow_logger import MLFlowLogger
from .model_checkpoint import ModelCheckpoint
from .nan_guard import NanGuard
from .preemption import Preemption
from .profiler import Profiler
from .progress import ProgressBar
from .stall_watch import StallWatch
from .throughput import ThroughputMonitor
from .timer import Timer
from .wandb_logger import WandbLogger
from .weight_averaging import WeightAveraging

__all__ = [
    "CSVLogger",
    "Callback",
    "DonateBuffers",
    "EarlyStopping",
    "GradientMonitor",
    "LearningRateMonitor",
    "LivePlot",
    "Lockstep",
    "Logger",
    "MLFlowLogger",
    "ModelCheckpoint",
    "NanGuard",
    "Preemption",
    "Profiler",
    "ProgressBar",
    "StallWatch",
    "TensorBoardLogger",
    "ThroughputMonitor",
    "Timer",
    "WandbLogger",
    "WeightAveraging",
]
