"""Wrong arguments of whatever is public: each gets an error that names it, at once."""

import collections.abc
import functools
import inspect
import numbers
import types
import typing

import equinox as eqx
import jax
import numpy as np
import pytest
from toys import batches, linear, mlp

import jaxdp
from jaxdp import callbacks, strategies
from jaxdp.basics.tree import matches

NOT_CALLED = {"Callback", "DataParallel", "History", "Plan", "TrainState"}
"""What is public and not made by users, or takes what their subclasses say."""

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
    "Samples": {"make": lambda model: {}},
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
    "lr_find": {"trainer": None, "train_loader": []},
}


def public():
    """Names and callables."""
    for module in (jaxdp, callbacks, strategies):
        for name in module.__all__:
            value = getattr(module, name)
            if name not in NOT_CALLED and hasattr(value, "__wrapped__"):
                yield name, value
            elif isinstance(value, type) and name not in NOT_CALLED:
                if hasattr(value.__init__, "__wrapped__"):
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
    """Whether a value is of an annotation, as far as that can be told."""
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


@pytest.mark.parametrize("name, pattern, fits", [
    ("layers[3].w", "layers.3.w", True),
    ("layers[3]", "layers[*]", True),
    ("layers[3]", "layers.*", True),
    ("layers[13]", "layers[3]", False),
    ("layers[10]", "layers[1?]", True),
    ("layers[3].norm.w", "layers[*].w", False),
    ("layers[3].norm.w", "layers.*.w", True),
    ("blocks.stacked.norm.w", "blocks.norm.w", True),
    ("blocks.stacked.norm.w", "blocks[*].norm.w", True),
    ("stacked.norm.w", "norm.w", True),
    ("unstacked.w", "un.w", False),
    ("nets['a'].w", "nets.a.w", True),
    ("[0].w", "0.w", True),
])  # fmt: skip
def test_patterns_of_paths_have_one_grammar(name, pattern, fits):
    assert matches(name, pattern) is fits


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
        ("cross_entropi", "cross_entropy may be meant"),
    ]:
        with pytest.raises(ValueError, match=answer):
            jaxdp.Trainer(MODEL, loss=theirs)


class Other(callbacks.EarlyStopping):
    def __init__(self, x, **others):
        super().__init__(**others)


@pytest.mark.parametrize("call, answer", [
    (lambda: callbacks.ModelCheckpoint(verbose=True), "`ModelCheckpoint`: leave"),
    (lambda: callbacks.EarlyStopping(metric="val_loss"), "it is called `monitor`."),
    (lambda: jaxdp.FSDP(activation_checkpointing=1), "it takes devices, mesh,"),
    (lambda: jaxdp.Ensemble(learning_rate=[1.0]), "^`Ensemble`: .* 'size'. It takes"),
    (lambda: jaxdp.Arrays([1], batchsize=3), "may be meant for `batch_size`.$"),
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
