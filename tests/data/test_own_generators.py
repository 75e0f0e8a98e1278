"""Generators that samplers and datasets have of their own: the same rows on resume."""

import functools
import random
import types
import warnings

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from toys import Recorder, rows
from twins import check_twins

torch = pytest.importorskip("torch")

from generator_kinds import KINDS, draw  # noqa: E402
from torch.utils.data import (  # noqa: E402
    DataLoader,
    Dataset,
    Sampler,
    TensorDataset,
)

from jaxdp import SingleDevice, Trainer  # noqa: E402
from jaxdp.data.own_generators import find  # noqa: E402
from jaxdp.data.random_states import states_of  # noqa: E402
from jaxdp.data.source import Position, open_loader  # noqa: E402

X, Y = rows(24)
DATA = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))


class ClassBalanced(Sampler):
    """As many rows of every class, each class with a generator in a dict of lists."""

    def __init__(self, kind, count=16):
        self.rows = {c: [i for i, y in enumerate(Y) if y == c] for c in range(3)}
        self.drawing = {"of class": [KINDS[kind]() for _ in self.rows]}
        self.count = count

    def __len__(self):
        return self.count

    def __iter__(self):
        for number in range(self.count):
            of_class = self.rows[number % 3]
            generator = self.drawing["of class"][number % 3]
            yield of_class[draw(generator, len(of_class))]


class Lists(ClassBalanced):
    """The same as a batch sampler."""

    def __iter__(self):
        indices = list(super().__iter__())
        yield from (indices[start : start + 4] for start in range(0, self.count, 4))

    def __len__(self):
        return self.count // 4


class Noisy(Dataset):
    """Draws in `__getitem__`."""

    def __init__(self, generator):
        self.generator = generator

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index] + np.float32(draw(self.generator, 1000) / 1000), Y[index]


def make(callbacks=(), **options):
    return Trainer(
        eqx.nn.Linear(4, 3, key=jax.random.key(0)),
        optax.sgd(1e-1),
        loss="cross_entropy",
        strategy=SingleDevice(),
        callbacks=callbacks,
        enable_progress_bar=False,
        **options,
    )


def check_runs(folder, loaders, which, **settings):
    """Runs go on from boundaries of one as it went on itself."""

    def fit(trainer, **more):
        train, val = loaders()
        trainer.fit(train, val, **{"max_epochs": 2} | settings | more)

    check_twins(folder, make, fit, which)


# The boundaries of two epochs of 4 steps: 2 is inside the first epoch, 5 after it, 7
# inside the second.
@pytest.mark.parametrize("kind", KINDS)
def test_a_sampler_goes_on_with_generators_of_every_kind(tmp_path, kind):
    def loaders():
        return DataLoader(DATA, 4, sampler=ClassBalanced(kind)), None

    check_runs(tmp_path, loaders, (2, 5, 7))


def test_workers_fetch_what_such_a_batch_sampler_says(tmp_path):
    def loaders():
        lists = Lists("random.Random")
        return DataLoader(DATA, batch_sampler=lists, num_workers=2), None

    check_runs(tmp_path, loaders, (5, 7))


@pytest.mark.parametrize("kind", ["np.random.Generator", "random.Random"])
def test_a_dataset_goes_on_with_a_generator_of_its_own(tmp_path, kind):
    def loaders():
        return DataLoader(Noisy(KINDS[kind]()), 6, shuffle=True), None

    check_runs(tmp_path, loaders, (2, 5, 7))


def test_a_table_with_a_generator_is_not_trained_on_twice(tmp_path):
    def loaders():
        data = TensorDataset(*DATA.tensors)
        data.generator = np.random.default_rng(0)  # which no row is drawn from
        return DataLoader(data, 6), None

    check_runs(tmp_path, loaders, (3, 7))


def test_sampler_and_dataset_may_share_a_generator(tmp_path):
    def loaders():
        data = Noisy(KINDS["np.random.Generator"]())
        sampler = ClassBalanced("SFC64")
        sampler.drawing["of class"] = [data.generator] * 3
        return DataLoader(data, 4, sampler=sampler), None

    check_runs(tmp_path, loaders, (2, 5, 7))


def test_a_collate_fn_may_draw(tmp_path):
    def collate(items, generator):
        x, y = torch.utils.data.default_collate(items)
        return x + draw(generator, 5), y

    def loaders():
        drawing = functools.partial(collate, generator=np.random.default_rng(0))
        return DataLoader(DATA, 6, collate_fn=drawing), None

    check_runs(tmp_path, loaders, (2, 5, 7))


class Batches:
    """Any iterable: no torch."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __iter__(self):
        order = self.generator.permutation(24)
        for start in range(0, 24, 6):
            yield X[order[start : start + 6]], Y[order[start : start + 6]]

    def __len__(self):
        return 4


def test_any_iterable_goes_on_with_a_generator_of_its_own(tmp_path):
    check_runs(tmp_path, lambda: (Batches(), Batches()), (2, 5, 7))


@pytest.mark.parametrize("shared", [False, True])
def test_a_validation_goes_on_with_a_generator_of_its_own(tmp_path, shared):
    """The loader's, the dataset's, and one that training draws from, too."""

    def loaders():
        data, others = (Noisy(np.random.default_rng(seed)) for seed in (0, 1))
        generator = torch.Generator().manual_seed(3)
        val = DataLoader(
            data if shared else others, 6, shuffle=True, generator=generator
        )
        return DataLoader(data, 6, shuffle=True), val

    check_runs(tmp_path, loaders, range(1, 10), limit_val_batches=2)


def test_a_save_inside_of_a_validation_has_it_begin_again(tmp_path):
    class Saves(Recorder):
        path = None

        def on_validation_batch_end(self, trainer, batch_idx):
            if batch_idx == 1 and trainer.current_epoch == 1 and self.path is None:
                self.path = trainer.save(tmp_path / "inside")

    def loaders():
        generator = torch.Generator().manual_seed(3)
        val = DataLoader(Noisy(np.random.default_rng(0)), 6, True, generator=generator)
        return DataLoader(DATA, 6), val

    saves = Saves()
    whole, again = make([saves]), make()
    whole.fit(*loaders(), max_epochs=3, limit_val_batches=3)
    again.fit(*loaders(), max_epochs=3, limit_val_batches=3, ckpt_path=saves.path)
    assert again.history.state_dict() == whole.history.state_dict()


class Tells(Sampler):
    """Counts its epochs, and tells."""

    def __init__(self):
        self.epochs = 0

    def __len__(self):
        return 24

    def __iter__(self):
        self.epochs += 1
        return iter(np.random.default_rng(self.epochs).permutation(24).tolist())

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]


def test_a_sampler_that_tells_its_state_is_asked(tmp_path):
    check_runs(
        tmp_path, lambda: (DataLoader(DATA, 6, sampler=Tells()), None), (2, 5, 7)
    )


class Counts(Sampler):
    """Counts its epochs, and tells nobody."""

    __iter__, __len__, __init__ = Tells.__iter__, Tells.__len__, Tells.__init__


class Same(Sampler):
    """The same order in every epoch."""

    def __init__(self):
        pass

    def __len__(self):
        return 24

    def __iter__(self):
        return iter(range(23, -1, -1))


def resumed_after(steps, tmp_path, sampler, until=12):
    """What a run that was saved after so many steps warns of, and one that was not."""
    first, again = make(), make()
    first.fit(DataLoader(DATA, 6, sampler=sampler()), max_steps=steps, max_epochs=9)
    path = first.save(tmp_path / str(steps))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        loader = DataLoader(DATA, 6, sampler=sampler())
        again.fit(loader, max_steps=until, max_epochs=9, ckpt_path=path)
    return [str(each.message) for each in found]


@pytest.mark.parametrize("steps", [6, 10])
def test_other_rows_after_a_resume_are_noticed(tmp_path, steps):
    (message,) = resumed_after(steps, tmp_path, Counts, until=steps + 8)
    for part in ("`train_loader`", "Counts", "state_dict", "torch.Gen", "set_epoch"):
        assert part in message


@pytest.mark.parametrize("steps", [2, 6, 8])
@pytest.mark.parametrize("sampler", [Same, Tells, lambda: ClassBalanced("SFC64", 24)])
def test_the_same_rows_after_a_resume_are_no_cause_for_alarm(tmp_path, steps, sampler):
    assert resumed_after(steps, tmp_path, sampler) == []


PAIR = torch.zeros(2), torch.tensor(1)


class Row:
    """Of a dataset that is not only data."""

    def __init__(self):
        self.pair = PAIR


@pytest.mark.parametrize("row", [Row, lambda: (PAIR[0] + 1, PAIR[1] + 1)])
def test_many_rows_do_not_hide_the_generator_of_a_loader(row):
    generator = torch.Generator().manual_seed(3)
    data = [row() for _ in range(9_999)]
    data = [data, [row() for _ in range(9_999)], [row() for _ in range(9_999)]]
    loader = DataLoader(data, 2, shuffle=True, generator=generator)
    source = open_loader(loader, "loader", 0)
    assert list(source.present_state()["generators"]) == ["generator"]


def test_a_sampler_that_a_dataset_of_many_rows_knows_is_looked_into():
    sampler = ClassBalanced("SFC64")
    data = Noisy(np.random.default_rng(0))
    data.rows, data.sampler = [Row() for _ in range(9_000)], sampler
    data.more, data.most = ([Row() for _ in range(9_000)] for _ in "ab")
    source = open_loader(DataLoader(data, 6, sampler=sampler), "loader", 0)
    found = source.present_state()["generators"]
    assert {"sampler.drawing['of class'][0]", "dataset.generator"} <= set(found)


class OwnState(random.Random):
    def getstate(self):
        return {"mine": super().getstate()}


def test_a_generator_with_a_state_of_its_own_kind_is_left_out():
    assert find({"a": OwnState(0), "b": random.Random(0)}).keys() == {"b"}


class Slots:
    __slots__ = ("generator",)


def test_generators_are_found_wherever_they_are():
    inner, part = types.SimpleNamespace(), types.SimpleNamespace()
    slots = Slots()
    part.itself, part.inner = part, inner
    inner.deep = [{"a": (random.Random(0), 5)}]
    slots.generator = np.random.default_rng(0)
    part.slots, part.bits = slots, slots.generator.bit_generator
    part.method = functools.partial(inner.deep[0]["a"][0].shuffle, [1])
    part.shared = np.random.mtrand._rand, torch.default_generator, random._inst
    part.never = random.SystemRandom()
    part.data, part.files = list(range(10**6)), [("a.png", i) for i in range(9000)]
    assert set(find({"part": part})) == {"part.bits", "part.method.func.__self__"}


def test_a_generator_that_is_not_there_any_more_is_passed_over():
    sampler = ClassBalanced("SFC64")
    source = open_loader(DataLoader(DATA, 6, sampler=sampler), "loader", 0)
    before = states_of(find({"sampler": sampler}))
    other = states_of({"x": random.Random(0)})["x"]
    states = {"sampler.gone": other, "sampler.drawing['of class'][0]": other}
    source.epoch(Position(state={"generators": states}))
    assert states_of(find({"sampler": sampler})) == before
