"""jaxdp: a PyTorch-style trainer for JAX.

from jaxdp import Trainer, Sharded

trainer = Trainer(model, optax.adam(1e-3), strategy=Sharded())
trainer.fit(train_loader, val_loader, max_epochs=10)
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import callbacks, distributed, losses, strategies
from .callbacks import Callback
from .checkpoint import load_model, save_model
from .data import Arrays
from .fit import PassMetric
from .history import History
from .step import Ensemble, Part, TrainState, Whole, per_example
from .strategies import (
    FSDP,
    Bitwise,
    DataParallel,
    LocalSGD,
    Members,
    Pipeline,
    Pmap,
    Sharded,
    SingleDevice,
    TensorParallel,
    ZeRO,
)
from .strategies.stack import Stack
from .trainer import Trainer

if TYPE_CHECKING:
    from . import finders, testing
    from .extras.fuse_attention import fuse_attention
    from .extras.load_weights import load_weights
    from .extras.lora import lora, merge_lora
    from .extras.muon import muon
    from .extras.save_weights import save_weights
    from .extras.sequence_parallel import SequenceParallel
    from .plan.plan import Plan

__version__ = "0.3.0.dev0"

__all__ = [
    "FSDP",
    "Arrays",
    "Bitwise",
    "Callback",
    "DataParallel",
    "Ensemble",
    "History",
    "LocalSGD",
    "Members",
    "Part",
    "PassMetric",
    "Pipeline",
    "Plan",
    "Pmap",
    "SequenceParallel",
    "Sharded",
    "SingleDevice",
    "Stack",
    "TensorParallel",
    "TrainState",
    "Trainer",
    "Whole",
    "ZeRO",
    "callbacks",
    "distributed",
    "finders",
    "fuse_attention",
    "load_model",
    "load_weights",
    "lora",
    "losses",
    "merge_lora",
    "muon",
    "per_example",
    "save_model",
    "save_weights",
    "strategies",
    "testing",
]

_LATER = {
    "Plan": "plan",
    "SequenceParallel": "extras.sequence_parallel",
    "finders": "finders",
    "fuse_attention": "extras.fuse_attention",
    "load_weights": "extras.load_weights",
    "lora": "extras.lora",
    "merge_lora": "extras.lora",
    "muon": "extras.muon",
    "save_weights": "extras.save_weights",
    "testing": "testing",
}
"""Modules, and what is in modules, that most scripts do without."""


def __getattr__(name: str) -> Any:
    """Imports these when they are first asked for."""
    if name in _LATER:
        module = importlib.import_module(f".{_LATER[name]}", __name__)
        return getattr(module, name, module)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
