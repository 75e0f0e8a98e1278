"""Callbacks watch and steer a fit. Write your own by overriding hooks of `Callback`."""

from typing import TYPE_CHECKING, Any

import jaxdp

from .base import Callback
from .csv_logger import CSVLogger
from .donate_buffers import DonateBuffers
from .early_stopping import EarlyStopping
from .gradient_monitor import GradientMonitor
from .hook_checks import check_hooks
from .learning_rate_monitor import LearningRateMonitor
from .lockstep import Lockstep
from .logger import Logger
from .model_checkpoint import ModelCheckpoint
from .nan_guard import NanGuard
from .preemption import Preemption
from .profiler import Profiler
from .progress_bar import ProgressBar
from .reduce_lr_on_plateau import ReduceLROnPlateau
from .stall_watch import StallWatch
from .throughput_monitor import ThroughputMonitor
from .weight_averaging import WeightAveraging

if TYPE_CHECKING:  # made by `__getattr__`
    LivePlot: Any
    MLFlowLogger: Any
    OptunaPruning: Any
    TensorBoardLogger: Any
    WandbLogger: Any

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
    "OptunaPruning",
    "Preemption",
    "Profiler",
    "ProgressBar",
    "ReduceLROnPlateau",
    "StallWatch",
    "TensorBoardLogger",
    "ThroughputMonitor",
    "WandbLogger",
    "WeightAveraging",
]


def __getattr__(name: str) -> Any:
    return jaxdp.open_extra(__name__, name)


def __dir__() -> list[str]:
    return sorted(__all__)
