"""jaxdp: a PyTorch-style trainer for JAX.

from jaxdp import Trainer, Sharded

trainer = Trainer(model, optax.adam(1e-3), strategy=Sharded())
trainer.fit(train_loader, val_loader, max_epochs=10)
"""

import pkgutil
import sys
from typing import TYPE_CHECKING, Any

from . import callbacks, distributed, losses, strategies
from .basics.environment import warn_of_other_jaxdp
from .basics.other_libraries import INSTEAD, find_near
from .callbacks import Callback
from .data import Arrays
from .fit import PassMetric
from .history import History
from .step import Part, TrainState, Whole, per_example
from .strategies import (
    FSDP,
    DataParallel,
    Pmap,
    Sharded,
    SingleDevice,
    TensorParallel,
    ZeRO,
)
from .strategies.stack import Stack
from .trainer import Trainer

if TYPE_CHECKING:
    from . import testing
    from .extras import comparison as comparison
    from .extras import ensembles as ensembles
    from .extras import figures as figures
    from .extras import finders
    from .extras import plan as plan
    from .extras import reports as reports
    from .extras.bitwise import Bitwise
    from .extras.decay_mask import decay_mask
    from .extras.ensembles import Ensemble, Members
    from .extras.fuse_attention import fuse_attention
    from .extras.load_weights import load_weights
    from .extras.local_sgd import LocalSGD
    from .extras.lora import lora, merge_lora
    from .extras.model_files import load_model, save_model
    from .extras.muon import muon
    from .extras.pipeline import Pipeline
    from .extras.plan import Plan
    from .extras.save_weights import save_weights
    from .extras.sequence_parallel import SequenceParallel
    from .extras.steps_of import steps_of

__version__ = "0.3.0.dev0"

warn_of_other_jaxdp()

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
    "decay_mask",
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
    "steps_of",
    "strategies",
    "testing",
]

_EXTRAS = {
    "jaxdp.Bitwise": "extras.bitwise:Bitwise",
    "jaxdp.Ensemble": "extras.ensembles:Ensemble",
    "jaxdp.LocalSGD": "extras.local_sgd:LocalSGD",
    "jaxdp.Members": "extras.ensembles:Members",
    "jaxdp.Pipeline": "extras.pipeline:Pipeline",
    "jaxdp.Plan": "extras.plan:Plan",
    "jaxdp.SequenceParallel": "extras.sequence_parallel:SequenceParallel",
    "jaxdp.comparison": "extras.comparison",
    "jaxdp.decay_mask": "extras.decay_mask:decay_mask",
    "jaxdp.ensembles": "extras.ensembles",
    "jaxdp.figures": "extras.figures",
    "jaxdp.finders": "extras.finders",
    "jaxdp.fuse_attention": "extras.fuse_attention:fuse_attention",
    "jaxdp.load_model": "extras.model_files:load_model",
    "jaxdp.load_weights": "extras.load_weights:load_weights",
    "jaxdp.lora": "extras.lora:lora",
    "jaxdp.merge_lora": "extras.lora:merge_lora",
    "jaxdp.muon": "extras.muon:muon",
    "jaxdp.plan": "extras.plan",
    "jaxdp.reports": "extras.reports",
    "jaxdp.save_model": "extras.model_files:save_model",
    "jaxdp.save_weights": "extras.save_weights:save_weights",
    "jaxdp.steps_of": "extras.steps_of:steps_of",
    "jaxdp.testing": "testing",
    "jaxdp.callbacks.LivePlot": "extras.live_plot:LivePlot",
    "jaxdp.callbacks.MLFlowLogger": "extras.mlflow_logger:MLFlowLogger",
    "jaxdp.callbacks.TensorBoardLogger": "extras.tensorboard_logger:TensorBoardLogger",
    "jaxdp.callbacks.WandbLogger": "extras.wandb_logger:WandbLogger",
    "jaxdp.callbacks.OptunaPruning": "extras.optuna_pruning:OptunaPruning",
    "jaxdp.strategies.Bitwise": "extras.bitwise:Bitwise",
    "jaxdp.strategies.LocalSGD": "extras.local_sgd:LocalSGD",
    "jaxdp.strategies.Members": "extras.ensembles:Members",
    "jaxdp.strategies.Pipeline": "extras.pipeline:Pipeline",
    "jaxdp.strategies.SequenceParallel": "extras.sequence_parallel:SequenceParallel",
    "jaxdp.losses.token_cross_entropy": (
        "extras.token_cross_entropy:token_cross_entropy"
    ),
}
"""The modules of extras, by public name; nothing else in the core names an extra."""


def open_extra(module: str, name: str) -> Any:
    """Imports `module.name` of the table when it is first asked for.

    Raises:
        AttributeError: for a name that means nothing.
        ImportError: for one that is elsewhere, or another library's. An AttributeError
            would be lost in `from jaxdp import EarlyStopping`.
    """
    path = _EXTRAS.get(f"{module}.{name}")
    if path is not None:
        return pkgutil.resolve_name(f"jaxdp.{path}")
    text = f"module {module!r} has no attribute {name!r}"
    homes = (distributed, losses, strategies, callbacks) if module == __name__ else ()
    lazy = (path.rpartition(".") for path in _EXTRAS if homes)
    names = {public: home for home, _, public in lazy}
    for home in (*homes, sys.modules[module]):
        public = losses.METRICS if home is losses else home.__all__
        names |= dict.fromkeys(public, home.__name__)
    if where := names.get(name):
        raise ImportError(f"{text}; it is in {where}: from {where} import {name}")
    if instead := INSTEAD.get(module, {}).get(name):
        raise ImportError(f"{text}; instead of it: {instead}.")
    if not name.startswith("_") and (near := find_near(name, names)):
        raise ImportError(f"{text}; {names[near]}.{near} may be meant.")
    raise AttributeError(text)


def __getattr__(name: str) -> Any:
    return open_extra(__name__, name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
