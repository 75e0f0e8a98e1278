"""The order of batches over fits that fail, resume or read nothing."""

import contextlib
import warnings

import equinox as eqx
import jax
import numpy as np
import pytest
from toys import Mlp, Recorder, rows

torch = pytest.importorskip("torch")

from torch.utils import data  # noqa: E402
from torch.utils.data import (  # noqa: E402
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
)

from jaxdp import Callback, Trainer  # noqa: E402

TENSORS = TensorDataset(torch.arange(23.0)[:, None], torch.arange(23))


def linear():
    return eqx.nn.Linear(1, 1, key=jax.random.key(0))


class Failing(Callback):
    def on_train_batch_end(self, trainer, metrics, batch_idx):
        raise RuntimeError("stop")


def of_row(model, x, y):
    return jax.vmap(model)(x)[:, 0]


def test_a_fit_that_fails_restores_the_global_generators():
    loader = DataLoader([(np.ones(1, np.float32), 0.0)] * 8, 4)
    trainer = Trainer(linear(), loss_fn=of_row, callbacks=[Failing()])
    before = np.random.get_state()[1].tolist()
    with pytest.raises(RuntimeError, match="stop") as kept:
        trainer.fit(loader)
    assert np.random.get_state()[1].tolist() == before
    assert kept.value.__traceback__ is not None  # its frames are alive


def test_a_fit_continues_the_epoch_of_a_custom_loop(tmp_path):
    rows = torch.arange(80.0).reshape(80, 1).repeat(1, 4)

    def loader():
        generator = torch.Generator().manual_seed(0)
        labels = torch.zeros(80, dtype=torch.int64)
        return DataLoader(
            TensorDataset(rows, labels), 8, shuffle=True, generator=generator
        )

    class Rows(Callback):
        def __init__(self):
            self.seen = []

        def on_train_batch_start(self, trainer, batch, batch_idx):
            self.seen += batch[0][:, 0].tolist()

    def make(callback):
        model = eqx.nn.Linear(4, 3, key=jax.random.key(0))
        return Trainer(model, loss="cross_entropy", callbacks=[callback])

    first, second, shuffled = Rows(), Rows(), loader()
    trainer = make(first)
    trainer.fit(shuffled)
    for number, _ in enumerate(trainer.steps(shuffled), 1):
        if number == 4:
            trainer.save(tmp_path / "14")
            break
    resumed = make(second)
    resumed.load(tmp_path / "14")
    resumed.fit(loader(), max_epochs=2)
    assert sorted(first.seen[80:] + second.seen) == rows[:, 0].tolist()
    trainer.fit(shuffled, max_epochs=2)
    assert first.seen[80:][32:] == second.seen


def test_an_epoch_that_failed_before_its_first_step_has_the_same_order():
    """The failed epoch has drawn from the loader's generator."""

    class Fails(Recorder):
        def __init__(self, at):
            super().__init__()
            self.at = at

        def on_train_epoch_start(self, trainer):
            if trainer.current_epoch == self.at:
                self.at = None
                raise OSError("once")

    def fit(at):
        recorder = Fails(at)
        loader = DataLoader(
            TensorDataset(torch.from_numpy(x), torch.from_numpy(y)),
            4,
            shuffle=True,
            generator=torch.Generator().manual_seed(3),
        )
        trainer = Trainer(
            Mlp(jax.random.key(0)), callbacks=[recorder], enable_progress_bar=False
        )
        with contextlib.suppress(OSError):
            trainer.fit(loader, max_epochs=2)
        trainer.fit(loader, max_epochs=3)
        return recorder.losses

    x, y = rows(24)
    assert fit(0) == fit(1) == fit(None)


@pytest.mark.slow_cases("nothing to do", "nested")
@pytest.mark.parametrize("way", ["nothing to do", "wrong argument", "setup", "nested"])
def test_a_fit_that_reads_nothing_keeps_the_position(tmp_path, way):
    """Only the state of the loader's generator decides the next order."""

    class Fails(Recorder):
        is_due = False

        def setup(self, trainer):
            if self.is_due:
                raise OSError("no disk")

        def on_train_epoch_end(self, trainer, metrics):
            if way == "nested" and trainer.current_epoch == 0:
                trainer.fit(loader_of(), max_epochs=5)

    def loader_of():
        data = TensorDataset(*map(torch.from_numpy, rows(24)))
        generator = torch.Generator().manual_seed(3)
        return DataLoader(data, 4, shuffle=True, generator=generator)

    def trainer_of(recorder):
        model = Mlp(jax.random.key(0))
        return Trainer(model, callbacks=[recorder], enable_progress_bar=False)

    def fit_in_vain(trainer, loader, recorder):
        options = {
            "wrong argument": {"max_epochs": 2, "check_val_every_n_epoch": 0},
            "setup": {"max_epochs": 3},
        }.get(way, {"max_epochs": 1})
        recorder.is_due = way == "setup"
        with warnings.catch_warnings(), contextlib.suppress(ValueError, OSError):
            warnings.simplefilter("ignore")
            trainer.fit(loader, **options)
        recorder.is_due = False

    whole, first, rest = Recorder(), Fails(), Fails()
    trainer_of(whole).fit(loader_of(), max_epochs=3)
    trainer, loader = trainer_of(first), loader_of()
    with contextlib.suppress(RuntimeError):
        trainer.fit(loader, max_epochs=1)
    fit_in_vain(trainer, loader, first)
    path = trainer.save(tmp_path / "saved")
    assert trainer.global_step == 6

    again, loader = trainer_of(rest), loader_of()
    again.load(path)
    fit_in_vain(again, loader, rest)
    again.fit(loader, max_epochs=3)
    assert whole.losses[6:] == rest.losses


def test_validation_draws_nothing_before_training():
    """Both read a dataset with a generator of its own."""

    class Noisy(Dataset):
        def __init__(self):
            self.rng, self.drawn = np.random.default_rng(0), []

        def __len__(self):
            return 24

        def __getitem__(self, index):
            self.drawn.append(index)
            return x[index] + self.rng.normal(size=4).astype(np.float32), y[index]

    (x, y), data = rows(24), Noisy()
    trainer = Trainer(Mlp(jax.random.key(0)), enable_progress_bar=False)
    trainer.fit(DataLoader(data, 8), DataLoader(data, 8))
    assert data.drawn == [*range(24)] * 2


class Counting:
    """An iterator of numbered batches."""

    number = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        return np.full((4, 4), self.number, np.float32), np.arange(4) % 3


class CountingDataset(Counting, IterableDataset):
    pass


@pytest.mark.parametrize("kind", [Counting, CountingDataset])
def test_an_iterator_continues_a_limited_epoch(kind):
    class Numbers(Callback):
        def on_train_batch_start(self, trainer, batch, batch_idx):
            numbers.append(int(batch[0][0, 0]))

    numbers, loader = [], kind()
    trainer = Trainer(
        Mlp(jax.random.key(0)), callbacks=[Numbers()], enable_progress_bar=False
    )
    trainer.fit(loader, max_steps=3)
    trainer.fit(loader, max_steps=6)
    assert numbers == [1, 2, 3, 4, 5, 6]


def test_an_invalid_batch_of_an_iterator_is_discarded():
    class Wrong(Counting):
        def __next__(self):
            x, y = super().__next__()
            return x, y + 100 * (self.number == 3)

    loader, recorder = Wrong(), Recorder()
    options = {"loss": "cross_entropy", "enable_progress_bar": False}
    trainer = Trainer(Mlp(jax.random.key(0)), callbacks=[recorder], **options)
    with pytest.raises(ValueError, match="labels must be 0 to"):
        trainer.fit(loader, max_steps=5)
    trainer.fit(loader, max_steps=5)
    assert (loader.number, len(recorder.losses), trainer.global_step) == (6, 5, 5)


SHUFFLED = {
    "in order": lambda: {},
    "in order, by a sampler": lambda: {"sampler": range(23)},
    "shuffle=True": lambda: {"shuffle": True},
    "a subset": lambda: {"sampler": data.SubsetRandomSampler(range(23))},
    "weights": lambda: {"sampler": data.WeightedRandomSampler([1.0] * 23, 23)},
    "a batch sampler": lambda: {
        "batch_size": 1,
        "batch_sampler": data.BatchSampler(data.RandomSampler(TENSORS), 8, False),
    },
    "a process's": lambda: {"sampler": data.DistributedSampler(TENSORS, 1, 0)},
}


@pytest.mark.parametrize("kind", SHUFFLED)
def test_predictions_of_a_shuffling_loader_are_warned_of(kind):
    trainer = Trainer(linear(), loss_fn=of_row, enable_progress_bar=False)
    loader = DataLoader(TENSORS, **{"batch_size": 8} | SHUFFLED[kind]())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = trainer.predict(loader)
        trainer.validate(loader)
    told = [str(w.message) for w in caught if "`loader` shuffles" in str(w.message)]
    assert len(told) == ("order" not in kind) and len(found) == 23
    in_order = jax.vmap(linear())(TENSORS.tensors[0].numpy())
    assert np.allclose(found, in_order) == ("order" in kind)
