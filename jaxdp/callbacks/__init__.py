"""What watches and steers a fit. Write your own by overriding `Callback`'s hooks."""

import importlib
from typing import TYPE_CHECKING, Any, Final

from .base import Callback

if TYPE_CHECKING:
    from .csv_logger import CSVLogger
    from .donate_buffers import DonateBuffers
    from .early_stopping import EarlyStopping
    from .gradient_monitor import GradientMonitor
    from .learning_rate_monitor import LearningRateMonitor
    from .live_plot import LivePlot
    from .lockstep import Lockstep
    from .logger import Logger
    from .mlflow_logger import MLFlowLogger
    from .model_checkpoint import ModelCheckpoint
    from .nan_guard import NanGuard
    from .preemption import Preemption
    from .profiler import Profiler
    from .progress_bar import ProgressBar
    from .reduce_lr_on_plateau import ReduceLROnPlateau
    from .stall_watch import StallWatch
    from .tensorboard_logger import TensorBoardLogger
    from .throughput_monitor import ThroughputMonitor
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
    "ReduceLROnPlateau",
    "StallWatch",
    "TensorBoardLogger",
    "ThroughputMonitor",
    "Timer",
    "WandbLogger",
    "WeightAveraging",
]

_MODULES: Final = {
    "CSVLogger": "csv_logger",
    "DonateBuffers": "donate_buffers",
    "EarlyStopping": "early_stopping",
    "GradientMonitor": "gradient_monitor",
    "LearningRateMonitor": "learning_rate_monitor",
    "LivePlot": "live_plot",
    "Lockstep": "lockstep",
    "Logger": "logger",
    "MLFlowLogger": "mlflow_logger",
    "ModelCheckpoint": "model_checkpoint",
    "NanGuard": "nan_guard",
    "Preemption": "preemption",
    "Profiler": "profiler",
    "ProgressBar": "progress_bar",
    "ReduceLROnPlateau": "reduce_lr_on_plateau",
    "StallWatch": "stall_watch",
    "TensorBoardLogger": "tensorboard_logger",
    "ThroughputMonitor": "throughput_monitor",
    "Timer": "timer",
    "WandbLogger": "wandb_logger",
    "WeightAveraging": "weight_averaging",
}


def __getattr__(name: str) -> Any:
    """Imports a callback when it is first asked for: most fits need few."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
