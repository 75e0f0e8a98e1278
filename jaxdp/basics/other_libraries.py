"""What users of Lightning and Keras type, and what to write instead."""

import difflib
from collections.abc import Iterable
from typing import Final

_BATCHES: Final = "the loader makes batches, as jaxdp.Arrays(x, y, batch_size=32) does"
_DEVICES: Final = "strategy=Sharded(2) takes two devices, SingleDevice() one"
_WEIGHTS: Final = "batches may be (x, y, weight), with a weight for each row"
_NOT_NEEDED: Final = "leave it out"

INSTEAD: Final[dict[str, dict[str, str]]] = {
    "Trainer": {
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
    # Words for `strategy`: Lightning's, Keras's, DeepSpeed's.
    "strategy": {
        "auto": "leave it out: Sharded() over all devices",
        "ddp": "Sharded()",
        "ddp_spawn": "Sharded()",
        "ddp_notebook": "Sharded()",
        "mirrored": "Sharded()",
        "dp": "Pmap()",
        "pmap": "Pmap()",
        "single_device": "SingleDevice()",
        "zero": "ZeRO()",
        "deepspeed": "ZeRO() or FSDP()",
        "deepspeed_stage_1": "ZeRO()",
        "deepspeed_stage_2": "ZeRO()",
        "deepspeed_stage_3": "FSDP()",
        "fsdp": "FSDP()",
        "fsdp2": "FSDP()",
        "hsdp": "FSDP(groups=...)",
        "tp": "TensorParallel(mesh_shape, rules)",
        "pp": "Pipeline(stages, microbatches)",
        "diloco": "LocalSGD(every=...)",
    },
    # Attributes and methods of a trainer.
    "trainer": {
        # Lightning's.
        "lightning_module": "trainer.model",
        "optimizers": "trainer.state.opt_state",
        "logged_metrics": "trainer.callback_metrics",
        "save_checkpoint": "trainer.save(path)",
        "world_size": "jax.device_count()",
        "num_devices": "jax.device_count()",
        "estimated_stepping_batches": "trainer.num_training_batches",
        # Keras's, Hugging Face's.
        "stop_training": "trainer.should_stop",
        "evaluate": "trainer.validate(loader), or trainer.test(loader)",
        "train": "trainer.fit(loader)",
        "train_on_batch": "trainer.steps(loader), which yields each step's metrics",
        "save_model": "jaxdp.save_model(path, trainer.model), or trainer.save(path)",
        "load_weights": "jaxdp.load_weights(path, like, names), or trainer.load(path)",
    },
    # Hooks, by those that do their work here.
    "Callback": {
        "on_train_start": "on_fit_start",
        "on_sanity_check_start": "on_fit_start",
        "on_sanity_check_end": "on_fit_start",
        "on_train_begin": "on_fit_start",
        "on_train_end": "on_fit_end",
        "on_validation_epoch_start": "on_validation_start",
        "on_validation_batch_start": "on_validation_start",
        "on_test_begin": "on_validation_start",
        "on_test_batch_begin": "on_validation_start",
        "on_validation_epoch_end": "on_validation_end",
        "on_test_epoch_start": "on_test_start",
        "on_test_batch_start": "on_test_start",
        "on_test_epoch_end": "on_test_end",
        "on_test_batch_end": "on_test_end",
        "on_predict_epoch_start": "on_predict_start",
        "on_predict_batch_start": "on_predict_start",
        "on_predict_begin": "on_predict_start",
        "on_predict_batch_begin": "on_predict_start",
        "on_predict_epoch_end": "on_predict_end",
        "on_predict_batch_end": "on_predict_end",
        "on_load_checkpoint": "load_state_dict",
        "on_before_backward": "inside_step",
        "on_after_backward": "inside_step",
        "on_before_optimizer_step": "inside_step",
        "on_before_zero_grad": "inside_step",
        "on_epoch_start": "on_train_epoch_start",
        "on_epoch_begin": "on_train_epoch_start",
        "on_batch_start": "on_train_batch_start",
        "on_batch_begin": "on_train_batch_start",
        "on_train_batch_begin": "on_train_batch_start",
        "on_init_start": "setup",
        "on_init_end": "setup",
        "on_keyboard_interrupt": "on_exception",
        "on_epoch_end": "on_train_epoch_end",
        "on_batch_end": "on_train_batch_end",
    },
    # Arguments of hooks, by what has their values here.
    "hook": {
        "pl_module": "trainer.model",
        "logs": "metrics",
        "outputs": "metrics",
        "batch": "batch_idx",
        "step": "batch_idx",
        "epoch": "trainer.current_epoch",
        "stage": "trainer.run.doing",
    },
}
"""What to write instead of names of Lightning's and Keras's, by what they are given to.
"""


def find_near(name: str, names: Iterable[str], cutoff: float = 0.8) -> str | None:
    """The one of `names` that a misspelt name may be meant for."""
    squeezed = {known.replace("_", "").lower(): known for known in names}
    name = name.replace("_", "").lower()
    close = difflib.get_close_matches(name, squeezed, n=1, cutoff=cutoff)
    return squeezed[close[0]] if close else None
