"""Loaders that look at the trainer while they are read: what they see is up to date."""

import functools
import itertools
import queue
import threading

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset  # noqa: E402
from toys import quiet, rows  # noqa: E402

from jaxdp import Callback, Sharded, SingleDevice  # noqa: E402

STEPS, SIZE = 10, 8
X, Y = rows(STEPS * SIZE)


def bias(model):
    return float(np.asarray(model.layers[-1].bias)[0])


LOOKS = {
    "model": lambda trainer: bias(trainer.model),
    "state": lambda trainer: bias(trainer.state.params),
    "hyperparams": lambda trainer: (
        bias(trainer.model),
        float(trainer.hyperparams["learning_rate"]),
    )[0],
    "predict": lambda trainer: float(trainer.predict([np.zeros_like(X[:8])])[0, 0]),
    "validate": lambda trainer: trainer.validate([(X[:8], Y[:8])])["val_loss"],
    "inference_model": lambda trainer: float(trainer.inference_model()(X[0])[0]),
    "callback_metrics": lambda trainer: trainer.callback_metrics.get("loss", -1.0),
    "global_step": lambda trainer: float(trainer.global_step),
}


class EveryStep(Callback):
    """Looks before each step, from a hook."""

    def __init__(self, look):
        self.look, self.seen = look, []

    def on_train_batch_start(self, trainer, batch, batch_idx):
        self.seen.append(self.look(trainer))


def batches(look):
    for start in range(0, len(X), SIZE):
        look()
        yield X[start : start + SIZE], Y[start : start + SIZE]


class Rows(Dataset):
    def __init__(self, look):
        self.look = look

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        if index % SIZE == 0:
            self.look()
        return X[index], Y[index]


def loader_that_looks(place, look):
    if place == "generator":
        return batches(look)
    if place == "__getitem__":
        return DataLoader(Rows(look), SIZE)

    def collate(items):
        look()
        return tuple(map(np.stack, zip(*items, strict=True)))

    return DataLoader(Rows(lambda: None), SIZE, collate_fn=collate)


def trainer_of(strategy, *callbacks, **options):
    return quiet(
        eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0)),
        optax.inject_hyperparams(optax.sgd)(0.1),
        loss="cross_entropy",
        strategy=strategy(),
        callbacks=callbacks,
        **options,
    )


@functools.cache
def expected(strategy, what):
    callback = EveryStep(LOOKS[what])
    trainer_of(strategy, callback).fit(batches(lambda: None), max_steps=STEPS)
    assert len(set(callback.seen)) == STEPS
    return callback.seen


PLACES = [
    *itertools.product([SingleDevice], ["generator", "__getitem__", "collate_fn"]),
    (Sharded, "generator"),
]


@pytest.mark.parametrize("steps", [4, "auto"])
@pytest.mark.parametrize(
    "strategy, place, what",
    [
        pytest.param(*place, what, marks=[pytest.mark.slow] * (0 < i and 0 < j))
        for i, place in enumerate(PLACES)
        for j, what in enumerate(LOOKS)
    ],
)
def test_what_a_loader_sees_of_the_trainer_is_up_to_date(strategy, what, place, steps):
    seen = []
    trainer = trainer_of(strategy, steps_per_execution=steps)
    loader = loader_that_looks(place, lambda: seen.append(LOOKS[what](trainer)))
    trainer.fit(loader, max_steps=STEPS)
    assert seen[:STEPS] == expected(strategy, what)


@pytest.mark.parametrize("steps", [1, 4, "auto"])
@pytest.mark.parametrize("what", ["model", "predict", "validate"])
def test_a_thread_that_reads_ahead_sees_whole_models_of_late(what, steps):
    seen, ready = [], queue.Queue(1)
    trainer = trainer_of(SingleDevice, steps_per_execution=steps)

    def read():
        try:
            for batch in batches(lambda: seen.append(LOOKS[what](trainer))):
                ready.put(batch)
        except BaseException as error:
            ready.put(error)
        ready.put(None)

    def loader():
        threading.Thread(target=read, daemon=True).start()
        while (batch := ready.get()) is not None:
            if isinstance(batch, BaseException):
                raise batch
            yield batch

    trainer.fit(loader(), max_epochs=1)
    models = expected(SingleDevice, what)
    ages = [place - models.index(each) for place, each in enumerate(seen)]
    assert trainer.global_step == STEPS
    assert max(ages) <= 3  # one in the queue, one to be put there, one in training


def test_a_loader_that_starts_to_look_late_is_told_how_old_its_first_look_was():
    trainer = trainer_of(SingleDevice, steps_per_execution=4)
    seen = []

    def loader():
        for number, batch in enumerate(batches(lambda: None)):
            if number >= 6:
                seen.append(trainer.global_step)
            yield batch

    with pytest.warns(UserWarning, match="2 of the steps before were still to be"):
        trainer.fit(loader(), max_epochs=1)
    assert seen == [4, 7, 8, 9]


def test_a_loader_that_looks_is_said_once_and_one_that_does_not_is_read_ahead(caplog):
    trainer = trainer_of(SingleDevice, steps_per_execution=4)
    trainer.fit(batches(lambda: trainer.model), max_epochs=1)
    trainer.fit(batches(lambda: trainer.model), max_epochs=2)
    said = [text for text in caplog.messages if "`train_loader` uses" in text]
    assert len(said) == 1 and "`trainer.model`" in said[0]

    ahead = []
    counted = batches(lambda: ahead.append(trainer.run.progress.global_step))
    trainer.fit(counted, max_epochs=3)
    assert [each - 2 * STEPS for each in ahead] == [0, 0, 0, 0, 0, 4, 4, 4, 4, 8]
