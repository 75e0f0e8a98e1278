"""Batches of torch loaders and other iterables equal plain iteration."""

import itertools
import random

import jax
import numpy as np
import pytest
from toys import On, linear, quiet

torch = pytest.importorskip("torch")

from squares import Squares, assert_same, flat  # noqa: E402
from torch.utils.data import (  # noqa: E402
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from jaxdp.data import Position, open_loader  # noqa: E402
from jaxdp.data.random_states import make_seed  # noqa: E402

TENSORS = TensorDataset(torch.arange(23.0)[:, None], torch.arange(23))


def read(loader, epoch=0, seed=0):
    return list(open_loader(loader, "loader", seed).read_epoch(Position(epoch)))


def seeded(**options):
    return {**options, "generator": torch.Generator().manual_seed(3)}


class Many(Squares):
    def __getitems__(self, indices):
        return [self[i] for i in indices]


class Lists:
    """A batch sampler that draws from torch's global generator as it goes."""

    def __iter__(self):
        return (torch.randint(0, 23, (4,)).tolist() for _ in range(5))

    def __len__(self):
        return 5


@pytest.mark.parametrize(
    "dataset", [Squares(), Many(), TENSORS, Subset(TENSORS, range(3, 20))]
)
@pytest.mark.parametrize("options", [
    lambda: {"batch_size": 4},
    lambda: {"batch_size": 4, "shuffle": True, "drop_last": True},
    lambda: seeded(batch_size=4, shuffle=True),
    lambda: {"batch_size": 4, "sampler": RandomSampler(range(17), replacement=True)},
    lambda: {"batch_size": 4, "sampler": WeightedRandomSampler([0.1] * 17, 30)},
    lambda: {"batch_size": 4, "sampler": [5, 3, 1, 1, 2]},
    lambda: {"batch_sampler": [[1, 2], [3], [4, 5, 6]]},
])  # fmt: skip
def test_batches_equal_those_of_plain_iteration(dataset, options):
    loader = DataLoader(dataset, **options())
    source = open_loader(DataLoader(dataset, **options()), "train_loader", seed=7)
    for epoch in range(3):
        ours = list(source.read_epoch(Position(epoch)))
        torch.manual_seed(make_seed(7, epoch))
        assert_same(ours, loader)


@pytest.mark.parametrize("options", [
    lambda: {"batch_size": 4, "shuffle": True},
    lambda: {"batch_sampler": BatchSampler(RandomSampler(range(23)), 4, False)},
    lambda: {"batch_sampler": Lists()},
], ids=["shuffle=True", "a batch sampler", "a lazy sampler"])  # fmt: skip
def test_the_seed_and_the_epoch_alone_decide_the_order(options):
    def states():
        numpys = np.random.get_state()[1].tolist()
        return torch.get_rng_state().tolist(), numpys, random.getstate()

    def order(seed, epoch, torch_seed=1):
        torch.manual_seed(torch_seed)
        before = states()
        batches = read(DataLoader(range(23), **options()), epoch, seed)
        assert states() == before
        return (*np.concatenate(batches).tolist(),)

    orders = {case: order(*case) for case in itertools.product((0, 1), (0, 1))}
    assert len({*orders.values()}) == 4
    assert orders[1, 1] == order(1, 1, torch_seed=2) != (*range(23),)


@pytest.mark.parametrize("dataset", [Squares(), TENSORS])
def test_a_custom_sampler_is_drawn_as_it_is_needed(dataset):
    class Listening:
        told = 0

        def __iter__(self):
            return (self.told for _ in range(6))

        def __len__(self):
            return 6

    sampler, found = Listening(), []
    source = open_loader(DataLoader(dataset, 1, sampler=sampler), "train_loader", 7)
    for sampler.told, batch in enumerate(source.read_epoch(), 1):
        found.append(int(batch[1][0] if dataset is TENSORS else batch[0][0]))
    assert found == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", ["one list", "iterators"])
def test_batch_samplers_may_be_generators(kind):
    def lists():
        same = []
        for start in range(0, 10, 2):
            same[:] = range(start, start + 2)
            yield same if kind == "one list" else iter(same)

    rows = torch.arange(10)
    for dataset in (TensorDataset(rows), [(row,) for row in rows]):
        batches = read(DataLoader(dataset, batch_sampler=lists()))
        assert [x.tolist() for (x,) in batches] == [[i, i + 1] for i in range(0, 10, 2)]


WIDE = TensorDataset(torch.tensor([2**40, 1, 2]))


@pytest.mark.parametrize("dataset, lists, error, match", [
    (TENSORS, [[0, 1], []], IndexError, "without indices"),
    (TENSORS, [[0, 1], [0.5, 1.0]], TypeError, "integer"),
    (TENSORS, [[0, 1], ["1"]], TypeError, "integer"),
    (TENSORS, [[0, 1], [23]], IndexError, "out of bounds"),
    (WIDE, [[1, 2], [0]], ValueError, str(2**40)),  # only values that are drawn
])  # fmt: skip
def test_invalid_rows_are_refused_in_their_batch(dataset, lists, error, match):
    loader = DataLoader(dataset, batch_sampler=lists)
    batches = open_loader(loader, "train_loader", seed=7).read_epoch()
    next(batches)
    with pytest.raises(error, match=match) as caught:
        next(batches)
    assert caught.value.__notes__[0] == "in batch 1 of epoch 0 of `train_loader`"


class Shuffled(IterableDataset):
    """Yields batches in a random order, as WebDataset's loader does."""

    def __iter__(self):
        for first in torch.randperm(4).tolist():
            yield np.arange(3) + 3 * first, np.full(3, random.random())


def test_an_iterable_dataset_of_batches_is_seeded():
    first, second = flat(read(Shuffled())), flat(read(Shuffled(), epoch=1))
    order = [[batch[0][0] for batch in epoch] for epoch in (first, second)]
    assert sorted(order[0]) == [0, 3, 6, 9] and order[0] != order[1]
    assert len({batch[1][0] for batch in first}) == 4  # each has a seed of its own
    random.random(), torch.rand(1)
    assert_same(read(Shuffled()), first)


def test_an_iterable_dataset_of_examples_is_refused():
    class Single(IterableDataset):
        def __iter__(self):
            yield np.zeros((2, 2)), 1

    with pytest.raises(ValueError, match=r"DataLoader\(dataset, batch_size\)"):
        read(Single())


def test_custom_batching_and_collation_are_used():
    whole = DataLoader([np.full((3, 2), i) for i in range(4)], batch_size=None)
    assert [int(batch[0, 0]) for batch in read(whole)] == [0, 1, 2, 3]
    loader = DataLoader(Squares(6), 3, collate_fn=lambda rows: np.array(rows).sum(1))
    np.testing.assert_array_equal(read(loader)[1], [12, 20, 30])


class Told:
    """Yields its epoch four times: a batch, its rows, or their indices."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.epoch


class ToldSampler(Told):
    def __iter__(self):
        return iter([self.epoch] * 4)


class ToldBatches(Told):
    def __iter__(self):
        yield np.full(4, self.epoch)


class ToldDataset(ToldBatches, IterableDataset):
    pass


@pytest.mark.parametrize("loader", [
    lambda: DataLoader(range(23), 4, sampler=ToldSampler()),
    lambda: DataLoader(
        range(23), batch_sampler=BatchSampler(ToldSampler(), 4, False)
    ),
    lambda: DataLoader(Told(), 4),
    ToldBatches,
    ToldDataset,
    lambda: DataLoader(ToldDataset(), batch_size=None),
])  # fmt: skip
def test_set_epoch_is_called_on_all_parts_that_have_it(loader):
    source = open_loader(loader(), "train_loader", seed=0)
    for epoch in (3, 5):
        assert next(source.read_epoch(Position(epoch))).tolist() == [epoch] * 4


class Stream(IterableDataset):
    """Ten rows, of which workers make more batches than the loader's length."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(np.arange(start, 10, step, dtype=np.float32)[:, None])


class Sized(Stream):
    def __len__(self):
        return 10


class Endless(Squares):
    def __len__(self):
        raise NotImplementedError


@pytest.mark.parametrize("loader", [
    lambda: DataLoader(Endless(), batch_sampler=Endless()),
    lambda: DataLoader(Stream(), 4),
    lambda: DataLoader(Sized(), 4, num_workers=2),  # an estimate
    Shuffled,
])  # fmt: skip
def test_a_length_that_is_not_known_is_none(loader):
    assert open_loader(loader(), "train_loader", seed=0).num_batches is None
    assert open_loader(DataLoader(Sized(), 4), "loader", seed=0).num_batches == 3


def make(*callbacks, **options):
    def loss_fn(model, x):
        return (x + 0 * jax.vmap(model)(x))[:, 0]

    return quiet(linear(1, 1), loss_fn=loss_fn, callbacks=[*callbacks], **options)


@pytest.mark.slow
def test_batches_beyond_the_length_count():
    loader = DataLoader(Sized(), 4, num_workers=2)
    assert len(loader) == 3
    trainer = make()
    found = [trainer.validate(loader)["val_loss"], trainer.test(loader)["test_loss"]]
    history = trainer.fit([np.ones((4, 1), np.float32)], loader)
    assert [*found, *history["val_loss"]] == [4.5] * 3
    trainer.fit(loader, max_epochs=2)
    assert trainer.global_step == 5


BUFFER = np.zeros((2, 1), np.float32)


def reusing(*_):
    for number in range(4):
        BUFFER[:] = number
        yield (BUFFER,)


class InPlace(DataLoader):
    __iter__ = reusing


def collate_in_place(items):
    BUFFER[:, 0] = [item[0] // 2 for item in items]
    return (BUFFER,)


@pytest.mark.parametrize("loader", [
    reusing,
    lambda: InPlace(Squares(8), 2),
    lambda: DataLoader(Squares(8), 2, collate_fn=collate_in_place),
], ids=["generator", "loader", "collate_fn"])  # fmt: skip
def test_a_loader_may_reuse_its_memory(loader):
    seen = []
    see = On(on_train_batch_start=lambda trainer, batch, _: seen.extend(batch[0]))
    make(see, steps_per_execution=2).fit(loader())
    assert np.ravel(seen).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    np.testing.assert_array_equal(np.concatenate(read(loader()), axis=1)[0], seen)


def test_a_dataset_that_runs_out_does_not_end_the_epoch_early():
    loader = DataLoader(Squares(), 4, collate_fn=lambda rows: next(iter(())))
    with pytest.raises(RuntimeError, match="StopIteration"):
        read(loader)


def test_peeking_draws_nothing():
    loader = DataLoader(TENSORS, 4, **seeded(shuffle=True))
    source = open_loader(loader, "loader", 0)
    next(source.read_epoch(Position(5)))
    before, start = loader.generator.get_state(), source.epoch_start
    assert len(source.peek_batch()[0]) == 4
    assert torch.equal(loader.generator.get_state(), before)
    assert source.epoch_start is start and start.epoch == 5
