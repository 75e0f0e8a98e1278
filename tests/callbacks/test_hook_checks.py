"""Hooks that are never called, or are called with other arguments: found at once."""

import dataclasses
import functools
import warnings
from collections.abc import Callable

import optax
import pytest
from toys import batches, make_small

from jaxdp import Callback


def make(**members):
    callback = type("Mine", (Callback,), members)()
    return make_small(None, optax.sgd(0.1), callbacks=[callback])


@pytest.mark.parametrize("name, meant", [
    ("on_trian_epoch_end", "on_train_epoch_end"),
    ("on_training_end", "on_fit_end"),
    ("onFitStart", "on_fit_start"),
    ("on_validate_end", "on_validation_end"),
    ("set_up", "setup"),
    ("load_statedict", "load_state_dict"),
])  # fmt: skip
def test_a_misspelt_hook_warns(name, meant):
    with pytest.warns(UserWarning, match=rf"`Mine.{name}` is no hook.*`{meant}\("):
        make(**{name: lambda self, *_: None})


def test_other_methods_are_left_alone():
    names = "on_new_best on_epoch_report next_step save plot on_click once set_model"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in names.split():
            make(**{name: lambda self, *_: None})
            make(**{name: property(lambda self: 1 / 0)})


@pytest.mark.parametrize("name, method", [
    ("on_train_epoch_end", lambda self, trainer, pl_module: 0),
    ("on_train_epoch_end", lambda self, epoch, logs=None: 0),
    ("on_train_epoch_end", lambda self, metrics: 0),
    ("on_train_epoch_end", lambda self, trainer, epoch: 0),
    ("on_fit_start", lambda self: 0),
    ("setup", lambda self, trainer, pl_module, stage: 0),
    ("on_train_batch_end",
     lambda self, trainer, pl_module, outputs, batch, batch_idx: 0),
    ("on_train_batch_end", lambda self, trainer, batch_idx, metrics: 0),
    ("on_exception", lambda self, trainer, pl_module, exception: 0),
    ("inside_step", lambda self, updates, grads, state: {}),
    ("load_state_dict", lambda self: 0),
    ("identity", lambda self: "mine"),
    ("on_fit_end", lambda self, trainer, *, verbose: 0),
    ("on_fit_end", staticmethod(lambda self, trainer: 0)),
    ("on_fit_end", None),
])  # fmt: skip
def test_a_hook_with_other_arguments_is_refused(name, method):
    with pytest.raises(TypeError, match=rf"`Mine.{name}` .*`def {name}\(self"):
        make(**{name: method})


@functools.wraps(lambda self, metrics: 0)
def wraps_another(self, trainer, metrics):
    pass


@pytest.mark.parametrize("method", [
    lambda self, t, m: 0,
    lambda self, trainer, logs: 0,
    lambda self, trainer, *rest: 0,
    lambda self, trainer, metrics, *, verbose=True: 0,
    staticmethod(lambda trainer, metrics: 0),
    functools.partialmethod(lambda self, scale, trainer, metrics: 0, 2.0),
    wraps_another,
    print,
    staticmethod(map),  # has no signature
])  # fmt: skip
def test_a_hook_that_works_is_accepted(method):
    make(on_train_epoch_end=method).fit(batches(8))


@dataclasses.dataclass
class Fields(Callback):
    kept: list = dataclasses.field(default_factory=list)
    then: Callable | None = None

    def on_train_epoch_end(self, trainer, metrics):
        self.kept.append(metrics)


class Attribute(Callback):
    def __init__(self, function=None):
        self.kept = []
        self.on_train_epoch_end = function or (lambda t, m: self.kept.append(m))


def test_hooks_of_dataclasses_instances_mixins_and_later_callbacks_are_checked():
    callbacks = Fields(), Attribute()
    trainer = make_small(None, optax.sgd(0.1), callbacks=callbacks)
    trainer.fit(batches(8))
    assert all(len(callback.kept) == 1 for callback in callbacks)
    wrong = Attribute(lambda epoch, logs: None)
    message = r"`Attribute.on_train_epoch_end` has `epoch` w"
    with pytest.raises(TypeError, match=message):
        make_small(None, optax.sgd(0.1), callbacks=[wrong])

    class Mixin:
        def on_epoch_end(self, epoch, logs):
            pass

    trainer.callbacks = [type("Mine", (Mixin, Callback), {})()]
    with pytest.raises(TypeError, match=r"`Mine.on_epoch_end` .*`on_train_epoch_end\("):
        trainer.fit(batches(8))
