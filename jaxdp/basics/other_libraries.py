"""Words of Lightning, Keras, Hugging Face, Composer, torchtnt and fastai, and what to
write instead."""

import difflib
import re
from collections.abc import Iterable
from typing import Final

_TABLE: Final = """
# Arguments of trainers, fits and their configurations.
[argument]
# Devices and processes.
JAX takes what it finds; JAX_PLATFORMS=cpu hides the others <- accelerator no_cuda
    use_cpu tpu_cores ipus
strategy=Sharded(2) takes two devices, SingleDevice() one <- devices gpus device
    auto_select_gpus num_gpus local_world_size
a launcher starts processes, distributed.initialize() joins them <- num_nodes
    num_processes local_rank dist_timeout ddp_backend ddp_timeout distributed_backend
    use_distributed tpu_num_cores
see `strategy`: Sharded(), FSDP(), ZeRO(), TensorParallel(...) <- fsdp fsdp_config
    deepspeed deepspeed_config parallelism_config parallelism distribute_strategy
    ddp_find_unused_parameters module_wrapper mesh sharding global_mesh
    enable_loss_parallel pmap data_parallel
see `strategy` and `precision` <- plugins accelerator_config
callbacks=[DonateBuffers(...)] says what a step may overwrite <- donate donate_argnums
data='global' shares rows out, data='local' not <- use_distributed_sampler
    replace_sampler_ddp
# Steps.
optimizer=optax.adamw(1e-3) <- optimizers opt_func optim optimizer_cls optim_args opt
it is the optimizer's: optax.adamw(learning_rate, weight_decay=...) <- lr learning_rate
    weight_decay wd wd_bn_bias adam_beta1 adam_beta2 moms betas momentum base_lr lr_mult
    optim_target_modules adam_epsilon optimizer_kwargs
pass a schedule as the optimizer's rate: optax.adam(optax.cosine_decay_schedule(1e-3,
    steps)) <- lr_scheduler lr_schedulers scheduler schedulers lr_scheduler_type
    lr_scheduler_kwargs lr_scheduler_config step_lr_interval warmup_steps warmup_ratio
    pct_start lr_max div div_final step_schedulers_every_batch scale_schedule_ratio
    n_cycles cycle_len cycle_mult warmup_epochs lr_decay
`gradient_clip_val` is the largest global norm <- max_grad_norm clip_grad_norm
    gradient_clipping clipnorm global_clipnorm grad_clip gradient_clip grad_norm_clip
    clip_norm clip_gradients
optax.chain(optax.clip(1.0), ...) clips by value <- gradient_clip_algorithm
    clip_grad_value clipvalue
it is called `accumulate_grad_batches` <- gradient_accumulation_steps grad_accum
    accumulate accum_steps grad_accumulation grad_accumulation_steps
    gradient_accumulation
`accumulate_grad_batches` micro-batches make one step <- device_train_microbatch_size
    microbatch_size
it is called `loss_fn`, or `loss` for a criterion <- loss_func criterion compute_loss
    compute_loss_func loss_function
`loss_fn` may return a weighted sum; or pass a list of jaxdp.Part <- loss_weights
jaxdp.losses has it: loss=lambda p, y: optax.softmax_cross_entropy(p,
    optax.smooth_labels(y, 0.1)) <- label_smoothing label_smoothing_factor
it is called `metrics` <- compute_metrics weighted_metrics eval_metrics metric
    train_metrics
`precision` is one of '32-true', 'bf16-mixed', '16-mixed', ... <- fp16 bf16 tf32
    mixed_precision amp_backend amp_level precision_config half_precision fp16_opt_level
    bf16_full_eval fp16_full_eval autocast amp use_amp dtype param_dtype compute_dtype
it is called `remat` <- gradient_checkpointing activation_checkpointing
    activation_checkpoint_params gradient_checkpointing_kwargs checkpointing
leave it out: every step is compiled <- compile jit_compile torch_compile
    torch_compile_params compile_config torch_compile_backend torch_compile_mode jit
    run_eagerly enable_autolog_hparams
leave it out <- benchmark barebones auto_scale_loss remove_unused_columns push_to_hub
    hub_model_id flush_logs move_metrics_to_cpu do_train do_eval do_predict
    spin_dataloaders log_gpu_memory python_log_level past_index args hub_token
    hub_private_repo hub_always_push hub_revision hub_strategy use_cache trial
    use_liger_kernel liger_kernel_config torch_empty_cache_steps log_on_each_node
    trackio_space_id trackio_bucket_id trackio_static_space_id debug timer
    skip_memory_metrics model_registry suggest_integrations console_stream log_traces
    enable_compiled_autograd loss_backward_retain_graph path
    zero_grad_at_train_step_start deepcopy_model show_plot suggest_funcs
leave it out: XLA plans what is sent, and when <- ddp_bucket_cap_mb
    ddp_broadcast_buffers ddp_static_graph ddp_sync_strategy
leave it out: `accumulate_grad_batches` weights all rows alike; for tokens return
    (values, weights) <- average_tokens_across_devices accumulate_train_batch_on_tokens
`loss_fn` decides what is computed, and metrics are of `metrics` <- label_names
    include_for_metrics preprocess_logits_for_metrics include_num_input_tokens_seen
    neftune_noise_alpha train_unit_step
leave it out: passes without training always use inference mode <- inference_mode
    train_bn
leave it out: BatchNorm sees the whole batch <- sync_batchnorm
see `reproducible` <- deterministic deterministic_mode full_determinism
    cudnn_deterministic
it is called `seed` <- data_seed random_state random_seed rng_seed key rng rngs
filter_spec=['head'] trains a part of the model <- splitter trainable frozen freeze
    freeze_epochs
pass the model, or one of shapes (eqx.filter_eval_shape) <- model_init module train_unit
    unit lightning_module eval_unit predict_unit net network learner
# What callbacks do.
it is called `callbacks` <- cbs callback default_cbs algorithms
loggers are callbacks: callbacks=[CSVLogger('runs/first')] <- logger loggers report_to
    logging_dir log_to_console logging_strategy project experiment_name
it is called `log_every_n_steps` <- logging_steps console_log_interval row_log_interval
    log_interval log_every logging_first_step log_every_n
it is called `default_root_dir` <- output_dir run_name save_folder model_dir
    weights_save_path log_dir save_dir root_dir
callbacks=[ModelCheckpoint('runs/first', monitor='val_loss')] saves <-
    enable_checkpointing checkpoint_callback save_strategy save_steps save_interval
    save_total_limit save_num_checkpoints_to_keep load_best_model_at_end
    metric_for_best_model greater_is_better save_best save_overwrite save_filename
    save_on_each_node save_ignore_keys save_metrics save_only_model checkpoint_dir
    ckpt_dir save_every
callbacks=[EarlyStopping('val_loss')] stops <- early_stopping early_stopping_patience
    early_stop_callback patience
print(trainer.summary()) shows the layers <- enable_model_summary weights_summary
it is called `enable_progress_bar` <- verbose disable_tqdm progress_bar
    progress_bar_refresh_rate show_progress log_level log_level_replica
callbacks=[Profiler()] profiles <- profiler
callbacks=[NanGuard()] looks for NaN <- detect_anomaly terminate_on_nan
    logging_nan_inf_filter
callbacks=[GradientMonitor()] logs norms <- track_grad_norm
callbacks=[WeightAveraging()] averages <- swa_params stochastic_weight_avg ema ema_decay
    use_ema
jaxdp.finders.lr_find(trainer, loader, optimizer=optax.adam) does it <- auto_lr_find
    start_lr end_lr num_it stop_div
trainer.plan(loader).largest_batch() finds it <- auto_scale_batch_size
    auto_find_batch_size
# What loaders do.
the loader makes batches, as jaxdp.Arrays(x, y, batch_size=32) does <- x y batch_size
    shuffle train_data train_dataset dataset data_collator collate_fn
    per_device_train_batch_size train_batch_size num_workers dataloader_num_workers
    dataloader_drop_last drop_last group_by_length sampler workers use_multiprocessing
    max_queue_size tokenizer processing_class validation_batch_size
    per_device_eval_batch_size eval_batch_size pin_memory dataloader_pin_memory bs batch
    enable_prefetch dataloader_persistent_workers dataloader_prefetch_factor
    length_column_name dataloader_multiprocessing_context train_sampling_strategy
    data_loader
it is called `train_loader` <- train_dataloaders train_dataloader dataloader dataloaders
    train_dl training_data train_ds ds
it is called `val_loader` <- val_dataloaders val_dataloader eval_dataloader eval_dataset
    eval_data validation_data valid_dl val_data eval_loader test_loader val_ds
pass its loaders as `train_loader` and `val_loader` <- datamodule dls
split the rows before, and pass the rest as `val_loader` <- validation_split
a loader is iterated anew in every epoch <- reload_dataloaders_every_n_epochs
    reload_dataloaders_every_epoch
batches may be (x, y, weight), with a weight for each row <- class_weight sample_weight
    class_weights
# How far a fit goes.
it is called `max_epochs`, and includes those of earlier fits <- epochs num_train_epochs
    n_epoch num_epochs n_epochs nb_epoch
`max_epochs`, `max_steps` and `max_time` say how long <- max_duration
it is called `max_steps` <- num_steps total_steps train_steps
it is called `limit_train_batches` <- steps_per_epoch max_train_steps_per_epoch
    train_subset_num_batches train_percent_check
it is called `limit_val_batches` <- validation_steps max_eval_steps_per_epoch
    eval_subset_num_batches val_percent_check
it is called `check_val_every_n_epoch` <- validation_freq evaluate_every_n_epochs
    eval_strategy eval_delay evaluation_strategy
it is called `val_check_interval` <- eval_steps eval_interval evaluate_every_n_steps
    val_every_n_steps
fit(..., fast_dev_run=True) tries a batch of each <- num_sanity_val_steps eval_on_start
trainer.test(loader) and trainer.predict(loader) take it as `loader` <- test_dataset
    predict_dataloader test_dataloaders predict_dataloaders
trainer.predict(loader) returns predictions, on the host <- prediction_loss_only
    return_outputs return_predictions ignore_keys ignore_keys_for_eval
    eval_accumulation_steps eval_do_concat_batches eval_use_gather_object
    predict_with_generate
keys begin with val_, test_ or the name in {'clean': loader} <- metric_key_prefix
    return_dict
it is called `limit_batches`, of validate, test and predict <- limit_test_batches
    limit_predict_batches steps
fit(..., ckpt_path='last') resumes <- resume_from_checkpoint load_path autoresume
    initial_epoch start_epoch resume checkpoint_path ckpt reset_opt load_weights_only
    load_strict_model_weights load_object_store load_ignore_keys load_exclude_algorithms
    ignore_data_skip reset_time weights_only restore_callback_states_from_checkpoint

# Arguments of single classes and functions.
[EarlyStopping]
it is called `restore_best` <- restore_best_weights
it is called `monitor` <- metric monitored_attr
it is called `patience` <- early_stopping_patience
it is called `min_delta` <- early_stopping_threshold
it is called `mode`, 'min' or 'max' <- comp
fit(..., min_epochs=...) waits as long <- start_from_epoch
see `stopping_threshold` and `divergence_threshold` <- baseline
leave it out: a monitor without values is an error <- strict
leave it out: the monitor's name says when <- check_on_train_epoch_end interval
    interval_freq phase
of several loaders, monitor='val_clean_loss' is of {'clean': loader} <- dataloader_label
write the arguments themselves: patience=3 <- early_stop_checker
leave it out <- reset_on_fit log_rank_zero_only

[ModelCheckpoint]
a checkpoint's folder is named by its step, and the best and the last one have links
    beside it, `best` and `last` (`save_last=True`) <- filename fname remote_file_name
    latest_filename latest_remote_file_name auto_insert_metric_name
    enable_version_counter prefix name
it is `dirpath`, a folder <- filepath folder directory path save_dir
leave it out <- verbose reset_on_fit knob_options process_group replicated
it is called `monitor` <- metric
it is called `mode`, 'min' or 'max' <- comp
it is called `save_top_k` <- num_checkpoints_to_keep keep_last_n_checkpoints
    save_total_limit max_to_keep
see `monitor`, `mode` and `save_top_k` <- best_checkpoint_config
`save_last=False` with a `monitor` is that <- save_best_only save_best
`jaxdp.load_model` reads the weights alone out of a checkpoint, and `jaxdp.save_model`
    writes them alone <- save_weights_only ignore_keys
leave it out: a checkpoint has all that a run needs <- with_opt save_optimizer
use `every_n_train_steps` or `every_n_epochs` <- save_freq save_interval period
    save_every_n_train_steps
with the `monitor` of a validation it saves after each validation, and else at the end
    of an epoch <- save_on_train_epoch_end save_every_n_eval_epochs
leave it out: a fit that ends has a checkpoint of its last step <- at_end
leave it out: each better value counts <- initial_value_threshold min_delta
leave it out: nothing is overwritten <- overwrite
leave it out: files are written in the background <- async_checkpoint
docs/checkpoints.md, "Buckets", copies to other places <- num_concurrent_uploads
    upload_timeout_in_seconds storage_options

[validate test predict]
it is called `loader` <- dataloaders val_dataloaders test_dataloaders dataloader data
    val_dataloader test_dataloader predict_dataloaders dl dataset test_dataset
    eval_dataset val_loader test_loader
batches come from the loader: Arrays(x, y, batch_size=...) <- batch_size bs
it is called `limit_batches` <- steps num_batches max_batches
it is called `ckpt_path` <- ckpt checkpoint weights
leave it out: what is measured is returned <- verbose return_dict metric_key_prefix
    ignore_keys return_outputs
pass a loader: Arrays(x, y, batch_size=...) <- x y
the trainer has its model <- model
# A note on a wrong value, as in validate(model, loader) or validate(x, y).
The trainer has its model, and one loader has x and y: loader=Arrays(x, y) <- ckpt_path

[plan]
it is called `devices` <- gpus num_gpus n_devices world_size num_processes
it is called `hosts` <- nodes num_nodes

[save]
leave it out: `path` is a new folder <- overwrite exist_ok
jaxdp.save_model(path, trainer.model) writes them <- weights_only

[load]
jaxdp.load_model(path, like, partial=True) reads what fits <- strict
leave it out <- map_location reset_optimizer
jaxdp.load_model(path, like) reads them <- weights_only with_opt

[log]
leave it out: loggers have it with the step in batch hooks, and the history with the
    epoch <- on_step on_epoch
leave it out <- prog_bar logger sync_dist rank_zero_only batch_size add_dataloader_idx
    reduce_fx sync_dist_group metric_attribute enable_graph

[summary]
leave it out <- depth max_depth expand_nested

[LearningRateMonitor]
leave it out: it logs as loggers do, and with each epoch <- logging_interval
leave it out <- log_momentum log_weight_decay log_key_prefix

[ReduceLROnPlateau]
it is called `min_delta` <- threshold eps
it is called `mode`, 'min' or 'max' <- comp
leave it out <- reset_on_fit threshold_mode optimizer

[ProgressBar]
`refresh_per_second` and `every_n_seconds` are times <- refresh_rate
leave it out <- process_position leave theme console_kwargs

[WeightAveraging]
it is called `decay` <- decay_rate smoothing half_life alpha
it is called `every_n_steps` <- update_every_n_steps update_interval
it is called `start_step` <- update_starting_at_step update_starting_at_epoch
    swa_epoch_start ema_start
leave it out: it averages by `decay` <- avg_fn multi_avg_fn
leave it out <- device use_buffers
pass a schedule as the optimizer's rate <- swa_lrs annealing_epochs annealing_strategy

[ThroughputMonitor]
leave it out: examples are rows <- batch_size_fn length_fn
it is called `peak_flops_per_device` <- gpu_flops_available
leave it out: it logs as loggers do <- window_size time_unit

[GradientMonitor]
leave it out: norms are Euclidean <- norm_type
leave it out: it logs as loggers do <- log log_freq log_optimizer_metrics
    batch_log_interval

[Profiler]
it is called `dirpath` <- filename on_trace_ready
see `start_step` and `num_steps` <- schedule wait warmup active
leave it out: TensorBoard and Perfetto show all <- group_by_input_shapes emit_nvtx
    export_to_chrome row_limit sort_by_key record_module_names table_kwargs
    profile_memory with_stack record_shapes

[CSVLogger Logger MLFlowLogger]
it is called `dirpath` <- save_dir log_dir logdir dir folder root_dir artifact_location
CSVLogger(name=...) is of one file <- filename
leave it out: `dirpath` says where <- version sub_dir prefix
leave it out: a resumed run continues its table <- append
Trainer(..., log_every_n_steps=...) says how often <- flush_logs_every_n_steps
    update_freq write_steps_per_second max_queue flush_secs synchronous
ModelCheckpoint saves, and its hook on_save_checkpoint copies <- log_model
    checkpoint_name log_artifacts add_file_policy
callbacks=[Profiler()] profiles <- profile_batch
leave it out <- separator log_graph default_hp_metric histogram_freq write_graph
    write_images embeddings_freq embeddings_metadata anonymous rank_zero_only experiment

[Sharded Pmap FSDP ZeRO TensorParallel Pipeline]
it is called `devices` <- parallel_devices num_devices gpus num_gpus accelerator
FSDP(gather=...) decides <- auto_wrap_policy reshard_after_forward wrap_policy
FSDP(groups=...) decides <- num_replicas sharding_groups
TensorParallel(mesh_shape={'data': 4, 'model': 2}, rules) <- data_parallel_size
    tensor_parallel_size device_mesh
TensorParallel(mesh_shape, rules=[...]) <- parallelize_plan tp_plan
FSDP() splits all, ZeRO() the optimizer's state alone <- sharding_strategy
    zero_optimization
Trainer(..., precision=...) decides <- mixed_precision precision_plugin loss_scale
    initial_scale_power loss_scale_window hysteresis min_loss_scale
Trainer(..., remat=...) decides <- activation_checkpointing
    activation_checkpointing_policy partition_activations cpu_checkpointing
    contiguous_memory_optimization synchronize_checkpoint_boundary
Trainer(..., offload='optimizer') keeps its state on the host <- cpu_offload
    offload_optimizer offload_optimizer_device remote_device nvme_path
    offload_parameters offload_params_device max_in_cpu params_buffer_count
    params_buffer_size optimizer_buffer_count
LocalSGD(every=...) averages replicas <- model_averaging_period
callbacks=[Lockstep(timeout=...)] ends a job that hangs <- timeout
distributed.initialize() joins processes <- cluster_environment process_group_backend
    start_method
leave it out: checkpoints are whole, and fit any strategy <- state_dict_type
    checkpoint_io save_distributed_checkpoint load_full_weights
    exclude_frozen_parameters
leave it out: XLA plans what is sent, and when <- find_unused_parameters static_graph
    gradient_as_bucket_view bucket_cap_mb ddp_comm_state ddp_comm_hook ddp_comm_wrapper
    block_size broadcast_buffers queue_depth single_submit overlap_events thread_count
    pin_memory sub_group_size contiguous_gradients overlap_comm allgather_partitions
    reduce_scatter allgather_bucket_size reduce_bucket_size
    zero_allow_untested_optimizer logging_level logging_batch_size_per_gpu config
    use_orig_params forward_prefetch backward_prefetch limit_all_gathers
    sync_module_states

[SingleDevice]
it is called `device` <- gpu accelerator root_device index

[NanGuard]
it is called `max_skips` <- patience
docs/troubleshooting.md, "The loss is NaN", leaves out large gradients <- outliers
    threshold max_norm

[lora]
it is called `rank` <- r
it is called `alpha` <- lora_alpha
it is called `patterns` <- target_modules target_parameters
leave it out: dropout is the model's <- lora_dropout
filter_spec=['**.down', '**.up', ...] of the Trainer trains more <- bias modules_to_save
leave it out <- task_type init_lora_weights inference_mode fan_in_fan_out

[Arrays]
it is called `batch_size` <- batch bs batchsize
leave it out: the arrays are in memory <- num_workers pin_memory persistent_workers
    prefetch_factor collate_fn
put the arrays there: Arrays(jax.device_put(x), ...) <- on_device device
it is called `seed` <- generator key rng random_state

[load_model load_weights]
it is called `path` <- checkpoint_path filepath filename
it is called `like` <- model target template
load_model(path, like, partial=True) takes what fits <- strict skip_mismatch by_name
leave it out <- map_location device weights_only hparams_file compile

[save_model]
leave it out <- overwrite save_format include_optimizer
it is called `path` <- filepath filename

[Part]
it is the optimizer's: optax.adam(1e-3) <- lr learning_rate
it is called `every` <- frequency every_n_steps interval

[decay_mask]
pass patterns by position: decay_mask('**.scale') <- exclude

[muon]
it is called `learning_rate` <- lr
it is called `beta` <- betas momentum

# The next sections hold not names of arguments but their values, in lower case: the
# names that other libraries give to losses, metrics and precisions.
# Names that `losses.find_criterion` does not find in its tables.
[LOSSES]
'cross_entropy', which takes logits <- sparse_categorical_crossentropy
    categorical_crossentropy crossentropy ce nll nll_loss softmax_cross_entropy
    sparse_cross_entropy crossentropyloss nllloss
    softmax_cross_entropy_with_integer_labels softmax log_loss xent
'binary_cross_entropy', which takes logits <- binary_crossentropy bce bce_loss
    bce_with_logits sigmoid_cross_entropy bceloss bcewithlogitsloss
    binary_cross_entropy_with_logits sigmoid sigmoid_binary_cross_entropy
'mse' <- l2 l2_loss squared_error mse_loss mseloss
'mae' <- l1 l1_loss absolute_error l1loss mae_loss
'huber' <- smooth_l1 smooth_l1_loss huberloss smoothl1loss
a function, such as optax.losses.hinge_loss <- hinge hinge_loss kl_divergence kl kldiv
    focal focal_loss cosine_similarity cosine poisson ctc logcosh log_cosh

[METRICS]
'accuracy' <- sparse_categorical_accuracy categorical_accuracy top1 top_1
'top_5_accuracy' <- top5 top_5 top_k_categorical_accuracy top5_accuracy top_k_accuracy
    sparse_top_k_categorical_accuracy
{name: jaxdp.PassMetric(fn)}, with fn(predictions, targets) <- auc auroc f1 f1score
    f1_score precision recall r2 r2_score rmse matthews root_mean_squared_error
    perplexity confusion_matrix bleu

[precision]
'bf16-mixed' <- bfloat16 mixed_bfloat16 amp_bf16 bf16_mixed amp
'16-mixed' <- fp16 float16 mixed_float16 amp_fp16 half 16-true mixed fp16-mixed f16
'32-true' <- float32 fp32 full single f32
'32-true', the widest <- 64 64-true float64 double
'32-true', of which Ampere and Hopper make TF32 <- tf32
'32-highest' <- highest 32-high

# Words for `strategy`: Lightning's, Keras's, DeepSpeed's, PyTorch's.
[strategy]
Sharded(), the default <- auto
Sharded() <- ddp ddp_spawn ddp_fork ddp_notebook ddp2 ddp_find_unused_parameters_true
    ddp_find_unused_parameters_false ddp_spawn_find_unused_parameters_true
    ddp_fork_find_unused_parameters_true ddp_cpu mirrored multi_worker_mirrored
    multiworkermirrored horovod bagua xla xla_spawn tpu_spawn sharded no_shard
    data_parallel distributed jit
Pmap() <- dp pmap
SingleDevice() <- single_device single_tpu single_xla single one_device
ZeRO() <- zero zero1 zero2 zero-1 zero-2 deepspeed_stage_1 deepspeed_stage_2 ddp_sharded
    ddp_sharded_spawn fairscale shard_grad_op
ZeRO(), and Trainer(..., offload='optimizer') <- deepspeed_stage_1_offload
    deepspeed_stage_2_offload zero_offload
ZeRO() or FSDP() <- deepspeed
FSDP() <- fsdp fsdp1 fsdp2 fsdp_native full_shard fully_sharded zero3 zero-3
    deepspeed_stage_3 xla_fsdp colossalai
FSDP(), and Trainer(..., offload='optimizer') <- deepspeed_stage_3_offload
    fsdp_cpu_offload fsdp_native_full_shard_offload deepspeed_stage_3_offload_nvme
FSDP(groups=...) <- hsdp hybrid_shard hybrid_sharded
TensorParallel(mesh_shape, rules) <- tp tensor_parallel tensorparallel model_parallel
    megatron megatron_lm
Pipeline(stages, microbatches) <- pp pipeline pipeline_parallel gpipe
SequenceParallel(mesh_shape) <- cp sp sequence_parallel context_parallel ring_attention
    ulysses
LocalSGD(every=...) <- diloco local_sgd localsgd hivemind post_local_sgd

# Attributes and methods of a trainer.
[trainer]
trainer.model <- lightning_module network net learn unwrapped_model weights parameters
    named_parameters trainable_variables variables get_weights trainable_weights module
    model_wrapped
trainer.state.params <- params
trainer.state.opt_state <- optimizers optimizer opt opt_state
trainer.hyperparams, of optax.inject_hyperparams, and to set one
    trainer.set_hyperparams(learning_rate=...) <- lr learning_rate lr_scheduler
    lr_schedulers lr_scheduler_configs scheduler get_last_lr
trainer.callback_metrics <- logged_metrics progress_bar_metrics metrics loss get_metrics
trainer.log(name, value) <- log_metrics log_dict save_metrics
trainer.save(path) <- save_checkpoint save_state state_dict
trainer.load(path) <- load_checkpoint restore load_state_dict load_from_checkpoint
jax.device_count() <- world_size num_devices num_gpus devices device_ids
jax.devices() <- device accelerator root_device
jax.process_index() <- global_rank local_rank node_rank rank process_index
jax.process_count() <- num_nodes num_processes
trainer.is_global_zero <- is_world_process_zero is_local_process_zero is_rank_zero
    is_main_process
trainer.global_step <- current_step steps_done step_count iteration timestamp
trainer.current_epoch <- epoch epoch_num n_epoch
trainer.max_epochs <- epochs num_epochs
trainer.num_training_batches <- estimated_stepping_batches steps_per_epoch
trainer.should_stop <- stop_training interrupted stop received_sigterm
trainer.run.doing <- training validating testing predicting evaluating sanity_checking
trainer.run.arguments <- args precision precision_plugin hparams
trainer.validate(loader), or trainer.test(loader) <- evaluate eval evaluation_loop
    evaluate_generator score
trainer.fit(loader) <- train fit_one_cycle fine_tune fit_generator fit_flat_cos fit_sgdr
    run start
trainer.steps(loader), which yields each step's metrics <- train_on_batch training_step
    step train_step backward test_on_batch validation_step test_step prediction_step
trainer.predict(loader) <- get_preds predict_on_batch predict_generator predict_proba
    predictions
trainer.inference_model(), to call on one example <- predict_step forward
jaxdp.save_model(path, trainer.model), or trainer.save(path) <- save_model
jaxdp.load_weights(path, like, names), or trainer.load(path) <- load_weights
jaxdp.save_weights(trainer.model, path, names), or trainer.save(path) <- save_weights
`python -m jaxdp export`, or jaxdp.save_model(path, trainer.model) <- export push_to_hub
    create_model_card
jaxdp.finders.lr_find(trainer, loader, optimizer=optax.adam) <- lr_find tuner tune
callbacks.OptunaPruning <- hyperparameter_search
Trainer(model, optimizer, loss=...), which needs no such call <- compile
    create_optimizer create_scheduler create_optimizer_and_scheduler init_module
    compute_loss
Trainer(..., callbacks=[...]) <- add_callback pop_callback remove_callback add_cb
    add_cbs remove_cb cbs
the callback that you passed, of `trainer.callbacks` <- checkpoint_callback
    checkpoint_callbacks early_stopping_callback early_stopping_callbacks
    progress_bar_callback logger loggers recorder best_model_path
trainer.default_root_dir <- log_dir output_dir
the argument that you pass to fit <- fast_dev_run ckpt_path min_epochs min_steps
    limit_train_batches limit_val_batches overfit_batches
len(loader) <- num_val_batches num_test_batches num_predict_batches num_examples
    is_last_batch num_sanity_val_batches
Trainer(...), a new one <- reset engine
no call: a fit closes what it opens <- close end
the loader that you pass to fit <- datamodule train_dataloader val_dataloaders
    test_dataloaders dls predict_dataloaders get_train_dataloader get_eval_dataloader
    get_test_dataloader train_loader val_loader
trainer.history <- history_ log_history state_history
Trainer(..., filter_spec=...), anew <- freeze unfreeze freeze_to
Trainer(..., precision=...) <- to_fp16 to_bf16 half
Trainer(..., strategy=SingleDevice(device)) <- to cuda cpu
trainer.set_hyperparams(learning_rate=...) <- set_lr
trainer.summary() <- show_results print_trainable_parameters

# Names of the package.
[jaxdp]
jaxdp.Trainer(model, optimizer, loss=...).fit(loader) <- LightningModule Model Learner
    TrainingArguments train Sequential AutoUnit Fabric Accelerator LightningTrainer
eqx.Module and eqx.nn, of Equinox <- Module nn layers
optax <- optim optimizers Adam AdamW SGD
a loader, such as jaxdp.Arrays(x, y, batch_size=32) <- DataLoader DataModule
    LightningDataModule Dataset TensorDataset DataLoaders
Trainer(model, seed=...) <- seed_everything set_seed set_random_seed
jaxdp.callbacks <- loggers logger profilers tuner Timer
metrics=['accuracy'], or functions of jaxdp.losses <- metrics Accuracy Metric
jaxdp.finders.lr_find <- lr_find LRFinder
jaxdp.Sharded <- DDP DDPStrategy MirroredStrategy DistributedDataParallel
    DataParallelStrategy
jaxdp.FSDP <- FSDPStrategy FullyShardedDataParallel FSDP2 fully_shard
jaxdp.load_model(path, like) <- load load_checkpoint load_from_checkpoint
jaxdp.save_model(path, model) <- save save_checkpoint
jaxdp.lora(model, patterns, rank, key=key) <- LoraConfig get_peft_model LoRA

[jaxdp.callbacks]
NanGuard <- TerminateOnNaN NaNMonitor TerminateOnNaNCallback
WeightAveraging <- StochasticWeightAveraging EMA SWA EMACallback EMAWeightAveraging
    SwapEMAWeights ExponentialMovingAverage
ProgressBar <- TQDMProgressBar RichProgressBar ProgbarLogger ProgressBarBase
    ProgressCallback PrinterCallback ConsoleLogger ProgressBarLogger
LearningRateMonitor <- LRMonitor ParamSchedulerMonitor
ThroughputMonitor <- SpeedMonitor DeviceStatsMonitor RuntimeEstimator MemoryMonitor
GradientMonitor <- OptimizerMonitor ActivationMonitor
Profiler <- PyTorchProfiler SimpleProfiler AdvancedProfiler
TensorBoardLogger <- TensorBoard TensorboardLogger TensorBoardCallback
WandbLogger <- WandbCallback WandBLogger
MLFlowLogger <- MLflowCallback MLFlowCallback
StallWatch <- Watchdog
Preemption <- GracefulStopper
ModelCheckpoint <- CheckpointSaver SaveModelCallback Checkpoint TorchSnapshotSaver
    CheckpointCallback ModelCheckpointCallback
ModelCheckpoint(save_on_exception=True) <- OnExceptionCheckpoint
ModelCheckpoint, with fit(..., ckpt_path='auto') <- BackupAndRestore
EarlyStopping <- EarlyStopper EarlyStoppingCallback
Callback, with hooks of your own <- LambdaCallback TrainerCallback RemoteMonitor
    CallbackList DefaultFlowCallback CallbackHandler ImageVisualizer LogSamples
its hook on_predict_batch_end of a Callback <- BasePredictionWriter
a schedule as the optimizer's rate, of optax <- LearningRateScheduler LRScheduler
    OneCycleTrainer ParamScheduler
jaxdp.finders.lr_find(trainer, loader, optimizer=optax.adam) <- LearningRateFinder
    LRFinder
trainer.plan(loader).largest_batch() <- BatchSizeFinder BatchSizeScaler
Trainer(..., accumulate_grad_batches=...) <- GradientAccumulationScheduler
    GradientAccumulation
Trainer(..., gradient_clip_val=...) <- GradientClip GradientClipping
Trainer(..., precision=...) <- MixedPrecision NativeMixedPrecision
Trainer(..., filter_spec=...) <- BackboneFinetuning BaseFinetuning
Trainer(..., after_update=fn) <- ModelPruning WeightClip
fit(..., max_time=...) <- Timer
trainer.summary() <- ModelSummary RichModelSummary
trainer.history <- History Recorder

[jaxdp.strategies]
Sharded <- DDPStrategy DDP DistributedDataParallel MirroredStrategy DDPSpawnStrategy
    MultiWorkerMirroredStrategy XLAStrategy SPMDStrategy
FSDP <- FSDPStrategy FullyShardedDataParallel FSDP2Strategy XLAFSDPStrategy
ZeRO <- DeepSpeedStrategy ZeroRedundancyOptimizer
TensorParallel <- ModelParallelStrategy TensorParallelStrategy
SingleDevice <- SingleDeviceStrategy SingleDeviceXLAStrategy
DataParallel, or Sharded, as a base class <- Strategy ParallelStrategy

[jaxdp.losses]
cross_entropy <- CrossEntropyLoss NLLLoss nll softmax_cross_entropy
    CategoricalCrossentropy SparseCategoricalCrossentropy
    sparse_categorical_crossentropy categorical_crossentropy CrossEntropyLossFlat
binary_cross_entropy <- BCELoss BCEWithLogitsLoss bce BinaryCrossentropy
    binary_crossentropy
mse <- MSELoss MeanSquaredError mean_squared_error l2_loss
mae <- L1Loss MeanAbsoluteError mean_absolute_error l1_loss
huber <- HuberLoss SmoothL1Loss huber_loss Huber
accuracy <- Accuracy acc SparseCategoricalAccuracy

[jaxdp.distributed]
initialize <- init_process_group setup init init_distributed launch spawn
jax.process_index() <- get_rank rank get_local_rank get_global_rank
jax.process_count() <- get_world_size world_size
jax.experimental.multihost_utils.sync_global_devices(name) <- barrier
jax.experimental.multihost_utils.process_allgather(x) <- all_gather all_reduce broadcast
    gather reduce
nothing: processes leave the job when they end <- destroy_process_group shutdown cleanup

# Hooks of other libraries, listed by the hooks that do their work in jaxdp.
[Callback]
setup <- on_init_start on_init_end after_create
on_fit_start <- on_train_start on_sanity_check_start on_sanity_check_end on_train_begin
    before_fit fit_start
on_fit_end <- on_train_end after_fit fit_end after_cancel_fit
on_train_epoch_start <- on_epoch_start on_epoch_begin before_epoch before_train
    epoch_start iteration_start
on_train_epoch_end <- on_epoch_end after_epoch after_train epoch_end iteration_end
    after_cancel_epoch after_cancel_train epoch_checkpoint iteration_checkpoint
on_train_batch_start <- on_batch_start on_batch_begin on_train_batch_begin on_step_begin
    on_train_dataloader_iter_creation_start on_train_get_next_batch_start
    on_train_dataloader_iter_creation_end on_train_step_start
    on_train_get_next_batch_end before_batch batch_start before_train_batch
    before_dataloader after_dataloader before_forward
on_train_batch_end <- on_batch_end on_step_end on_substep_end on_log on_train_step_end
    after_batch batch_end after_train_batch after_pred after_loss after_forward
    before_loss after_cancel_batch batch_checkpoint
inside_step <- on_before_backward on_after_backward on_before_optimizer_step
    on_before_zero_grad on_pre_optimizer_step on_optimizer_step before_backward
    after_backward before_step after_cancel_step after_cancel_backward
on_validation_start <- on_validation_epoch_start on_validation_batch_start on_test_begin
    on_test_batch_begin on_eval_start on_eval_epoch_start on_eval_step_start
    on_eval_dataloader_iter_creation_start on_eval_dataloader_iter_creation_end
    on_eval_get_next_batch_start before_validate eval_start eval_before_all
    eval_batch_start eval_before_forward eval_standalone_start
on_validation_end <- on_validation_epoch_end on_evaluate on_prediction_step on_eval_end
    on_eval_epoch_end on_eval_step_end on_eval_get_next_batch_end after_validate
    after_cancel_validate eval_end eval_after_all eval_batch_end eval_after_forward
    eval_standalone_end
on_test_start <- on_test_epoch_start on_test_batch_start
on_test_end <- on_test_epoch_end on_test_batch_end
on_predict_start <- on_predict_epoch_start on_predict_batch_start on_predict_begin
    on_predict_batch_begin on_predict_step_start predict_start
    on_predict_dataloader_iter_creation_start on_predict_get_next_batch_start
    on_predict_dataloader_iter_creation_end predict_batch_start predict_before_forward
on_predict_end <- on_predict_epoch_end on_predict on_predict_get_next_batch_end
    predict_end
on_predict_batch_end <- on_predict_step_end predict_batch_end predict_after_forward
on_save_checkpoint <- on_save on_push_begin
load_state_dict <- on_load_checkpoint after_load before_load
on_exception <- on_keyboard_interrupt
teardown <- post_close
state_dict <- state_key

# Arguments of hooks, listed by the expressions that have their values in jaxdp.
[hook]
trainer.model <- pl_module
metrics <- logs outputs
batch_idx <- batch step
trainer.current_epoch <- epoch
trainer.run.doing <- stage
"""


def _read_tables(text: str) -> dict[str, dict[str, str]]:
    """Parses sections `[names]` of rows `answer <- words` into each name's answers.

    A line that is indented continues the line before it.
    """
    tables: dict[str, dict[str, str]] = {}
    names: list[str] = []
    for line in re.sub(r"\n +", " ", text).split("\n"):
        answer, _, words = line.partition(" <- ")
        if line.startswith("["):
            names = line.strip("[]").split()
        elif not line.startswith("#"):
            for name in names:
                tables.setdefault(name, {}).update(dict.fromkeys(words.split(), answer))
    return tables


INSTEAD: Final = _read_tables(_TABLE)
"""The line to write instead of a name of other libraries, by its kind and the name."""


def find_near(name: str, names: Iterable[str], cutoff: float = 0.8) -> str | None:
    """Returns the one of `names` that a misspelt name may be meant for."""
    squeezed = {known.replace("_", "").lower(): known for known in names}
    name = name.replace("_", "").lower()
    close = difflib.get_close_matches(name, squeezed, n=1, cutoff=cutoff)
    return squeezed[close[0]] if close else None
