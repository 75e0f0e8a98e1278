"""The order of batches over fits that fail, resume or read nothing."""

import contextlib
import warnings

import numpy as np
import pytest
from test_twins import Draws, Tells
from toys import On, Recorder, fail_with, rows
from toys import on_one_device as make

from jaxdp import Arrays

torch = pytest.importorskip("torch")

from torch.utils import data  # noqa: E402
from torch.utils.data import (  # noqa: E402
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
)

TENSORS = TensorDataset(*map(torch.from_numpy, rows(29)))


def seeded(count):
    """A shuffling loader of eight rows a batch, or of four."""
    data = TensorDataset(*map(torch.from_numpy, rows(count)))
    size, generator = 8 if count == 80 else 4, torch.Generator().manual_seed(3)
    return DataLoader(data, size, shuffle=True, generator=generator)


def test_a_fit_that_fails_restores_the_global_generators():
    loader = DataLoader([*zip(*rows(8), strict=True)], 4)
    trainer = make(On(on_train_batch_end=fail_with(RuntimeError("stop"))))
    before = np.random.get_state()[1].tolist()
    with pytest.raises(RuntimeError, match="stop") as kept:
        trainer.fit(loader)
    assert np.random.get_state()[1].tolist() == before
    assert kept.value.__traceback__ is not None  # its frames are alive


def first_values(found):
    """A callback that appends the first values of the rows that are trained on."""

    def see(trainer, batch, batch_idx):
        found.extend(batch[0][:, 0].tolist())

    return On(on_train_batch_start=see)


def test_a_fit_continues_the_epoch_of_a_custom_loop(tmp_path):
    first, second, shuffled = [], [], seeded(80)
    trainer, resumed = make(first_values(first)), make(first_values(second))
    trainer.fit(shuffled)
    for number, _ in enumerate(trainer.steps(shuffled), 1):
        if number == 4:
            resumed.load(trainer.save(tmp_path / "14"))
            break
    resumed.fit(seeded(80), max_epochs=2)
    assert sorted(first[80:] + second) == sorted(rows(80)[0][:, 0].tolist())
    trainer.fit(shuffled, max_epochs=2)
    assert first[80:][32:] == second


def test_an_epoch_that_failed_before_its_first_step_has_the_same_order():
    """The failed epoch has drawn from the loader's generator."""

    def fit(at):
        def fail(trainer):
            nonlocal at
            if trainer.current_epoch == at:
                at = None
                raise OSError("once")

        loader = seeded(24)
        trainer = make(recorder := Recorder(), On(on_train_epoch_start=fail))
        with contextlib.suppress(OSError):
            trainer.fit(loader, max_epochs=2)
        trainer.fit(loader, max_epochs=3)
        return recorder.losses

    assert fit(0) == fit(1) == fit(None)


@pytest.mark.slow_cases("options0")
@pytest.mark.parametrize("options", [
    {"max_epochs": 1}, {"max_epochs": 2, "check_val_every_n_epoch": 0},
    {"max_epochs": 3},  # fails in `setup`
])  # fmt: skip
def test_a_fit_that_reads_nothing_keeps_the_position(tmp_path, options):
    """Only the state of the loader's generator decides the next order."""

    class Fails(Recorder):
        is_due = False

        def setup(self, trainer):
            if self.is_due:
                raise OSError("no disk")

    def fit_in_vain(trainer, loader, recorder):
        recorder.is_due = options == {"max_epochs": 3}
        with warnings.catch_warnings(), contextlib.suppress(ValueError, OSError):
            warnings.simplefilter("ignore")
            trainer.fit(loader, **options)
        recorder.is_due = False

    whole, first, rest = Recorder(), Fails(), Fails()
    make(whole).fit(seeded(24), max_epochs=3)
    trainer, loader = make(first), seeded(24)
    trainer.fit(loader, max_epochs=1)
    fit_in_vain(trainer, loader, first)
    assert trainer.global_step == 6

    again, new = make(rest), seeded(24)
    again.load(trainer.save(tmp_path / "saved"))
    fit_in_vain(again, new, rest)
    again.fit(new, max_epochs=3)
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
    make().fit(DataLoader(data, 8), DataLoader(data, 8))
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
    numbers, loader = [], kind()
    trainer = make(first_values(numbers))
    for steps in (3, 6):
        trainer.fit(loader, max_steps=steps)
    assert numbers == [n for n in range(1, 7) for _ in range(4)]


def test_an_invalid_batch_of_an_iterator_is_discarded():
    class Wrong(Counting):
        def __next__(self):
            x, y = super().__next__()
            return x, y + 100 * (self.number == 3)

    loader, recorder = Wrong(), Recorder()
    trainer = make(recorder)
    with pytest.raises(ValueError, match="labels must be 0 to"):
        trainer.fit(loader, max_steps=5)
    trainer.fit(loader, max_steps=5)
    assert (loader.number, len(recorder.losses), trainer.global_step) == (6, 5, 5)


@pytest.mark.parametrize("options, shuffles", [
    ({}, False), ({"sampler": range(29)}, False), ({"shuffle": True}, True),
    ({"batch_size": 1, "batch_sampler": data.BatchSampler(
        data.RandomSampler(TENSORS), 8, False)}, True),
    ({"sampler": data.DistributedSampler(TENSORS, 1, 0)}, True),
])  # fmt: skip
def test_predictions_of_a_shuffling_loader_are_warned_of(options, shuffles):
    trainer, loader = make(), DataLoader(TENSORS, **{"batch_size": 8} | options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = trainer.predict(loader)
        trainer.validate(loader)
    told = [str(w.message) for w in caught if "`loader` shuffles" in str(w.message)]
    assert len(told) == shuffles and len(found) == 29
    in_order = trainer.predict([TENSORS.tensors[0].numpy()])
    assert np.allclose(found, in_order) != shuffles


class Drawn:
    """A loader of one's own that draws from NumPy's global generator."""

    def __iter__(self):
        x, y = rows(8)
        for _ in range(3):
            yield x + np.random.rand(*x.shape).astype(x.dtype), y  # noqa: NPY002


@pytest.mark.parametrize("kind", [Drawn, lambda: iter(Drawn())])
def test_a_loader_of_ones_own_draws_as_the_user_has_seeded(kind):
    def train(seed):
        np.random.seed(seed)  # noqa: NPY002
        recorder = Recorder()
        make(recorder).fit(kind())
        return [*recorder.losses, np.random.rand()]  # noqa: NPY002

    first = train(0)
    assert train(0) == first
    assert not set(train(1)) & set(first)


@pytest.mark.parametrize("loader", [
    DataLoader(TENSORS, 8, drop_last=True),
    DataLoader(TENSORS, batch_sampler=data.BatchSampler(range(29), 8, True)),
    Arrays(TENSORS.tensors[0], batch_size=8, shuffle=False, drop_last=True),
])  # fmt: skip
def test_predictions_without_a_last_short_batch_are_warned_of(loader):
    with pytest.warns(UserWarning, match="drop_last=True: the rows of a last"):
        assert len(make().predict(loader)) == 24


def test_a_save_inside_of_a_validation_restarts_it(tmp_path):
    paths = []

    def save(trainer, batch_idx):
        if batch_idx == 1 and trainer.current_epoch == 1 and not paths:
            paths.append(trainer.save(tmp_path / "inside"))

    def fit(trainer, **options):
        options |= {"max_epochs": 3, "limit_val_batches": 3}
        return trainer.fit(DataLoader(TENSORS, 6), seeded(24), **options).state_dict()

    whole = fit(make(On(on_validation_batch_end=save)))
    assert fit(make(), ckpt_path=paths[0]) == whole


class Counts:
    """Counts its epochs, and has no state."""

    epochs = 0

    def __len__(self):
        return 29

    def __iter__(self):
        self.epochs += 1
        return iter(np.random.default_rng(self.epochs).permutation(29).tolist())


class Seeded(Counts):
    """The number of an epoch decides its order."""

    def set_epoch(self, epoch):
        self.epochs = epoch


@pytest.mark.parametrize("sampler", [Counts, Seeded, Tells, lambda: Draws(torch)])
def test_a_sampler_without_a_saved_state_is_reported(caplog, sampler):
    loader = DataLoader(TENSORS, 6, sampler=sampler())
    make().validate(loader)
    assert "no checkpoint contains" not in caplog.text
    for _ in range(2):
        make().fit(loader, max_steps=1)
    texts = [r.getMessage() for r in caplog.records if "resumed run takes" in r.msg]
    assert len(texts) == (sampler is Counts)
    for part in ("`train_loader`", "Counts", "state_dict", "torch.Gen", "set_epoch"):
        assert not texts or part in texts[0]
