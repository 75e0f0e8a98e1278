"""Hooks that nothing would call, or not as they are written: found at once."""

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

LIGHTNING = """
setup teardown on_fit_start on_fit_end on_sanity_check_start on_sanity_check_end
on_train_start on_train_end on_validation_start on_validation_end on_test_start
on_test_end on_predict_start on_predict_end on_train_epoch_start on_train_epoch_end
on_validation_epoch_start on_validation_epoch_end on_test_epoch_start on_test_epoch_end
on_predict_epoch_start on_predict_epoch_end on_train_batch_start on_train_batch_end
on_validation_batch_start on_validation_batch_end on_test_batch_start on_test_batch_end
on_predict_batch_start on_predict_batch_end on_exception state_dict load_state_dict
on_save_checkpoint on_load_checkpoint on_before_backward on_after_backward
on_before_optimizer_step on_before_zero_grad
""".split()

KERAS = """
on_batch_begin on_batch_end on_epoch_begin on_epoch_end on_train_batch_begin
on_train_batch_end on_test_batch_begin on_test_batch_end on_predict_batch_begin
on_predict_batch_end on_train_begin on_train_end on_test_begin on_test_end
on_predict_begin on_predict_end
""".split()


def trainer_with(**members):
    return make_small(
        None, optax.sgd(0.1), callbacks=[type("Mine", (Callback,), members)()]
    )


@pytest.mark.parametrize("name", sorted({*LIGHTNING, *KERAS, *ELSEWHERE}))
def test_each_hook_of_others_is_called_or_refused(name):
    assert (name in METHODS) != (name in ELSEWHERE)
    assert ELSEWHERE.get(name, name) in METHODS
    if name in ELSEWHERE and name.startswith("on_"):
        wanted = rf"`Mine.{name}` is a hook of another .*`{ELSEWHERE[name]}\(self"
        with pytest.raises(TypeError, match=wanted):
            trainer_with(**{name: lambda self, *_: None})
    elif name in ELSEWHERE:  # it may be a method of the user's
        wanted = rf"`Mine.{name}` is no hook.*`{ELSEWHERE[name]}\(self"
        with pytest.warns(UserWarning, match=wanted):
            trainer_with(**{name: lambda self, *_: None})


def test_it_says_what_to_use_instead():
    with pytest.raises(
        TypeError, match=r"`on_validation_end\(self, trainer, metrics\)`"
    ):
        trainer_with(on_validation_epoch_end=lambda self, trainer, pl_module: None)


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
def test_a_near_miss_warns(name, meant):
    with pytest.warns(UserWarning, match=rf"`Mine.{name}` is no hook.*`{meant}\("):
        trainer_with(**{name: lambda self, *_: None})


@pytest.mark.parametrize("name", [
    "on_new_best", "on_my_event", "on_epoch_report", "next_step", "load", "save",
    "plot", "on_click", "onset", "once", "on_save_error", "identify", "set_model",
    "set_params",
])  # fmt: skip
def test_other_methods_are_the_users_own(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer_with(**{name: lambda self, *_: None})
        trainer_with(**{name: property(lambda self: 1 / 0)})


WRONG = {
    "lightning_epoch": ("on_train_epoch_end", lambda self, trainer, pl_module: 0),
    "keras_epoch": ("on_train_epoch_end", lambda self, epoch, logs: 0),
    "keras_default": ("on_train_epoch_end", lambda self, epoch, logs=None: 0),
    "lightning_validation": ("on_validation_end", lambda self, trainer, pl_module: 0),
    "lightning_start": ("on_fit_start", lambda self, trainer, pl_module: 0),
    "lightning_setup": ("setup", lambda self, trainer, pl_module, stage: 0),
    "lightning_teardown": ("teardown", lambda self, trainer, pl_module, stage: 0),
    "lightning_batch": (
        "on_train_batch_end",
        lambda self, trainer, pl_module, outputs, batch, batch_idx: 0,
    ),
    "keras_batch": ("on_train_batch_end", lambda self, batch, logs=None: 0),
    "keras_test": ("on_test_end", lambda self, logs=None: 0),
    "keras_predict": ("on_predict_end", lambda self, logs=None: 0),
    "lightning_exception": (
        "on_exception", lambda self, trainer, pl_module, exception: 0,
    ),
    "lightning_save": (
        "on_save_checkpoint", lambda self, trainer, pl_module, checkpoint: 0,
    ),
    "swapped": ("on_train_batch_end", lambda self, trainer, batch_idx, metrics: 0),
    "swapped_batch": (
        "on_train_batch_start", lambda self, trainer, batch_idx, batch: 0,
    ),
    "swapped_in_step": ("inside_step", lambda self, updates, grads, state: {}),
    "no_trainer": ("on_train_epoch_end", lambda self, metrics: 0),
    "nothing": ("on_fit_start", lambda self: 0),
    "epoch": ("on_train_epoch_end", lambda self, trainer, epoch: 0),
    "required": ("on_fit_end", lambda self, trainer, *, verbose: 0),
    "state": ("load_state_dict", lambda self: 0),
    "identity": ("identity", lambda self: "mine"),
    "static": ("on_fit_end", staticmethod(lambda self, trainer: 0)),
    "value": ("on_fit_end", None),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_hook_with_other_arguments_is_refused(case):
    name, method = WRONG[case]
    with pytest.raises(TypeError, match=rf"`Mine.{name}` .*`def {name}\(self"):
        trainer_with(**{name: method})


def timed(method):
    @functools.wraps(method)
    def wrapped(*args, **kwargs):
        return method(*args, **kwargs)

    return wrapped


def without_trainer(method):
    @functools.wraps(method)
    def wrapped(self, trainer, *args):
        return method(self, *args)

    return wrapped


def with_rank(method):
    @functools.wraps(method)
    def wrapped(self, *args):
        return method(self, *args, 0)

    return wrapped


def as_in_lightning(method):
    @functools.wraps(method)
    def wrapped(self, trainer, metrics):
        return method(self, trainer, trainer.model)

    return wrapped


class Called:
    def __call__(self, trainer, metrics):
        pass


RIGHT = {
    "as_written": lambda self, trainer, metrics: 0,
    "short": lambda self, t, m: 0,
    "logs": lambda self, trainer, logs: 0,
    "any": lambda self, *args, **kwargs: 0,
    "rest": lambda self, trainer, *rest: 0,
    "ignored": lambda self, *_: 0,
    "default": lambda self, trainer, metrics=None, verbose=True: 0,
    "option": lambda self, trainer, metrics, *, verbose=True: 0,
    "static": staticmethod(lambda trainer, metrics: 0),
    "class": classmethod(lambda cls, trainer, metrics: 0),
    "partial": functools.partialmethod(lambda self, scale, trainer, metrics: 0, 2.0),
    "timed": timed(lambda self, trainer, metrics: 0),
    "without_trainer": without_trainer(lambda self, metrics: 0),
    "with_rank": with_rank(lambda self, trainer, metrics, rank: 0),
    "as_in_lightning": as_in_lightning(lambda self, trainer, pl_module: 0),
    "object": Called(),
    "builtin": print,
    "jitted": eqx.filter_jit(lambda self, trainer, metrics: 0),
}


@pytest.mark.parametrize("case", RIGHT)
def test_a_hook_that_works_is_taken(case):
    if case == "jitted":  # only whether it is taken; it could not trace a trainer
        trainer_with(on_train_epoch_end=RIGHT[case])
    else:
        trainer_with(on_train_epoch_end=RIGHT[case]).fit(batches(8))


def test_an_attribute_of_the_instance_is_a_hook():
    class Mine(Callback):
        def __init__(self, function):
            self.on_train_epoch_end = function

    seen = []
    good = Mine(functools.partial(lambda kept, trainer, m: kept.append(m), seen))
    make_small(None, optax.sgd(0.1), callbacks=[good]).fit(batches(8))
    assert len(seen) == 1
    with pytest.raises(TypeError, match=r"`Mine.on_train_epoch_end` has `epoch` where"):
        make_small(None, optax.sgd(0.1), callbacks=[Mine(lambda epoch, logs: None)])


def test_a_dataclass_is_a_callback():
    @dataclasses.dataclass
    class Mine(Callback):
        kept: list = dataclasses.field(default_factory=list)
        then: Callable | None = None

        def on_train_epoch_end(self, trainer, metrics):
            self.kept.append(metrics)

    mine = Mine()
    make_small(None, optax.sgd(0.1), callbacks=[mine]).fit(batches(8))
    assert len(mine.kept) == 1

    @dataclasses.dataclass(frozen=True)
    class Frozen(Callback):
        kept: tuple = ([],)

        def on_train_epoch_end(self, trainer, metrics):
            self.kept[0].append(metrics)

    frozen = Frozen()
    make_small(None, optax.sgd(0.1), callbacks=[frozen]).fit(batches(8))
    assert len(frozen.kept[0]) == 1


def test_hooks_of_a_mixin_and_of_what_is_added_later_are_checked():
    class Mixin:
        def on_epoch_end(self, epoch, logs):
            pass

    class Mine(Mixin, Callback):
        pass

    trainer = make_small(None, optax.sgd(0.1))
    trainer.callbacks.append(Mine())
    with pytest.raises(TypeError, match=r"`Mine.on_epoch_end` .*`on_train_epoch_end\("):
        trainer.fit(batches(8))
