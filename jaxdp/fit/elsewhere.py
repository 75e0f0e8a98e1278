"""Arguments that belong elsewhere, or are called otherwise: what to write instead."""

import inspect
from collections.abc import Container, Iterable
from typing import Final

_BATCHES: Final = "the loader makes batches, as jaxdp.Arrays(x, y, batch_size=32) does"
_DEVICES: Final = "strategy=Sharded(2) takes two devices, SingleDevice() one"
_WEIGHTS: Final = "batches may be (x, y, weight), with a weight for each row"
_NOT_NEEDED: Final = "leave it out"

OTHERS: Final = {
    "__init__": {
        # Lightning's.
        "accelerator": "JAX takes what it finds; JAX_PLATFORMS=cpu hides the others",
        "devices": _DEVICES,
        "gpus": _DEVICES,
        "num_nodes": "a launcher starts processes, distributed.initialize() joins them",
        "logger": "loggers are callbacks: callbacks=[CSVLogger('runs/first')]",
        "enable_checkpointing": "callbacks=[ModelCheckpoint('runs/first')] saves",
        "enable_model_summary": "print(trainer.summary()) shows the layers",
        "num_sanity_val_steps": "fit(..., fast_dev_run=True) tries a batch of each",
        "limit_test_batches": "test(loader, limit_batches=...) has it",
        "limit_predict_batches": "predict(loader, limit_batches=...) has it",
        "deterministic": "see `reproducible`",
        "benchmark": _NOT_NEEDED,
        "inference_mode": f"{_NOT_NEEDED}: passes without training always use it",
        "use_distributed_sampler": "data='global' shares rows out, data='local' not",
        "profiler": "callbacks=[Profiler()] profiles",
        "detect_anomaly": "callbacks=[NanGuard()] looks for NaN",
        "sync_batchnorm": f"{_NOT_NEEDED}: BatchNorm sees the whole batch",
        "plugins": "see `strategy` and `precision`",
        "gradient_clip_algorithm": "optax.chain(optax.clip(1.0), ...) clips by value",
        "reload_dataloaders_every_n_epochs": "a loader is iterated anew in every epoch",
        "resume_from_checkpoint": "fit(..., ckpt_path='last') resumes",
        "auto_lr_find": "jaxdp.finders.lr_find(trainer, loader) does it",
    },
    "fit": {
        # Lightning's.
        "train_dataloaders": "it is called `train_loader`",
        "val_dataloaders": "it is called `val_loader`",
        "datamodule": "pass its loaders as `train_loader` and `val_loader`",
        # Keras's.
        "x": _BATCHES,
        "y": _BATCHES,
        "batch_size": _BATCHES,
        "shuffle": _BATCHES,
        "epochs": "it is called `max_epochs`, and includes those of earlier fits",
        "initial_epoch": "`ckpt_path` resumes where a run had stopped",
        "validation_data": "it is called `val_loader`",
        "validation_split": "split the rows before, and pass the rest as `val_loader`",
        "validation_freq": "it is called `check_val_every_n_epoch`",
        "steps_per_epoch": "it is called `limit_train_batches`",
        "validation_steps": "it is called `limit_val_batches`",
        "validation_batch_size": _BATCHES,
        "class_weight": _WEIGHTS,
        "sample_weight": _WEIGHTS,
        "verbose": "Trainer(enable_progress_bar=False) shows no bar",
    },
}
"""What to write instead of arguments of Lightning's and Keras's, by method."""

_LIVE: Final = "callbacks", "log_every_n_steps", "default_root_dir"
"""Arguments of a trainer that are looked at anew by every fit."""


def refuse(cls: type, method: str, given: Iterable[str]) -> None:
    """Raises for arguments that `__init__` or `fit` of `cls` does not have, saying
    where those belong that the other of the two has, or that `OTHERS` knows."""
    here, there, other = "Trainer", "fit", "fit"
    if method == "fit":
        here, there, other = "fit", "Trainer", "__init__"
    for name in given:
        if name in inspect.signature(getattr(cls, other)).parameters:
            where = f"it belongs to `{there}`: {there}(..., {name}=...)"
        elif name in OTHERS[method]:
            where = OTHERS[method][name]
        elif name in OTHERS[other]:  # Trainer(epochs=3)
            where = f"nor of `{there}`; {OTHERS[other][name]}"
        else:  # as Python says it
            called = f"{cls.__name__}.{method}()"
            raise TypeError(f"{called} got an unexpected keyword argument {name!r}")
        raise TypeError(f"`{name}` is no argument of `{here}`: {where}.")


def check_may_be_set(arguments: Container[str], name: str) -> None:
    """Raises for an argument of the trainer that nothing would look at again."""
    if name in arguments and name not in _LIVE:
        raise AttributeError(
            f"`trainer.{name}` can't be set: it is an argument of `Trainer`, and"
            " steps are made of it. For another value make another Trainer, which"
            " may `load` what this one saves."
        )
