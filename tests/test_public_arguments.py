"""Wrong arguments of whatever is public: each gets an error that names it, at once."""

import collections.abc
import functools
import inspect
import numbers
import pkgutil
import re
import types
import typing

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from toys import batches, linear, mlp

import jaxdp
from jaxdp import callbacks, strategies

NOT_CALLED = {"Callback", "DataParallel", "History", "Plan", "TrainState"}
"""What is public and not made by users, or takes what their subclasses say."""

CHECKED_LATER = {"Part", "Stack", "Whole", "decay_mask", "muon", "per_example"}
"""What takes functions and trees, which are checked when they are used."""

OF_STRATEGIES = {"AxisCollectives", "Collectives", "Group", "find_layouts"}
"""What steps and plans are made of."""

MODEL, LINEAR = mlp(), linear()
NEEDED = {
    "Trainer": {"model": MODEL},
    "fit": {"train_loader": batches(8), "max_epochs": 1, "max_steps": 1},
    "validate": {"loader": batches(8)},
    "test": {"loader": batches(8)},
    "predict": {"loader": batches(8)},
    "Bitwise": {"strategy": jaxdp.Sharded()},
    "Ensemble": {"size": 2},
    "LocalSGD": {"every": 2},
    "OptunaPruning": {"trial": None},
    "PassMetric": {"fn": lambda p, y: 0.0},
    "Pipeline": {"stages": 2, "microbatches": 2},
    "SequenceParallel": {"mesh_shape": {"data": 1, "seq": 8}},
    "TensorParallel": {"mesh_shape": {"data": 4, "model": 2}},
    "lora": {"model": MODEL, "patterns": "*", "rank": 1, "key": jax.random.key(0)},
    "merge_lora": {"model": MODEL},
    "fuse_attention": {"model": eqx.nn.MultiheadAttention(2, 4, key=jax.random.key(0))},
    "load_model": {"path": "model.safetensors", "like": LINEAR},
    "save_model": {"path": "out.eqx", "model": MODEL},
    "load_weights": {"path": "model.safetensors", "like": LINEAR, "names": {"*": "*"}},
    "save_weights": {"path": "w.safetensors", "model": LINEAR, "names": {"*": "*"}},
    "steps_of": {"loader": batches(8), "max_epochs": 1},
    "tensor_rules": {"model": MODEL},
}


def public():
    """Names and callables."""
    for module in (jaxdp, callbacks, strategies):
        unchecked = NOT_CALLED | CHECKED_LATER | OF_STRATEGIES
        for name in sorted({*module.__all__} - unchecked):
            value = getattr(module, name)
            if not isinstance(value, types.ModuleType):
                yield name, value
    for name in ("fit", "validate", "test", "predict"):
        yield name, of_trainer(name)


def of_trainer(name):
    """A method of a new trainer each time."""

    @functools.wraps(getattr(jaxdp.Trainer, name))
    def call(**arguments):
        trainer = jaxdp.Trainer(MODEL, enable_progress_bar=False)
        return getattr(trainer, name)(**arguments)

    return call


def allows(annotation, value):
    """Returns True if a value is of an annotation, as far as that can be told."""
    origin = typing.get_origin(annotation) or annotation
    if origin in (types.UnionType, typing.Union):
        return any(allows(each, value) for each in typing.get_args(annotation))
    if origin is typing.Literal:
        return value in typing.get_args(annotation)
    if origin is collections.abc.Callable:
        return callable(value)
    if origin in (int, float):
        kind = numbers.Integral if origin is int else numbers.Real
        return isinstance(value, kind) and not isinstance(value, bool)
    if annotation is None:
        return value is None
    is_told = isinstance(origin, type) and origin is not typing.Any
    return isinstance(value, origin) if is_told else True


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder of what is to be read."""
    folder = tmp_path_factory.mktemp("files")
    jaxdp.save_model(folder / "model.safetensors", LINEAR)
    return folder


WRONG = "x", 1.5, -1, object(), [], {}, (), b"x", True, 10**30, float("nan")


@pytest.mark.parametrize("name, function", dict(public()).items())
def test_each_wrong_argument_is_named(name, function, files, monkeypatch):
    monkeypatch.chdir(files)
    wrong = []
    for argument, parameter in inspect.signature(function).parameters.items():
        variadic = parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL
        if argument == "self" or parameter.kind in variadic:
            continue
        for value in WRONG:
            is_allowed = allows(parameter.annotation, value)
            try:
                function(**{**NEEDED.get(name, {}), argument: value})
            except (TypeError, ValueError, ImportError, OSError) as error:
                if not is_allowed and f"`{argument}" not in str(error):
                    wrong.append(f"{argument}={value!r}: {error}"[:200])
            else:
                if not is_allowed:
                    wrong.append(f"{argument}={value!r} was taken")
    assert not wrong, "\n".join(wrong)


def test_late_and_nameless_ones_are_early_and_named():
    with pytest.raises(TypeError, match="`file"):
        callbacks.ProgressBar(file=1.5)
    late = {"limit_val_batches": 10**30, "max_time": {}, "overfit_batches": ""}
    for name, wrong in late.items():
        with pytest.raises((TypeError, ValueError), match=f"`{name}"):
            jaxdp.Trainer(MODEL).fit(batches(8), batches(8), **{name: wrong})


class Twice(eqx.Module):
    blocks: jaxdp.Stack
    layers: list
    attention: eqx.nn.MultiheadAttention

    def __init__(self):
        keys = jax.random.split(jax.random.key(0), 6)
        linear = [eqx.nn.Linear(4, 4, key=key) for key in keys]
        self.blocks, self.layers = jaxdp.Stack(linear[:2]), linear[2:5]
        self.attention = eqx.nn.MultiheadAttention(2, 4, key=keys[5])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.blocks(x)


def _by_pattern(argument, pattern):
    """Uses a pattern where `argument` takes one."""
    model, key = Twice(), jax.random.key(0)
    arrays = eqx.filter(model, eqx.is_array)
    rules = [(f"{pattern}.weight", jax.sharding.PartitionSpec())]
    part = jaxdp.Part(pattern, lambda m, x: 0.0, optax.sgd(1), name="a")

    def plan(strategy):
        trainer = jaxdp.Trainer(model, loss="mse", strategy=strategy)
        trainer.run.shapes()

    calls = {
        "filter_spec": lambda: jaxdp.Trainer(model, filter_spec=[pattern]),
        "Part": lambda: jaxdp.Trainer(model, [part]),
        "remat": lambda: jaxdp.Trainer(model, remat=pattern),
        "gather": lambda: plan(jaxdp.FSDP(1, gather=[pattern])),
        "lora": lambda: jaxdp.lora(model, pattern, 1, key=key),
        "decay_mask": lambda: jaxdp.decay_mask(pattern)(arrays),
        "muon": lambda: jaxdp.muon(0.1, adam=pattern).init(arrays),
        "rules": lambda: plan(jaxdp.TensorParallel({"data": 1, "model": 1}, rules, 1)),
    }
    return calls[argument]()


@pytest.mark.parametrize(
    "argument",
    "filter_spec Part remat gather lora decay_mask muon rules".split(),
)
def test_patterns_are_the_same_everywhere(argument):
    for pattern in ("layers[1]", "layers.1", "layers[*]", "layers.*", "**.layers.?"):
        _by_pattern(argument, pattern)
    for pattern in ("layers[3]", "layer.*", "*.layers", "layers.*.*.*"):
        with pytest.raises(ValueError, match=r"there are|The paths are") as caught:
            _by_pattern(argument, pattern)
        assert repr(pattern)[:-1] in str(caught.value)
        assert "layers[*]" in str(caught.value)  # those to choose from


def test_a_bare_name_is_of_layers_anywhere():
    model = {"a": eqx.nn.MultiheadAttention(2, 4, key=jax.random.key(0))}
    adapted = jaxdp.lora(model, "query_proj", 1, key=jax.random.key(0))["a"]
    kinds = type(adapted.query_proj), type(adapted.key_proj)
    assert [kind.__name__ for kind in kinds] == ["LoRALinear", "Linear"]


@pytest.mark.parametrize(
    "theirs, ours", [(16, "16-mixed"), (32, "32-true"), ("bf16", "bf16-mixed")]
)
def test_short_words_for_precisions(theirs, ours):
    trainer = jaxdp.Trainer(MODEL, precision=theirs)
    assert trainer.run.arguments["precision"] == ours
    with pytest.raises(ValueError, match="`precision` must be one of.*got 64"):
        jaxdp.Trainer(MODEL, precision=64)


def test_losses_by_other_libraries_names():
    data = [(np.ones((8, 4), np.float32), np.ones((8, 3), np.float32))]
    metrics = ["mean_squared_error"]
    found = jaxdp.Trainer(MODEL, loss="mse", metrics=metrics).validate(data)
    assert found["val_loss"] == found["val_mean_squared_error"]
    for theirs, answer in [
        ("sparse_categorical_crossentropy", "'cross_entropy', which takes logits"),
        ("cross_entropi", "for 'cross_entropi' write 'cross_entropy'."),
    ]:
        with pytest.raises(ValueError, match=answer):
            jaxdp.Trainer(MODEL, loss=theirs)


@pytest.mark.parametrize("word", ["hinge", "poisson", "l2_loss"])
def test_a_loss_that_has_been_added_is_found_by_a_word_of_other_libraries(
    word, monkeypatch
):
    add = {"loss": "LOSSES", "metrics": "METRICS"}
    for argument, table in add.items():
        value = word if argument == "loss" else [word]
        with pytest.raises(ValueError, match=f"for '{word}' write "):
            jaxdp.Trainer(MODEL, **{argument: value})
        monkeypatch.setitem(getattr(jaxdp.losses, table), word, jaxdp.losses.mae)
        data = [(np.ones((8, 4), np.float32), np.zeros((8, 3), np.float32))]
        trainer = jaxdp.Trainer(MODEL, **{"loss": "mae", argument: value})
        found = trainer.validate(data)
        assert found[f"val_{word if argument == 'metrics' else 'loss'}"] > 0


# Some of each library's: the words that its users type first.
WORDS = {
    "Trainer": """accelerator devices num_nodes logger max_epochs enable_checkpointing
        profiler sync_batchnorm | optimizer_cls_and_kwargs args data_collator
        train_dataset eval_dataset compute_metrics output_dir train_batch_size
        learning_rate num_train_epochs fp16 report_to push_to_hub | max_duration
        optimizers schedulers device_train_microbatch_size save_folder deepspeed_config
        algorithms autoresume run_name | dls loss_func opt_func cbs splitter moms
        wd_bn_bias train_bn | module step_lr_interval swa_params detect_anomaly""",
    "fit": """x y batch_size epochs verbose validation_split validation_data shuffle
        class_weight initial_epoch steps_per_epoch n_epoch lr_max datamodule""",
    "predict": "batch_size verbose steps dataloaders test_dataset ignore_keys",
    "EarlyStopping": "restore_best_weights strict baseline comp",
    "ModelCheckpoint": "filename filepath save_best_only save_weights_only period",
    "LearningRateMonitor": "logging_interval log_momentum",
    "TensorBoardLogger": "save_dir version log_graph histogram_freq",
    "WeightAveraging": "half_life swa_lrs device avg_fn",
    "FSDP": "sharding_strategy cpu_offload auto_wrap_policy mixed_precision",
    "Sharded": "find_unused_parameters process_group_backend static_graph",
    "ZeRO": "offload_optimizer overlap_comm allgather_bucket_size",
    "lora": "r lora_alpha target_modules lora_dropout bias",
    "Arrays": "num_workers pin_memory bs",
}


@pytest.mark.parametrize("function", WORDS)
def test_words_of_other_libraries_are_answered(function):
    homes = jaxdp, callbacks, jaxdp.Trainer
    call = next(getattr(home, function) for home in homes if function in dir(home))
    words = {*WORDS[function].split()} - {"|"}
    trainer = [None] if function in ("fit", "predict") else []
    with pytest.raises(TypeError) as caught:
        call(*trainer, **dict.fromkeys(words))
    lines = str(caught.value).splitlines()
    answered = {re.match(r"`(\w+)` is no", x)[1] for x in lines if "is no arg" in x}
    assert answered == words
    assert not [x for x in lines if "no argument" in x and ": it takes" in x]


NAMES = """
    jaxdp: EarlyStopping LightningModule TrainingArguments Learner DataLoader nn optim
        seed_everything cross_entropy lr_find Sharde DataParallell EarlyStoping metrics
    jaxdp.callbacks: TQDMProgressBar TerminateOnNaN SaveModelCallback EarlyStoping Timer
        BackupAndRestore LearningRateScheduler SpeedMonitor MixedPrecision
    jaxdp.strategies: DDPStrategy FSDPStrategy DeepSpeedStrategy Shardd
    jaxdp.losses: CrossEntropyLoss MSELoss cross_entropi sparse_categorical_crossentropy
    jaxdp.distributed: init_process_group get_rank barrier initialise
"""


@pytest.mark.parametrize("line", NAMES.replace("\n        ", " ").strip().splitlines())
def test_names_of_other_libraries_are_answered(line):
    module, names = line.strip().split(":")
    for name in names.split():
        with pytest.raises(ImportError, match="instead of it|may be meant|it is in"):
            getattr(pkgutil.resolve_name(module), name)
    assert not hasattr(pkgutil.resolve_name(module), "something_else")
    assert {*dir(jaxdp)} >= {*jaxdp.__all__} and "INSTEAD" not in dir(jaxdp)


@pytest.mark.parametrize(("name", "place"), [
    ("Sharde", "module 'jaxdp' .* jaxdp.Sharded may be meant"),
    ("EarlyStoping", "jaxdp.callbacks.EarlyStopping may be meant"),
    ("LivePlot", "from jaxdp.callbacks import LivePlot"),
    ("cross_entropy", "from jaxdp.losses import cross_entropy"),
    ("token_cross_entropy", "from jaxdp.losses import token_cross_entropy"),
])  # fmt: skip
def test_an_import_error_says_where_a_name_is(name, place):
    with pytest.raises(ImportError, match=place):
        getattr(jaxdp, name)


class Other(callbacks.EarlyStopping):
    def __init__(self, x, **others):
        super().__init__(**others)


@pytest.mark.parametrize("call, answer", [
    (lambda: callbacks.ModelCheckpoint(verbose=True), "`ModelCheckpoint`: leave"),
    (lambda: callbacks.EarlyStopping("x", comp="less"), "it is called `mode`,"),
    (lambda: jaxdp.FSDP(something=1), "it takes devices, mesh,"),
    (lambda: jaxdp.Ensemble(learning_rate=[1.0]), "^`Ensemble`: missing .* 'size'.$"),
    (lambda: jaxdp.Arrays([1], batch_sise=3), "may be meant for `batch_size`.$"),
])  # fmt: skip
def test_answers_are_of_the_callable_itself(call, answer):
    with pytest.raises(TypeError, match=answer) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_numbers_of_numpy_are_numbers():
    loader = [(np.ones((8, 4), np.float32), np.ones((8, 3), np.float32))] * 4
    one = np.int64(1)
    options = {"seed": one, "accumulate_grad_batches": one, "log_every_n_steps": one}
    options |= {"loss": "mse", "enable_progress_bar": np.int64(0)}
    trainer = jaxdp.Trainer(LINEAR, **options)
    limits = {"limit_train_batches": np.float32(0.5), "max_time": np.float32(60)}
    trainer.fit(loader, max_epochs=one, **limits)
    assert trainer.global_step == 2
    assert repr(Other(1)) == "Other()"
    assert jaxdp.Sharded(np.int64(2)).mesh.size == 2
