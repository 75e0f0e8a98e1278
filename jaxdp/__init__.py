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
from .step import Ensemble, Part, TrainState, Whole
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
    "save_model",
    "save_weights",
    "strategies",
    "testing",
]

_EXTRAS = {
    "SequenceParallel": "sequence_parallel",
    "fuse_attention": "fuse_attention",
    "load_weights": "load_weights",
    "lora": "lora",
    "merge_lora": "lora",
    "muon": "muon",
    "save_weights": "save_weights",
}
"""Functions and classes by the files that they are in."""


def __getattr__(name: str) -> Any:
    """Imports what most scripts do without when it is first asked for."""
    if name in ("finders", "testing"):
        return importlib.import_module(f".{name}", __name__)
    if name in _EXTRAS:
        module = importlib.import_module(f".extras.{_EXTRAS[name]}", __name__)
        return getattr(module, name)
    if name == "Plan":
        return importlib.import_module(".plan", __name__).Plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
