"""jaxdp: a PyTorch-style trainer for JAX.

from jaxdp import Trainer, Sharded

trainer = Trainer(model, optax.adam(1e-3), strategy=Sharded())
trainer.fit(train_loader, val_loader, max_epochs=10)
"""

from . import callbacks, compilation_cache, finders, losses, strategies, testing
from .callbacks import Callback
from .history import History
from .plan import Plan
from .step import TrainState
from .strategies import (
    FSDP,
    DataParallel,
    Pmap,
    Sharded,
    SingleDevice,
    TensorParallel,
    ZeRO,
)
from .trainer import Trainer
from .weights import load_model, save_model

compilation_cache.switch_on()

__version__ = "0.1.0"

__all__ = [
    "FSDP",
    "Callback",
    "DataParallel",
    "History",
    "Plan",
    "Pmap",
    "Sharded",
    "SingleDevice",
    "TensorParallel",
    "TrainState",
    "Trainer",
    "ZeRO",
    "callbacks",
    "finders",
    "load_model",
    "losses",
    "save_model",
    "strategies",
    "testing",
]
