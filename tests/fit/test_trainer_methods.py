"""Tests of the names that users of Lightning and Keras type first."""

import copy
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import (  # noqa: E402
    DataLoader,
    SubsetRandomSampler,
    TensorDataset,
)
from toys import (  # noqa: E402
    At,
    On,
    batches,
    linear_trainer,
    make_small,
    mlp_trainer,
    rows,
    stop,
)

from jaxdp import FSDP, Arrays, Sharded, Trainer  # noqa: E402
from jaxdp.callbacks import EarlyStopping, ModelCheckpoint  # noqa: E402


@pytest.mark.parametrize("minimum, steps, per_execution", [
    ({}, 2, 1),
    ({"min_steps": 1}, 2, 1),
    ({"min_steps": 5}, 5, 1),
    ({"min_steps": 5}, 5, 4),  # it asks after the dispatch
    ({"min_epochs": 1}, 4, 1),
    ({"min_epochs": 1}, 4, 4),
    ({"min_epochs": 2}, 8, 1),
    ({"min_epochs": 1, "min_steps": 6}, 6, 1),
    ({"min_epochs": 2, "min_steps": 6}, 8, 1),
    ({"min_epochs": 0, "min_steps": 0}, 2, 1),
])  # fmt: skip
def test_what_ends_a_fit_early_waits_for_the_minimum(minimum, steps, per_execution):
    trainer = mlp_trainer(At(2, stop), steps_per_execution=per_execution)
    trainer.fit(batches(8, 8, 8, 8), max_epochs=4, **minimum)
    assert trainer.global_step == steps


def test_early_stopping_and_max_time_wait_for_the_minimum(caplog):
    stopping = EarlyStopping("loss", patience=0, min_delta=100.0)
    trainer = mlp_trainer(stopping)
    trainer.fit(batches(8, 8), max_epochs=9, min_epochs=4)
    assert trainer.current_epoch == 4
    assert sum("EarlyStopping" in line for line in caplog.messages) == 1
    trainer = mlp_trainer()
    trainer.fit(batches(8, 8), max_epochs=9, max_time=0, min_steps=5)
    assert trainer.global_step == 5
    assert "`max_time` is over: the fit ends after step 5" in caplog.text


def test_two_checkpoints_of_one_folder_are_told_apart(tmp_path):
    trainer = mlp_trainer(ModelCheckpoint(tmp_path), ModelCheckpoint(tmp_path))
    with pytest.raises(RuntimeError, match="another ModelCheckpoint.* a folder of its"):
        trainer.fit(batches(8, 8))


def test_callback_metrics_are_the_last_values_of_everything_logged():
    seen = {}

    def after_step(trainer, metrics, batch_idx):
        assert trainer.callback_metrics["loss"] == float(metrics["loss"])
        trainer.log("own", batch_idx)
        seen[trainer.global_step] = trainer.callback_metrics

    def after_validation(trainer, metrics):
        trainer.log("val_own", 7.0)
        found = trainer.callback_metrics
        assert {k: found[k] for k in metrics} == metrics
        assert found["val_own"] == 7.0

    def after_epoch(trainer, metrics):
        assert trainer.callback_metrics == {**metrics, "val_own": 7.0}

    looks = {"on_train_batch_end": after_step, "on_validation_end": after_validation}
    trainer = mlp_trainer(On(**looks, on_train_epoch_end=after_epoch))
    assert trainer.callback_metrics == {}
    trainer.fit(batches(8, 8), batches(8), max_epochs=2)
    last = {name: values[-1] for name, values in trainer.history.items()}
    assert trainer.callback_metrics == last
    assert all(type(value) is float for value in last.values())
    assert set(seen[1]) == {"loss", "accuracy", "own"}
    assert set(seen[3]) == {*last}  # those of the epoch before, and of the step
    assert seen[3]["val_loss"] == trainer.history["val_loss"][0]

    found = trainer.test(batches(8))
    assert trainer.callback_metrics == {**last, **found}
    for metrics in trainer.steps(batches(8)):
        assert trainer.callback_metrics["loss"] == float(metrics["loss"])


@pytest.mark.parametrize("batches_each, accumulate", [(1, 1), (2, 2), (5, 2)])
def test_num_training_batches_counts_batches(batches_each, accumulate):
    data = batches(*[8] * batches_each)
    trainer = mlp_trainer(accumulate_grad_batches=accumulate)
    assert trainer.num_training_batches is None
    trainer.fit(data)
    assert trainer.num_training_batches == batches_each
    assert trainer.record.limits.steps_per_epoch == -(-batches_each // accumulate)
    trainer.fit(iter(data), max_epochs=2)
    assert trainer.num_training_batches is None


def loaders():
    """Loaders of the same 32 rows, all of which shuffle if they can."""
    x, y = map(torch.as_tensor, rows(32))
    y = y.long()
    both = TensorDataset(x, y)
    more = TensorDataset(torch.cat([x + 9, x]), torch.cat([y, y]))
    # Copies: torch moves the tensors that it sends to workers, and frees their memory.
    arrays = x.numpy().copy(), y.numpy().copy()
    yield "list", [tuple(a[i : i + 8] for a in arrays) for i in (0, 8, 16, 24)]
    yield "shuffle", DataLoader(both, 8, shuffle=True)
    yield "workers", DataLoader(both, 8, shuffle=True, num_workers=1)
    yield "arrays", Arrays(x, y, batch_size=8)
    yield "subset", DataLoader(more, 8, sampler=SubsetRandomSampler(range(32, 64)))


@pytest.mark.slow_but(
    "2-16-list", "0.25-8-shuffle", "1.0-32-arrays", "2-16-workers", "2-16-subset"
)
@pytest.mark.parametrize("loader", [pytest.param(v, id=k) for k, v in loaders()])
@pytest.mark.parametrize("share, count", [(2, 16), (0.25, 8), (1.0, 32)])
def test_overfitting_takes_the_first_batches_of_both_loaders(loader, share, count):
    x, y = rows(32)
    taken = []

    look = On(on_train_batch_start=lambda trainer, batch, _: taken.append(batch[0]))
    trainer = linear_trainer(look)
    trainer.fit(loader, loader, max_epochs=2, overfit_batches=share)
    first, second = np.split(np.concatenate(taken), 2)
    np.testing.assert_array_equal(first, second)
    numbers = [int(np.flatnonzero((x == row).all(axis=1))[0]) for row in first]
    assert len({*numbers}) == count
    if not isinstance(loader, DataLoader):  # those shuffle
        assert numbers == [*range(count)]
    mean = trainer.validate([(x[numbers], y[numbers])])["val_loss"]
    np.testing.assert_allclose(trainer.history["val_loss"][-1], mean, rtol=1e-6)


@pytest.mark.parametrize("method, argument, value, where", [
    ("Trainer", "max_epochs", 3, r"it belongs to `fit`: fit\(..., max_epochs=...\)"),
    ("Trainer", "accelerator", "gpu", "JAX_PLATFORMS"),
    ("Trainer", "devices", 2, r"strategy=Sharded\(2\)"),
    ("Trainer", "enable_checkpointing", False, "ModelCheckpoint"),
    ("Trainer", "epochs", 3, "it is called `max_epochs`"),
    ("Trainer", "max_epoch", 3, "`max_epochs`"),
    ("Trainer", "banana", 3, ""),
    ("fit", "callbacks", [], r"belongs to `Trainer`: Trainer\(..., callbacks=...\)"),
    ("fit", "epochs", 3, "`max_epochs`"),
    ("fit", "max_epoch", 3, "`max_epochs`"),
    ("fit", "batch_size", 32, r"jaxdp.Arrays\(x, y, batch_size=32\)"),
    ("fit", "validation_data", (1, 2), "`val_loader`"),
])  # fmt: skip
def test_unknown_arguments_are_told_where_they_belong(method, argument, value, where):
    match = f"`{argument}` is no argument of `{method}`.*{where}"
    with pytest.raises(TypeError, match=match):
        if method == "fit":
            make_small().fit(batches(8), **{argument: value})
        make_small(**{argument: value})


def test_all_unknown_arguments_are_told_of_at_once():
    with pytest.raises(TypeError) as told:
        Trainer(
            max_epochs=3, accelerator="gpu", batch_siez=3, strategy="ddp", precision=64
        )
    lines = str(told.value).splitlines()
    names = "max_epochs accelerator batch_siez Trainer strategy precision".split()
    assert all(line.startswith(f"`{n}`") for n, line in zip(names, lines, strict=True))
    assert "'model'" in lines[3] and lines[4].endswith("for 'ddp' write Sharded().")
    with pytest.raises(TypeError, match="`Trainer`: missing a required.*: 'model'"):
        Trainer(seed=3)
    match = "`Trainer`: too many positional.*by name.*loss_fn"
    with pytest.raises(TypeError, match=match):
        Trainer(None, None, lambda: 0)


@pytest.mark.parametrize("name, instead", [
    ("stop_training", "trainer.should_stop"),
    ("evaluate", "trainer.validate"),
    ("shoud_stop", "trainer.should_stop"),
    ("global_steps", "trainer.global_step"),
    ("callback_metric", "trainer.callback_metrics"),
    ("learning_rate", r".* to set one trainer.set_hyperparams\(learning_rate=...\)"),
])  # fmt: skip
def test_attributes_by_other_names_are_refused(name, instead):
    trainer = make_small()
    for use in (lambda: getattr(trainer, name), lambda: setattr(trainer, name, True)):
        with pytest.raises(
            AttributeError, match=rf"no attribute '{name}'; use {instead}"
        ):
            use()


def test_own_attributes_may_be_set():
    trainer = make_small()
    trainer.my_steps = 3
    assert trainer.my_steps == 3
    with pytest.raises(AttributeError, match="object has no attribute 'yours'"):
        trainer.yours  # noqa: B018
    assert not hasattr(trainer, "__deepcopy__")


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_trainers_are_made_where_they_are_needed(take):
    with pytest.raises(TypeError, match="joblib or Ray, send settings to a function"):
        take(make_small())


@pytest.mark.parametrize("strategy", [Sharded(), FSDP()], ids=repr)
def test_strategies_are_copied_and_not_pickled(strategy):
    for take in (copy.copy, copy.deepcopy):
        copied = take(strategy)
        assert copied is not strategy and vars(copied) == vars(strategy)
    with pytest.raises(TypeError, match="the name of its class and its arguments"):
        pickle.dumps(strategy)
