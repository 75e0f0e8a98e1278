"""Words of Lightning, Keras, Hugging Face, Composer, torchtnt and fastai, and what to
write instead."""

import difflib
import re
from collections.abc import Iterable
from typing import Final


def _read_table(text: str) -> dict[str, str]:
    """Reads lines `answer <- words`, which continue on lines that are indented more;
    returns the answer for each word."""
    lines = re.sub(r"\n            +", " ", text).split("\n")
    pairs = [line.strip().split(" <- ") for line in lines if " <- " in line]
    return {word: answer for answer, words in pairs for word in words.split()}


INSTEAD: Final[dict[str, dict[str, str]]] = {
    # Arguments of trainers, fits and their configurations.
    "argument": _read_table("""
        # Devices and processes.
        JAX takes what it finds; JAX_PLATFORMS=cpu hides the others <- accelerator
            no_cuda use_cpu tpu_cores ipus
        strategy=Sharded(2) takes two devices, SingleDevice() one <- devices gpus device
            auto_select_gpus num_gpus local_world_size
        a launcher starts processes, distributed.initialize() joins them <- num_nodes
            num_processes local_rank dist_timeout ddp_backend ddp_timeout
            distributed_backend use_distributed tpu_num_cores
        see `strategy`: Sharded(), FSDP(), ZeRO(), TensorParallel(...) <- fsdp
            fsdp_config deepspeed deepspeed_config parallelism_config parallelism
            distribute_strategy ddp_find_unused_parameters module_wrapper
        see `strategy` and `precision` <- plugins accelerator_config
        data='global' shares rows out, data='local' not <- use_distributed_sampler
            replace_sampler_ddp
        # Steps.
        optimizer=optax.adamw(1e-3) <- optimizers opt_func optim optimizer_cls
            optim_args opt
        it is the optimizer's: optax.adamw(learning_rate, weight_decay=...) <- lr
            learning_rate weight_decay wd wd_bn_bias adam_beta1 adam_beta2 moms
            adam_epsilon optimizer_kwargs
        pass a schedule as the optimizer's rate:
            optax.adam(optax.cosine_decay_schedule(1e-3, steps)) <- lr_scheduler
            lr_schedulers scheduler schedulers lr_scheduler_type lr_scheduler_kwargs
            lr_scheduler_config step_lr_interval warmup_steps warmup_ratio pct_start
            lr_max div div_final step_schedulers_every_batch
        `gradient_clip_val` is the largest global norm <- max_grad_norm clip_grad_norm
            gradient_clipping clipnorm global_clipnorm
        optax.chain(optax.clip(1.0), ...) clips by value <- gradient_clip_algorithm
            clip_grad_value clipvalue
        it is called `accumulate_grad_batches` <- gradient_accumulation_steps grad_accum
        `accumulate_grad_batches` micro-batches make one step <-
            device_train_microbatch_size microbatch_size
        it is called `loss_fn`, or `loss` for a criterion <- loss_func criterion
            compute_loss compute_loss_func loss_function
        `loss_fn` may return a weighted sum; or pass a list of jaxdp.Part <-
            loss_weights
        jaxdp.losses has it: loss=lambda p, y: optax.softmax_cross_entropy(p,
            optax.smooth_labels(y, 0.1)) <- label_smoothing label_smoothing_factor
        it is called `metrics` <- compute_metrics weighted_metrics eval_metrics metric
            train_metrics
        `precision` is one of '32-true', 'bf16-mixed', '16-mixed', ... <- fp16 bf16 tf32
            mixed_precision amp_backend amp_level precision_config half_precision
            fp16_opt_level bf16_full_eval fp16_full_eval autocast
        it is called `remat` <- gradient_checkpointing activation_checkpointing
            activation_checkpoint_params gradient_checkpointing_kwargs checkpointing
        leave it out: every step is compiled <- compile jit_compile torch_compile
            torch_compile_params compile_config torch_compile_backend torch_compile_mode
            jit run_eagerly enable_autolog_hparams
        leave it out <- benchmark barebones auto_scale_loss remove_unused_columns
            push_to_hub hub_model_id flush_logs move_metrics_to_cpu do_train do_eval
            do_predict spin_dataloaders log_gpu_memory python_log_level past_index
        leave it out: passes without training always use inference mode <-
            inference_mode train_bn
        leave it out: BatchNorm sees the whole batch <- sync_batchnorm
        see `reproducible` <- deterministic deterministic_mode full_determinism
            cudnn_deterministic
        it is called `seed` <- data_seed random_state random_seed rng_seed
        filter_spec=['head.*'] trains a part of the model <- splitter trainable
        pass the model, or one of shapes (eqx.filter_eval_shape) <- model_init module
            train_unit unit lightning_module
        # What callbacks do.
        it is called `callbacks` <- cbs callback default_cbs algorithms
        loggers are callbacks: callbacks=[CSVLogger('runs/first')] <- logger loggers
            report_to logging_dir log_to_console logging_strategy
        it is called `log_every_n_steps` <- logging_steps console_log_interval
            row_log_interval log_interval
        it is called `default_root_dir` <- output_dir run_name save_folder model_dir
            weights_save_path log_dir
        callbacks=[ModelCheckpoint('runs/first', monitor='val_loss')] saves <-
            enable_checkpointing checkpoint_callback save_strategy save_steps
            save_interval save_total_limit save_num_checkpoints_to_keep
            load_best_model_at_end metric_for_best_model greater_is_better save_best
            save_overwrite save_filename save_on_each_node
        callbacks=[EarlyStopping('val_loss')] stops <- early_stopping
            early_stopping_patience early_stop_callback patience
        print(trainer.summary()) shows the layers <- enable_model_summary
            weights_summary
        it is called `enable_progress_bar` <- verbose disable_tqdm progress_bar
            progress_bar_refresh_rate show_progress
        callbacks=[Profiler()] profiles <- profiler
        callbacks=[NanGuard()] looks for NaN <- detect_anomaly terminate_on_nan
            logging_nan_inf_filter
        callbacks=[GradientMonitor()] logs norms <- track_grad_norm
        callbacks=[WeightAveraging()] averages <- swa_params stochastic_weight_avg ema
            ema_decay use_ema
        jaxdp.finders.lr_find(trainer, loader) does it <- auto_lr_find
        trainer.plan(loader).largest_batch() finds it <- auto_scale_batch_size
            auto_find_batch_size
        # What loaders do.
        the loader makes batches, as jaxdp.Arrays(x, y, batch_size=32) does <- x y
            batch_size shuffle train_data train_dataset dataset data_collator collate_fn
            per_device_train_batch_size train_batch_size num_workers
            dataloader_num_workers dataloader_drop_last drop_last group_by_length
            sampler workers use_multiprocessing max_queue_size tokenizer
            processing_class validation_batch_size per_device_eval_batch_size
            eval_batch_size pin_memory dataloader_pin_memory
        it is called `train_loader` <- train_dataloaders train_dataloader dataloader
            dataloaders train_dl training_data
        it is called `val_loader` <- val_dataloaders val_dataloader eval_dataloader
            eval_dataset eval_data validation_data valid_dl val_data eval_loader
            test_loader
        pass its loaders as `train_loader` and `val_loader` <- datamodule dls
        split the rows before, and pass the rest as `val_loader` <- validation_split
        a loader is iterated anew in every epoch <- reload_dataloaders_every_n_epochs
            reload_dataloaders_every_epoch
        batches may be (x, y, weight), with a weight for each row <- class_weight
            sample_weight class_weights
        # How far a fit goes.
        it is called `max_epochs`, and includes those of earlier fits <- epochs
            num_train_epochs n_epoch num_epochs n_epochs nb_epoch
        `max_epochs`, `max_steps` and `max_time` say how long <- max_duration
        it is called `max_steps` <- num_steps total_steps train_steps
        it is called `limit_train_batches` <- steps_per_epoch max_train_steps_per_epoch
            train_subset_num_batches train_percent_check
        it is called `limit_val_batches` <- validation_steps max_eval_steps_per_epoch
            eval_subset_num_batches val_percent_check
        it is called `check_val_every_n_epoch` <- validation_freq
            evaluate_every_n_epochs eval_strategy eval_delay evaluation_strategy
        it is called `val_check_interval` <- eval_steps eval_interval
            evaluate_every_n_steps val_every_n_steps
        fit(..., fast_dev_run=True) tries a batch of each <- num_sanity_val_steps
            eval_on_start
        it is called `limit_batches`, of validate, test and predict <-
            limit_test_batches limit_predict_batches steps
        fit(..., ckpt_path='last') resumes <- resume_from_checkpoint load_path
            autoresume initial_epoch start_epoch resume checkpoint_path ckpt reset_opt
            load_weights_only load_strict_model_weights
    """),
    # Arguments of single classes and functions.
    "EarlyStopping": _read_table("""
        it is called `restore_best` <- restore_best_weights
        it is called `monitor` <- metric
        fit(..., min_epochs=...) waits as long <- start_from_epoch
        see `stopping_threshold` and `divergence_threshold` <- baseline
        it is called `patience` <- early_stopping_patience
        it is called `min_delta` <- early_stopping_threshold
        leave it out: a monitor without values is an error <- strict
        leave it out: the monitor's name says when <- check_on_train_epoch_end
        it is called `mode`, 'min' or 'max' <- comp
        leave it out <- reset_on_fit
    """),
    "ModelCheckpoint": _read_table("""
        a checkpoint's folder is named by its step, and the best and the last one have
            links beside it, `best` and `last` (`save_last=True`) <- filename
        it is `dirpath`, a folder <- filepath
        leave it out <- verbose
        it is called `monitor` <- metric
        `save_last=False` with a `monitor` is that <- save_best_only
        `jaxdp.load_model` reads the weights alone out of a checkpoint, and
            `jaxdp.save_model` writes them alone <- save_weights_only
        use `every_n_train_steps` or `every_n_epochs` <- save_freq
        with the `monitor` of a validation it saves after each validation, and else at
            the end of an epoch <- save_on_train_epoch_end
    """),
    **dict.fromkeys(
        ("validate", "test", "predict"),
        _read_table("""
        it is called `loader` <- dataloaders val_dataloaders test_dataloaders dataloader
        batches come from the loader: Arrays(x, y, batch_size=...) <- batch_size
        it is called `limit_batches` <- steps
        leave it out; what is measured is returned <- verbose
        pass a loader: Arrays(x, y, batch_size=...) <- x
        """),
    ),
    "LearningRateMonitor": _read_table("""
        leave it out: it logs as loggers do, and with each epoch <- logging_interval
        leave it out <- log_momentum log_weight_decay
    """),
    "ReduceLROnPlateau": _read_table("""
        it is called `min_delta` <- threshold
    """),
    "ProgressBar": _read_table("""
        `refresh_per_second` and `every_n_seconds` are times <- refresh_rate
    """),
    "WeightAveraging": _read_table("""
        it is called `decay` <- decay_rate
    """),
    "lora": _read_table("""
        it is called `rank` <- r
        it is called `alpha` <- lora_alpha
        it is called `patterns` <- target_modules
        leave it out: dropout is the model's <- lora_dropout
    """),
    "Arrays": _read_table("""
        leave it out: the arrays are in memory <- num_workers
        put the arrays there: Arrays(jax.device_put(x), ...) <- on_device
    """),
    # Names of losses and metrics.
    "loss": _read_table("""
        'cross_entropy', which takes logits, <- sparse_categorical_crossentropy
            categorical_crossentropy crossentropy ce nll nll_loss softmax_cross_entropy
            sparse_cross_entropy
        'binary_cross_entropy', which takes logits, <- binary_crossentropy bce bce_loss
            bce_with_logits sigmoid_cross_entropy
        'mse' <- l2 l2_loss squared_error MSE
        'mae' <- l1 l1_loss absolute_error MAE
        'huber' <- smooth_l1 smooth_l1_loss
        'accuracy' <- acc sparse_categorical_accuracy categorical_accuracy top1 Accuracy
        jaxdp.PassMetric(fn) <- auc auroc f1 precision recall r2 r2_score
    """),
    # Words for `strategy`: Lightning's, Keras's, DeepSpeed's.
    "strategy": _read_table("""
        leave it out: Sharded() over all devices <- auto
        Sharded() <- ddp ddp_spawn ddp_notebook mirrored
        Pmap() <- dp pmap
        SingleDevice() <- single_device
        ZeRO() <- zero deepspeed_stage_1 deepspeed_stage_2
        ZeRO() or FSDP() <- deepspeed
        FSDP() <- deepspeed_stage_3 fsdp fsdp2
        FSDP(groups=...) <- hsdp
        TensorParallel(mesh_shape, rules) <- tp
        Pipeline(stages, microbatches) <- pp
        LocalSGD(every=...) <- diloco
    """),
    # Attributes and methods of a trainer.
    "trainer": _read_table("""
        trainer.model <- lightning_module network net learn
        trainer.state.opt_state <- optimizers optimizer opt
        trainer.callback_metrics <- logged_metrics progress_bar_metrics
        trainer.save(path) <- save_checkpoint save_state
        trainer.load(path) <- load_checkpoint restore
        jax.device_count() <- world_size num_devices
        trainer.num_training_batches <- estimated_stepping_batches
        trainer.should_stop <- stop_training
        trainer.validate(loader), or trainer.test(loader) <- evaluate eval
        trainer.fit(loader) <- train fit_one_cycle fine_tune
        trainer.steps(loader), which yields each step's metrics <- train_on_batch
            training_step
        trainer.predict(loader) <- get_preds predict_on_batch
        trainer.inference_model(), to call on one example <- predict_step
        jaxdp.save_model(path, trainer.model), or trainer.save(path) <- save_model
        jaxdp.load_weights(path, like, names), or trainer.load(path) <- load_weights
        jaxdp.save_weights(trainer.model, path, names), or trainer.save(path) <-
            save_weights
        jaxdp.finders.lr_find(trainer, loader) <- lr_find tuner
        Trainer(model, optimizer, loss=...), which needs no such call <- compile
        trainer.history.plot() <- recorder
        trainer.set_hyperparams(learning_rate=...) <- set_lr
    """),
    # Names of the package.
    "jaxdp": _read_table("""
        jaxdp.Trainer(model, optimizer, loss=...).fit(loader) <- LightningModule Model
            Learner TrainingArguments train Sequential
        a loader, such as jaxdp.Arrays(x, y, batch_size=32) <- DataLoader DataModule
            LightningDataModule Dataset
        Trainer(model, seed=...) <- seed_everything set_seed set_random_seed
        jaxdp.Sharded <- DDP DDPStrategy MirroredStrategy DistributedDataParallel
        jaxdp.FSDP <- FSDPStrategy FullyShardedDataParallel
        jaxdp.load_model(path, like) <- load load_checkpoint load_from_checkpoint
        jaxdp.save_model(path, model) <- save save_checkpoint
    """),
    "jaxdp.callbacks": _read_table("""
        NanGuard <- TerminateOnNaN
        WeightAveraging <- StochasticWeightAveraging EMA SWA EMACallback
        ProgressBar <- TQDMProgressBar RichProgressBar ProgbarLogger
        LearningRateMonitor <- LRMonitor
        ThroughputMonitor <- SpeedMonitor DeviceStatsMonitor
        TensorBoardLogger <- TensorBoard
        WandbLogger <- WandbCallback
        MLFlowLogger <- MLflowCallback
        StallWatch <- Watchdog
        ModelCheckpoint <- CheckpointSaver SaveModelCallback Checkpoint
        ModelCheckpoint, with fit(..., ckpt_path='auto') <- BackupAndRestore
        EarlyStopping <- EarlyStopper EarlyStoppingCallback
        Callback, with hooks of your own <- LambdaCallback TrainerCallback
        a schedule as the optimizer's rate, of optax <- LearningRateScheduler
            LRScheduler
        fit(..., max_time=...) <- Timer
        trainer.summary() <- ModelSummary RichModelSummary
        trainer.history <- History
    """),
    # Hooks, by those that do their work here.
    "Callback": _read_table("""
        setup <- on_init_start on_init_end after_create
        on_fit_start <- on_train_start on_sanity_check_start on_sanity_check_end
            on_train_begin before_fit fit_start
        on_fit_end <- on_train_end after_fit fit_end after_cancel_fit
        on_train_epoch_start <- on_epoch_start on_epoch_begin before_epoch before_train
            epoch_start iteration_start
        on_train_epoch_end <- on_epoch_end after_epoch after_train epoch_end
            iteration_end after_cancel_epoch after_cancel_train epoch_checkpoint
            iteration_checkpoint
        on_train_batch_start <- on_batch_start on_batch_begin on_train_batch_begin
            on_step_begin on_train_step_start on_train_get_next_batch_end before_batch
            batch_start before_train_batch before_dataloader after_dataloader
            before_forward
        on_train_batch_end <- on_batch_end on_step_end on_substep_end on_log
            on_train_step_end after_batch batch_end after_train_batch after_pred
            after_loss after_forward before_loss after_cancel_batch batch_checkpoint
        inside_step <- on_before_backward on_after_backward on_before_optimizer_step
            on_before_zero_grad on_pre_optimizer_step on_optimizer_step before_backward
            after_backward before_step after_cancel_step after_cancel_backward
        on_validation_start <- on_validation_epoch_start on_validation_batch_start
            on_test_begin on_test_batch_begin on_eval_start on_eval_epoch_start
            on_eval_step_start before_validate eval_start eval_before_all
            eval_batch_start eval_before_forward eval_standalone_start
        on_validation_end <- on_validation_epoch_end on_evaluate on_prediction_step
            on_eval_end on_eval_epoch_end on_eval_step_end on_eval_get_next_batch_end
            after_validate after_cancel_validate eval_end eval_after_all eval_batch_end
            eval_after_forward eval_standalone_end
        on_test_start <- on_test_epoch_start on_test_batch_start
        on_test_end <- on_test_epoch_end on_test_batch_end
        on_predict_start <- on_predict_epoch_start on_predict_batch_start
            on_predict_begin on_predict_batch_begin on_predict_step_start predict_start
            predict_batch_start predict_before_forward
        on_predict_end <- on_predict_epoch_end on_predict on_predict_get_next_batch_end
            predict_end
        on_predict_batch_end <- on_predict_step_end predict_batch_end
            predict_after_forward
        on_save_checkpoint <- on_save on_push_begin
        load_state_dict <- on_load_checkpoint after_load before_load
        on_exception <- on_keyboard_interrupt
        teardown <- post_close
    """),
    # Arguments of hooks, by what has their values here.
    "hook": _read_table("""
        trainer.model <- pl_module
        metrics <- logs outputs
        batch_idx <- batch step
        trainer.current_epoch <- epoch
        trainer.run.doing <- stage
    """),
}
"""The line to write instead of a name of other libraries, by its kind and the name."""


def find_near(name: str, names: Iterable[str], cutoff: float = 0.8) -> str | None:
    """The one of `names` that a misspelt name may be meant for."""
    squeezed = {known.replace("_", "").lower(): known for known in names}
    name = name.replace("_", "").lower()
    close = difflib.get_close_matches(name, squeezed, n=1, cutoff=cutoff)
    return squeezed[close[0]] if close else None
