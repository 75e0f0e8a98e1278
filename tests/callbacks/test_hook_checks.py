"""Hooks that are never called, or are called with other arguments: found at once."""

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable

import equinox as eqx
import optax
import pytest
from toys import batches, make_small

from jaxdp import Callback
from jaxdp.basics.other_libraries import INSTEAD

METHODS = {n for n, m in vars(Callback).items() if inspect.isfunction(m)}
ELSEWHERE = INSTEAD["Callback"]
OTHERS = """
setup teardown on_fit_start on_fit_end on_sanity_check_start on_sanity_check_end
on_train_start on_train_end on_validation_start on_validation_end on_test_start
on_test_end on_predict_start on_predict_end on_train_epoch_start on_train_epoch_end
on_validation_epoch_start on_validation_epoch_end on_test_epoch_start on_test_epoch_end
on_predict_epoch_start on_predict_epoch_end on_train_batch_start on_train_batch_end
on_validation_batch_start on_validation_batch_end on_test_batch_start on_test_batch_end
on_predict_batch_start on_predict_batch_end on_exception state_dict load_state_dict
on_save_checkpoint on_load_checkpoint on_before_backward on_after_backward
on_before_optimizer_step on_before_zero_grad
on_batch_begin on_batch_end on_epoch_begin on_epoch_end on_train_batch_begin
on_test_batch_begin on_predict_batch_begin on_train_begin on_test_begin on_predict_begin
""".split()  # of Lightning and Keras


def trainer_with(**members):
    callback = type("Mine", (Callback,), members)()
    return make_small(None, optax.sgd(0.1), callbacks=[callback])


@pytest.mark.parametrize("name", sorted({*OTHERS, *ELSEWHERE}))
def test_each_hook_of_other_libraries_is_called_or_refused(name):
    assert (name in METHODS) != (name in ELSEWHERE)
    assert ELSEWHERE.get(name, name) in METHODS
    if name not in ELSEWHERE:
        return
    method = {name: lambda self, *_: None}
    if name.startswith("on_"):
        wanted = rf"`Mine.{name}` is a hook of another .*`{ELSEWHERE[name]}\(self"
        with pytest.raises(TypeError, match=wanted):
            trainer_with(**method)
    else:  # it may be a method of the user's
        wanted = rf"`Mine.{name}` is no hook.*`{ELSEWHERE[name]}\(self"
        with pytest.warns(UserWarning, match=wanted):
            trainer_with(**method)


@pytest.mark.parametrize("name, meant", [
    ("on_trian_epoch_end", "on_train_epoch_end"),
    ("on_train_epoch_ends", "on_train_epoch_end"),
    ("on_training_end", "on_fit_end"),
    ("onFitStart", "on_fit_start"),
    ("on_validate_end", "on_validation_end"),
    ("set_up", "setup"),
    ("tear_down", "teardown"),
    ("load_statedict", "load_state_dict"),
])  # fmt: skip
def test_a_misspelt_hook_warns(name, meant):
    with pytest.warns(UserWarning, match=rf"`Mine.{name}` is no hook.*`{meant}\("):
        trainer_with(**{name: lambda self, *_: None})


def test_other_methods_are_left_alone():
    names = (
        "on_new_best on_my_event on_epoch_report next_step load save plot on_click"
        " onset once on_save_error identify set_model set_params"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in names.split():
            trainer_with(**{name: lambda self, *_: None})
            trainer_with(**{name: property(lambda self: 1 / 0)})


@pytest.mark.parametrize("name, method", [
    ("on_train_epoch_end", lambda self, trainer, pl_module: 0),
    ("on_train_epoch_end", lambda self, epoch, logs: 0),
    ("on_train_epoch_end", lambda self, epoch, logs=None: 0),
    ("on_train_epoch_end", lambda self, metrics: 0),
    ("on_train_epoch_end", lambda self, trainer, epoch: 0),
    ("on_fit_start", lambda self, trainer, pl_module: 0),
    ("on_fit_start", lambda self: 0),
    ("setup", lambda self, trainer, pl_module, stage: 0),
    ("on_train_batch_end",
     lambda self, trainer, pl_module, outputs, batch, batch_idx: 0),
    ("on_train_batch_end", lambda self, batch, logs=None: 0),
    ("on_train_batch_end", lambda self, trainer, batch_idx, metrics: 0),
    ("on_train_batch_start", lambda self, trainer, batch_idx, batch: 0),
    ("on_test_end", lambda self, logs=None: 0),
    ("on_exception", lambda self, trainer, pl_module, exception: 0),
    ("on_save_checkpoint", lambda self, trainer, pl_module, checkpoint: 0),
    ("inside_step", lambda self, updates, grads, state: {}),
    ("load_state_dict", lambda self: 0),
    ("identity", lambda self: "mine"),
    ("on_fit_end", lambda self, trainer, *, verbose: 0),
    ("on_fit_end", staticmethod(lambda self, trainer: 0)),
    ("on_fit_end", None),
])  # fmt: skip
def test_a_hook_with_other_arguments_is_refused(name, method):
    with pytest.raises(TypeError, match=rf"`Mine.{name}` .*`def {name}\(self"):
        trainer_with(**{name: method})


def wraps(method, call):
    """A method that gets other arguments than its signature says."""
    return functools.wraps(method)(lambda self, *args: call(method, self, *args))


@pytest.mark.parametrize("method", [
    lambda self, trainer, metrics: 0,
    lambda self, t, m: 0,
    lambda self, trainer, logs: 0,
    lambda self, *args, **kwargs: 0,
    lambda self, trainer, *rest: 0,
    lambda self, trainer, metrics=None, verbose=True: 0,
    lambda self, trainer, metrics, *, verbose=True: 0,
    staticmethod(lambda trainer, metrics: 0),
    classmethod(lambda cls, trainer, metrics: 0),
    functools.partialmethod(lambda self, scale, trainer, metrics: 0, 2.0),
    wraps(lambda self, metrics: 0, lambda m, self, trainer, *args: m(self, *args)),
    wraps(lambda self, trainer, pl_module: 0, lambda method, *args: method(*args)),
    eqx.filter_jit(lambda self, trainer, metrics: 0),  # it could not trace a trainer
    print,
])  # fmt: skip
def test_a_hook_that_works_is_accepted(method):
    trainer_with(on_train_epoch_end=method).fit(batches(8))


@dataclasses.dataclass
class Fields(Callback):
    kept: list = dataclasses.field(default_factory=list)
    then: Callable | None = None

    def on_train_epoch_end(self, trainer, metrics):
        self.kept.append(metrics)


class Attribute(Callback):
    def __init__(self, function=None):
        self.kept = []
        keep = functools.partial(lambda kept, trainer, m: kept.append(m), self.kept)
        self.on_train_epoch_end = function or keep


@pytest.mark.parametrize("kind", [Fields, Attribute])
def test_hooks_of_dataclasses_and_of_instances_are_called(kind):
    callback = kind()
    make_small(None, optax.sgd(0.1), callbacks=[callback]).fit(batches(8))
    assert len(callback.kept) == 1


def test_hooks_of_instances_mixins_and_later_callbacks_are_checked():
    class Mixin:
        def on_epoch_end(self, epoch, logs):
            pass

    class Mine(Mixin, Callback):
        pass

    wrong = Attribute(lambda epoch, logs: None)
    with pytest.raises(
        TypeError, match=r"`Attribute.on_train_epoch_end` has `epoch` w"
    ):
        make_small(None, optax.sgd(0.1), callbacks=[wrong])
    trainer = make_small(None, optax.sgd(0.1))
    trainer.callbacks.append(Mine())
    with pytest.raises(TypeError, match=r"`Mine.on_epoch_end` .*`on_train_epoch_end\("):
        trainer.fit(batches(8))
