"""Properties of any loader, sizes and limits, by random examples."""

import itertools
import warnings

import numpy as np
import pytest
from toys import batches, linear_on_one_device, rows

from jaxdp import Arrays, Sharded
from jaxdp.data import GlobalPartition, Packer, Position, open_loader
from jaxdp.distributed import RowBlocks

hypothesis = pytest.importorskip("hypothesis")
draw, given = hypothesis.strategies, hypothesis.given


def settings(max_examples=100):
    options = {"deadline": None, "database": None, "derandomize": True}
    return hypothesis.settings(max_examples=max_examples, **options)


SHARDS = draw.sampled_from([1, 2, 3, 4, 8])
SIZES = draw.integers(1, 9)
MICRO_BATCH = draw.tuples(SIZES, draw.sampled_from([2, 3]))
"""The number of rows, and their width."""
WINDOWS = draw.lists(draw.lists(MICRO_BATCH, min_size=1, max_size=3), min_size=1)


def numbered(numbers, count, width):
    """Returns a batch whose rows are distinct numbers."""
    return (
        np.repeat(list(itertools.islice(numbers, count)), width).reshape(count, -1),
    )


@settings()
@given(SHARDS, WINDOWS)
def test_padding_keeps_each_row_once_and_adds_copies_that_do_not_count(shards, windows):
    packer, numbers, sizes, first = Packer(shards, "train"), itertools.count(), {}, 0
    for window in windows:
        data = [numbered(numbers, *each) for each in window]
        dispatch, found, shape = packer.pack([data], slots=3), [], []
        for group in dispatch.groups:
            for micro, count in zip(
                group.batch[0], group.counts.sum(axis=1), strict=True
            ):
                found += micro[:count, 0].tolist()
                if count:  # else it fills a free slot
                    assert (micro[count:] == micro[0]).all()
                size, width = micro.shape
                # Compiled shapes are few: each spec has a size, which only grows.
                most = max(rows for rows, other in window if other == width)
                needed = -(-most // shards) * shards
                assert size == max(needed, sizes.get(width, 0))
                shape.append((width, size))
        sizes |= dict(shape)
        assert len(shape) == 3 and dict(shape).keys() == {width for _, width in window}
        assert sorted(found) == list(range(first, first := first + len(found)))
        assert dispatch.rows == [len(found)] == [sum(count for count, _ in window)]
        assert dispatch.split and packer.pack([data], slots=3).shape == dispatch.shape
        turned = packer.pack([data[::-1]], slots=3)
        assert turned.shape == dispatch.shape  # in any order


@settings()
@given(SHARDS, WINDOWS)
def test_unpadded_batches_have_their_own_rows(shards, windows):
    packer = Packer(shards, "train", pads=False)
    for window in windows:
        data = [numbered(itertools.count(), *each) for each in window]
        dispatch, found = packer.pack([data], slots=3), []
        for group in dispatch.groups:
            count, *shape = group.batch[0].shape
            assert (group.counts.sum(axis=1) == shape[0]).all()
            found += [tuple(shape)] * count
        assert sorted(found) == sorted(window)
        assert dispatch.split == all(count % shards == 0 for count, _ in window)


@settings()
@given(
    draw.integers(1, 3),
    draw.integers(1, 2),
    draw.lists(SIZES, min_size=1, max_size=5),
    draw.booleans(),
)
def test_each_row_comes_to_one_process(processes, devices, sizes, pads):
    """In the order of the processes, as one process pads the batch."""
    count, numbers = processes * devices, itertools.count()
    data = [numbered(numbers, size, 2) for size in sizes]
    own = []
    for process in range(processes):
        blocks = RowBlocks(processes, (process,))
        packer = Packer(count, "train", blocks, pads=pads)
        own.append(
            [
                *GlobalPartition(None, lambda packer=packer: packer).split(
                    iter(data), None
                )
            ]
        )
    for (whole,), *parts in zip(data, *own, strict=True):
        assert len({part.counts for part in parts}) == 1
        each = [
            part.batch[0][:real]  # a process without rows has one as padding
            for part, real in zip(parts, parts[0].counts, strict=True)
        ]
        np.testing.assert_array_equal(np.concatenate(each), whole)


class Stream:
    """An iterable that can't seek."""

    def __init__(self, x, size):
        self.x, self.size = x, size

    def __iter__(self):
        return (self.x[i : i + self.size] for i in range(0, len(self.x), self.size))


def of_torch(x, size, **options):
    data = pytest.importorskip("torch").utils.data

    class Rows(data.Dataset):
        """Its noise depends on the epoch and the batch."""

        def __len__(self):
            return len(x)

        def __getitem__(self, index):
            return x[index] + np.random.rand()

    return data.DataLoader(Rows(), size, **options)


LOADERS = {
    "a list": lambda x, size: [*Stream(x, size)],
    "an iterable": Stream,
    "Arrays": lambda x, size: Arrays(x, batch_size=size),
    "torch's": of_torch,
    "torch's, shuffled": lambda x, size: of_torch(x, size, shuffle=True),
}


@settings(80)
@given(
    draw.sampled_from([*LOADERS]),
    draw.integers(1, 30),
    draw.integers(1, 7),
    draw.integers(0, 3),
    draw.integers(0, 2**31),
    draw.data(),
)
def test_sources_read_from_any_position(kind, count, size, epoch, seed, data):
    x = np.arange(float(count))[:, None]

    def source():
        return open_loader(LOADERS[kind](x, size), "loader", seed)

    whole = list(source().read_epoch(Position(epoch)))
    at = data.draw(draw.integers(0, len(whole)))
    rest = list(source().read_epoch(Position(epoch, batches=at)))
    assert len(whole) == -(-count // size) and len(rest) == len(whole) - at
    for one, other in zip(rest, whole[at:], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture(scope="module")
def validating():
    """A trainer, its data, and the mean loss over it."""
    trainer = linear_on_one_device(strategy=Sharded(4), metrics=["accuracy"])
    data = rows(24)
    return trainer, data, trainer.validate([data])


@settings(15)
@given(draw.lists(draw.integers(1, 23), max_size=5))
def test_means_do_not_depend_on_the_batches(validating, stops):
    trainer, data, whole = validating
    parts = zip(*(np.split(each, sorted({*stops})) for each in data), strict=True)
    found = trainer.validate([*parts])
    assert found == pytest.approx(whole, rel=1e-5)


def ends(steps, batch, epochs, max_steps, per_epoch, window):
    """Returns the end of a fit from these steps and batches of an epoch."""
    epoch, done = batch
    while epoch < epochs and steps < max_steps:
        done = min(done + window, per_epoch)
        steps += 1
        if done == per_epoch:
            epoch, done = epoch + 1, 0
    return steps, (epoch, done)


@pytest.mark.parametrize("window", [1, 2])
@settings(15)
@given(
    draw.integers(1, 5),
    draw.none() | draw.integers(1, 6),
    draw.lists(draw.tuples(draw.integers(0, 4), draw.integers(0, 12)), max_size=4),
)
def test_limits_are_totals_over_fits(window, length, limit, fits):
    trainer = linear_on_one_device(accumulate_grad_batches=window)
    steps, at, per_epoch = 0, (0, 0), min(length, limit or length)
    for epochs, max_steps in fits:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`fit` has nothing to do|.* gave . batch")
            trainer.fit(
                batches(*[8] * length),
                max_epochs=epochs,
                max_steps=max_steps,
                limit_train_batches=limit,
            )
        steps, at = ends(steps, at, epochs, max_steps, per_epoch, window)
        assert (trainer.global_step, trainer.current_epoch) == (steps, at[0])
