"""Batches from torch loaders and other iterables: the same as plain iteration."""

import contextlib
import itertools
import multiprocessing
import os
import random
import subprocess
import sys
import warnings

import equinox as eqx
import jax
import numpy as np
import pytest
from toys import Mlp, Recorder, rows

torch = pytest.importorskip("torch")

from torch.utils.data import (  # noqa: E402
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from jaxdp import Callback, Trainer  # noqa: E402
from jaxdp.data import torch_source  # noqa: E402
from jaxdp.data.conversion import to_host  # noqa: E402
from jaxdp.data.loaders import open_loader  # noqa: E402
from jaxdp.data.random_states import seed_of  # noqa: E402
from jaxdp.data.source import Source  # noqa: E402
from jaxdp.data.torch_collation import PIPE_BYTES  # noqa: E402
from jaxdp.data.torch_source import TorchSource  # noqa: E402
from jaxdp.data.torch_workers import started  # noqa: E402


class Squares(Dataset):
    """Item i is (i, i*i), and a random number when asked for one."""

    def __init__(self, count=23, noisy=False):
        self.count = count
        self.noisy = noisy

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        if self.noisy:
            return i, float(torch.rand(())), np.random.rand(), random.random()
        return i, np.float32(i * i)


class InPlace(DataLoader):
    """Writes every batch into the same memory."""

    def __iter__(self):
        memory = torch.zeros(2, 1)
        for number in range(len(self)):
            memory[:] = number
            yield memory


class Listening(torch.utils.data.Sampler):
    """Gives what it was told last."""

    told = 0

    def __init__(self):
        pass

    def __iter__(self):
        for _ in range(6):
            yield self.told

    def __len__(self):
        return 6


class Many(Squares):
    def __getitems__(self, indices):
        return [self[i] for i in indices]


class Stream(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(start, 20, step))


class Sized(Stream):
    """Ten items; workers make more batches of them than `len` of a loader says."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(np.arange(start, 10, step, dtype=np.float32)[:, None])

    def __len__(self):
        return 10


class Pairs:
    """A batch sampler that draws from torch's global generator as it goes."""

    def __iter__(self):
        for _ in range(5):
            yield torch.randint(0, 23, (4,)).tolist()

    def __len__(self):
        return 5


def collate_sum(items):
    return {"sum": np.array([sum(item) for item in items])}


def flat(batches):
    return [[np.asarray(leaf) for leaf in batch] for batch in batches]


def assert_same(ours, theirs):
    ours, theirs = flat(ours), flat(theirs)
    assert len(ours) == len(theirs)
    for mine, yours in zip(ours, theirs, strict=True):
        for a, b in zip(mine, yours, strict=True):
            np.testing.assert_array_equal(a, b)


TENSORS = TensorDataset(torch.arange(23.0)[:, None], torch.arange(23))


@pytest.mark.parametrize(
    "dataset", [Squares(), Many(), TENSORS, Subset(TENSORS, range(3, 20))]
)
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4},
        {"batch_size": 4, "shuffle": True},
        {"batch_size": 4, "shuffle": True, "drop_last": True},
        {"batch_size": 4, "sampler": RandomSampler(range(17), replacement=True)},
        {"batch_size": 4, "sampler": WeightedRandomSampler([0.1] * 17, 30)},
        {"batch_size": 4, "sampler": [5, 3, 1, 1, 2]},
        {"batch_sampler": [[1, 2], [3], [4, 5, 6]]},
    ],
)  # fmt: skip
def test_batches_are_those_of_plain_iteration(dataset, options):
    loader = DataLoader(dataset, **options)
    source = open_loader(loader, "train_loader", seed=7)
    for epoch in range(2):
        ours = list(source.epoch(epoch))
        torch.manual_seed(seed_of(7, epoch))
        assert_same(ours, loader)


def test_more_batches_than_the_length_says_all_count():
    loader = DataLoader(Sized(), 4, num_workers=2)
    assert len(loader) == 3
    source = open_loader(loader, "train_loader", seed=7)
    assert len(list(source.epoch(0))) == 4
    trainer = Trainer(
        linear(), loss_fn=lambda model, x: (x + 0 * jax.vmap(model)(x))[:, 0]
    )
    found = [trainer.validate(loader)["val_loss"], trainer.test(loader)["test_loss"]]
    history = trainer.fit([np.ones((4, 1), np.float32)], loader)
    assert [*found, *history["val_loss"]] == [4.5] * 3
    trainer.fit(loader, max_epochs=2, max_steps=4)  # as many as `len` says, after one
    assert (trainer.current_epoch, trainer.global_step) == (1, 4)
    trainer.fit(loader, max_epochs=2)
    assert trainer.global_step == 5


def linear():
    return eqx.nn.Linear(1, 1, key=jax.random.key(0))


def test_a_loader_may_reuse_its_memory():
    loader = InPlace(TENSORS, 4)
    seen = []

    class Seen(Callback):
        def on_train_batch_start(self, trainer, batch, batch_idx):
            seen.append(float(batch[0, 0]))

    trainer = Trainer(
        linear(),
        loss_fn=lambda model, x: jax.vmap(model)(x)[:, 0],
        callbacks=[Seen()],
        steps_per_execution=3,
    )
    trainer.fit(loader)
    assert seen == [0, 1, 2, 3, 4, 5]
    source = open_loader(loader, "train_loader", seed=7)
    assert [float(batch[0, 0]) for batch in list(source.epoch(0))] == seen


@pytest.mark.parametrize("dataset", [Squares(), TENSORS])
def test_a_sampler_may_listen_to_training(dataset):
    sampler = Listening()
    source = open_loader(DataLoader(dataset, 1, sampler=sampler), "train_loader", 7)
    found = []
    for sampler.told, batch in enumerate(source.epoch(0), 1):
        found.append(int(batch[1][0] if dataset is TENSORS else batch[0][0]))
    assert found == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("lists", "error", "match"),
    [
        ([[0, 1], []], IndexError, "without indices"),
        ([[0, 1], [0.5, 1.0]], TypeError, "integer"),
        ([[0, 1], ["1"]], TypeError, "integer"),
        ([[0, 1], [23]], IndexError, "out of bounds"),
    ],
)
def test_indices_that_are_none_are_refused_at_their_batch(lists, error, match):
    loader = DataLoader(TENSORS, batch_sampler=lists)
    batches = open_loader(loader, "train_loader", seed=7).epoch(0)
    next(batches)
    with pytest.raises(error, match=match) as caught:
        next(batches)
    assert caught.value.__notes__ == ["in batch 1 of epoch 0 of `train_loader`"]


def test_values_that_are_never_drawn_need_not_fit():
    wide = torch.tensor([2**40, 1, 2])
    dataset = Subset(TensorDataset(wide), [1, 2])
    (batch,) = open_loader(DataLoader(dataset, 2), "train_loader", seed=7).epoch(0)
    np.testing.assert_array_equal(batch[0], [1, 2])
    with pytest.raises(ValueError, match=str(2**40)) as caught:
        list(open_loader(DataLoader(TensorDataset(wide)), "loader", seed=7).epoch(0))
    assert caught.value.__notes__ == ["in batch 0 of epoch 0 of `loader`"]


class Failing(Callback):
    def on_train_batch_end(self, trainer, metrics, batch_idx):
        raise RuntimeError("stop")


def of_row(model, x, y):
    return jax.vmap(model)(x)[:, 0]


def test_the_global_generators_come_back_when_a_fit_fails():
    loader = DataLoader([(np.ones(1, np.float32), 0.0)] * 8, 4)
    np.random.seed(1)
    expected = np.random.rand(2).tolist()
    np.random.seed(1)
    before = np.random.rand()
    trainer = Trainer(linear(), loss_fn=of_row, callbacks=[Failing()])
    with pytest.raises(RuntimeError, match="stop") as kept:
        trainer.fit(loader)
    assert [before, np.random.rand()] == expected
    assert kept.value.__traceback__ is not None  # its frames are still there


def test_workers_that_last_end_with_the_fit():
    loader = DataLoader(Squares(), 4, num_workers=1, persistent_workers=True)
    trainer = Trainer(linear(), loss_fn=lambda model, i, x: model.weight[0] * x)
    for steps in (2, 4):
        trainer.fit(loader, loader, max_steps=steps, limit_val_batches=1)
        assert not multiprocessing.active_children()
    for look in (trainer.validate, trainer.plan):
        look(loader)
        assert not multiprocessing.active_children()
    trainer.fit(loader, overfit_batches=1, max_epochs=2)
    assert not multiprocessing.active_children()


def test_a_generator_deep_inside_samplers_goes_on_where_it_was(tmp_path):
    def make():
        generator = torch.Generator().manual_seed(3)
        sampler = RandomSampler(TENSORS, generator=generator)
        return DataLoader(TENSORS, batch_sampler=BatchSampler(sampler, 4, False))

    def trainer():
        return Trainer(linear(), loss_fn=of_row)

    whole = trainer()
    whole.fit(make(), max_epochs=2)
    part = trainer()
    part.fit(make(), max_steps=8)
    part.save(tmp_path / "part")
    torch.manual_seed(5)
    rest = trainer()
    rest.fit(make(), max_epochs=2, ckpt_path=str(tmp_path / "part"))
    for ours, theirs in zip(
        *map(jax.tree.leaves, (rest.state, whole.state)), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loaders_own_generator_is_respected(workers):
    def make():
        generator = torch.Generator().manual_seed(3)
        return DataLoader(Squares(), 4, shuffle=True, generator=generator)

    theirs = make()
    ours = open_loader(make(), "train_loader", seed=7)
    for epoch in range(3):
        assert_same(ours.epoch(epoch), theirs)


def test_a_sampler_that_draws_as_it_goes_is_seeded_too():
    loader = DataLoader(Squares(), batch_sampler=Pairs())
    source = open_loader(loader, "train_loader", seed=1)
    first = flat(source.epoch(0))
    torch.rand(3)
    assert_same(source.epoch(0), first)
    assert any(
        (a[0] != b[0]).any() for a, b in zip(flat(source.epoch(1)), first, strict=True)
    )


def test_the_seed_and_the_epoch_decide_the_order_and_global_generators_are_left_alone():
    loader = DataLoader(Squares(), 4, shuffle=True)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    orders = {
        (seed, epoch): tuple(
            np.concatenate([b[0] for b in TorchSource(loader, "x", seed).epoch(epoch)])
        )
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(set(orders.values())) == 4
    assert (torch.get_rng_state() == before[0]).all()
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]


def test_random_augmentations_are_the_same_for_any_number_of_workers():
    def epochs_with(workers):
        dataset = Squares(16, noisy=True)
        loader = DataLoader(dataset, 4, shuffle=True, num_workers=workers)
        source = open_loader(loader, "train_loader", seed=5)
        return [flat(source.epoch(epoch)) for epoch in range(2)]

    epochs = {workers: epochs_with(workers) for workers in (0, 1, 2)}
    for epoch in range(2):
        assert_same(epochs[0][epoch], epochs[1][epoch])
        assert_same(epochs[0][epoch], epochs[2][epoch])
    assert (epochs[0][0][0][1] != epochs[0][1][0][1]).all()


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_give_the_same_batches_without_fork_warnings(persistent):
    loader = DataLoader(Squares(), 4, num_workers=2, persistent_workers=persistent)
    source = open_loader(loader, "train_loader", seed=0)
    plain = DataLoader(Squares(), 4)
    for epoch in range(2):
        assert_same(source.epoch(epoch), plain)
    assert loader.multiprocessing_context is None


def test_batches_fit_into_the_pipe_that_they_come_through(monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    if not hasattr(fcntl, "F_GETPIPE_SZ"):
        pytest.skip("only Linux has wider pipes")
    found = []

    def noted(*args):
        batches = started(*args)
        pipe = batches._worker_result_queue._reader.fileno()
        found.append(fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ))
        return batches

    monkeypatch.setattr(torch_source, "started", noted)
    plain = DataLoader(Squares(), 4)
    loader = DataLoader(Squares(), 4, num_workers=1)
    assert_same(open_loader(loader, "train_loader", seed=0).epoch(0), plain)
    # Where that is forbidden, they come through a narrow one.
    monkeypatch.setattr(fcntl, "F_SETPIPE_SZ", -1)
    assert_same(open_loader(loader, "train_loader", seed=0).epoch(0), plain)
    assert found == [PIPE_BYTES, 2**16]


def test_parts_that_workers_cannot_import_are_refused_with_the_remedy():
    loader = DataLoader(Squares(), 4, num_workers=1, collate_fn=lambda items: items)
    with pytest.raises(TypeError, match="can't be sent to its workers.*num_workers=0"):
        list(open_loader(loader, "train_loader", seed=0).epoch(0))


class Held(Squares):
    def __getstate__(self):
        raise RuntimeError("holds a lock")


class Broken(Listening):
    def __iter__(self):
        raise ValueError("nothing to draw from")


def test_errors_of_sending_and_of_samplers_are_told_apart():
    loader = DataLoader(Held(), 4, num_workers=1)
    with pytest.raises(TypeError, match="`x` can't be sent to its workers: holds a l"):
        list(open_loader(loader, "x", seed=0).epoch(0))
    loader = DataLoader(Squares(), 4, num_workers=1, sampler=Broken())
    with pytest.raises(ValueError, match="nothing to draw from"):
        list(open_loader(loader, "x", seed=0).epoch(0))
    assert not multiprocessing.active_children()


def test_iterable_datasets_are_iterated():
    for workers in (0, 2):
        loader = DataLoader(Stream(), 4, num_workers=workers)
        source = open_loader(loader, "train_loader", seed=0)
        seen = np.concatenate([batch for batch in source.epoch(0)])
        assert sorted(seen) == list(range(20))
    assert source.num_batches is None


class Shuffled(IterableDataset):
    """Gives batches, like WebDataset's loader, in an order that it draws."""

    def __iter__(self):
        for first in torch.randperm(4).tolist():
            yield np.arange(3) + 3 * first, np.full(3, random.random())


def test_an_iterable_dataset_may_give_batches_and_the_seed_decides_what_it_draws():
    source = open_loader(Shuffled(), "train_loader", seed=0)
    first, second = flat(source.epoch(0)), flat(source.epoch(1))
    assert len(first) == 4 and source.num_batches is None
    order = [[batch[0][0] for batch in epoch] for epoch in (first, second)]
    assert sorted(order[0]) == [0, 3, 6, 9] and order[0] != order[1]
    random.random(), torch.rand(1)
    assert_same(open_loader(Shuffled(), "train_loader", seed=0).epoch(0), first)


def test_an_iterable_dataset_of_single_examples_is_refused_with_the_remedy():
    class Single(IterableDataset):
        def __iter__(self):
            yield np.zeros((2, 2)), 1

    with pytest.raises(ValueError, match="share a leading axis") as caught:
        list(open_loader(Single(), "train_loader", seed=0).epoch(0))
    assert "DataLoader(dataset, batch_size)" in "".join(caught.value.__notes__)


LIBRARY = """
import os

PID = os.getpid()
"""

SCRIPT = """
import os
import sys
import sysconfig

import numpy as np
import own
from torch.utils.data import DataLoader, Dataset

from jaxdp.data.loaders import open_loader


class Imported(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return np.array([i, own.library.PID == os.getpid()])


if __name__ == "__main__":
    sysconfig.get_path = lambda name: os.path.dirname(own.library.__file__)
    loader = DataLoader(Imported(), 2, num_workers=1)
    print(next(open_loader(loader, "train_loader", seed=0).epoch(0)).tolist())
"""


def test_workers_find_the_libraries_of_the_script_already_imported(tmp_path):
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    (libraries / "library.py").write_text(LIBRARY)
    (tmp_path / "own.py").write_text("import library\n")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    paths = [str(libraries), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.split("\n")[0] == "[[0, 0], [1, 0]]", done.stderr


def test_loaders_without_batching_give_what_the_dataset_holds():
    whole = DataLoader([np.full((3, 2), i) for i in range(4)], batch_size=None)
    batches = list(open_loader(whole, "train_loader", seed=0).epoch(0))
    assert [int(batch[0, 0]) for batch in batches] == [0, 1, 2, 3]


def test_a_collate_fn_is_used():
    loader = DataLoader(Squares(6), 3, collate_fn=collate_sum)
    batches = list(open_loader(loader, "train_loader", seed=0).epoch(0))
    np.testing.assert_array_equal(batches[1]["sum"], [12, 20, 30])


def test_set_epoch_is_called_on_all_parts_that_have_it():
    class Shuffled:
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([self.epoch] * 4)

        def __len__(self):
            return 4

    class Dated(Squares):
        def set_epoch(self, epoch):
            self.epoch = epoch

    inner, dataset = Shuffled(), Dated()
    for options in (
        {"batch_size": 4, "sampler": inner},
        {"batch_sampler": BatchSampler(inner, 4, False)},
    ):
        source = open_loader(DataLoader(dataset, **options), "train_loader", seed=0)
        for epoch in (3, 5):
            assert int(next(source.epoch(epoch))[0][0]) == dataset.epoch == epoch


@pytest.mark.parametrize("kind", ["one list", "iterators"])
def test_batch_samplers_may_be_generators(kind):
    def lists():
        same = []
        for start in range(0, 10, 2):
            same[:] = range(start, start + 2)
            yield same if kind == "one list" else iter(same)

    rows = torch.arange(10)
    for dataset in (TensorDataset(rows), [(row,) for row in rows]):
        loader = DataLoader(dataset, batch_sampler=lists())
        batches = list(open_loader(loader, "train_loader", seed=0).epoch(0))
        assert [x.tolist() for (x,) in batches] == [[i, i + 1] for i in range(0, 10, 2)]


def test_an_epoch_begun_by_steps_is_gone_on_with_in_its_order(tmp_path):
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


class Endless(Squares):
    def __len__(self):
        raise NotImplementedError


def test_a_length_that_is_not_implemented_is_not_known():
    loader = DataLoader(Endless(), batch_sampler=Endless())
    assert open_loader(loader, "train_loader", seed=0).num_batches is None


def test_a_generator_that_reuses_its_buffer_gives_distinct_batches():
    def reusing():
        buffer = np.zeros(2, np.float32)
        for i in range(4):
            buffer[:] = i
            yield (buffer,)

    batches = list(Source(reusing(), "train_loader").epoch(0))
    assert [int(batch[0][0]) for batch in batches] == [0, 1, 2, 3]


def test_a_collate_fn_that_reuses_its_buffer_gives_distinct_batches():
    buffer = np.zeros(4, np.float32)

    def collate(items):
        buffer[:] = [item[0] for item in items]
        return (buffer,)

    loader = DataLoader(Squares(8), 4, collate_fn=collate)
    batches = list(open_loader(loader, "train_loader", seed=0).epoch(0))
    assert [batch[0].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_batch_of_nothing_is_no_end():
    with pytest.raises(TypeError, match="a batch has no arrays in it: None"):
        list(Source([(np.ones(2),), None], "train_loader").epoch(0))


def test_an_iterator_goes_on_from_epoch_to_epoch():
    source = Source(iter([(np.full(2, i),) for i in range(6)]), "train_loader")
    for epoch in range(2):
        got = [int(b[0][0]) for b in itertools.islice(source.epoch(epoch), 3)]
        assert got == [3 * epoch, 3 * epoch + 1, 3 * epoch + 2]


def test_errors_say_where_in_the_data_they_arose():
    class Broken(Squares):
        def __getitem__(self, i):
            if i == 9:
                raise RuntimeError("item nine is bad")
            return super().__getitem__(i)

    source = open_loader(DataLoader(Broken(), 4), "train_loader", seed=0)
    with pytest.raises(RuntimeError, match="item nine is bad") as caught:
        list(source.epoch(1))
    assert caught.value.__notes__ == ["in batch 2 of epoch 1 of `train_loader`"]


@pytest.mark.parametrize(
    "loader, message",
    [
        (Squares(), "a torch Dataset, which gives single examples; wrap it"),
        (np.ones(3), "not an iterable of batches"),
        ({"x": 1}, "not an iterable of batches"),
        (3, "can't be iterated"),
    ],
)
def test_what_is_no_loader_is_refused(loader, message):
    with pytest.raises(TypeError, match=message):
        open_loader(loader, "train_loader", seed=0)


class Rows(Dataset):
    """Rows of every kind that torch's collation knows."""

    def __init__(self, kind, size=5):
        self.kind, self.size = kind, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        random = np.random.default_rng(index)
        values = {
            "arrays": (random.normal(size=(3, 2)).astype(np.float32), np.int64(index)),
            "wide": (random.normal(size=3), index, float(index) / 3, index > 2),
            "bytes": {"x": random.integers(0, 256, (4, 4), dtype=np.uint8), "y": 1},
            "tensors": (torch.full((2,), float(index)), torch.tensor(index)),
            "bfloat16": (torch.full((2,), index, dtype=torch.bfloat16), index),
            "large": (np.full((300, 300), index, np.float32), [index, index + 1]),
            "transposed": (random.normal(size=(3, 2)).T, np.float32(index)),
            "mixed": (index if index % 2 else index + 0.5, np.zeros(())),
        }
        return values[self.kind]


KINDS = "arrays wide bytes tensors bfloat16 large transposed mixed".split()


@pytest.mark.parametrize(
    ("kind", "workers"),
    [(kind, 0) for kind in KINDS]
    + [(kind, 2) for kind in ("arrays", "bfloat16", "large")],
)
def test_collation_gives_what_torchs_gives(kind, workers):
    loader = DataLoader(Rows(kind), 3, num_workers=workers)
    plain = [to_host(batch) for batch in DataLoader(Rows(kind), 3)]
    found = list(TorchSource(loader, "loader", 0).epoch(0))
    for one, other in zip(found, plain, strict=True):
        assert jax.tree.structure(one) == jax.tree.structure(other)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            np.testing.assert_array_equal(a, b)


def test_rows_that_differ_get_the_error_of_torchs_collation():
    class Uneven(Rows):
        def __getitem__(self, index):
            return np.zeros(index + 1)

    with pytest.raises(RuntimeError, match="equal size"):
        list(TorchSource(DataLoader(Uneven(""), 3), "loader", 0).epoch(0))


def test_an_epoch_that_failed_before_its_first_step_has_the_same_order():
    """With a generator of the user's, which the failed epoch has drawn from."""

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


@pytest.mark.parametrize("way", ["nothing to do", "wrong argument", "setup"])
def test_a_fit_that_reads_nothing_after_a_load_changes_nothing(tmp_path, way):
    class Fails(Callback):
        def setup(self, trainer):
            if way == "setup" and not tried:
                tried.append(True)
                raise OSError("once")

    def trainer_and_loader(*callbacks):
        data = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
        generator = torch.Generator().manual_seed(3)
        recorder = Recorder()
        trainer = Trainer(
            Mlp(jax.random.key(0)),
            callbacks=[recorder, *callbacks],
            enable_progress_bar=False,
        )
        loader = DataLoader(data, 4, shuffle=True, generator=generator)
        return trainer, loader, recorder.losses

    (x, y), tried = rows(24), []
    trainer, loader, losses = trainer_and_loader()
    trainer.fit(loader, max_steps=8)
    path = trainer.save(tmp_path / "saved")
    trainer.fit(loader, max_epochs=3)
    again, loader, rest = trainer_and_loader(Fails())
    again.load(path)
    options = {
        "nothing to do": {"max_epochs": 1},
        "wrong argument": {"limit_train_batches": "x"},
        "setup": {"max_epochs": 3},
    }[way]
    with warnings.catch_warnings(), contextlib.suppress(TypeError, OSError):
        warnings.simplefilter("ignore")
        again.fit(loader, **options)
    assert not rest
    again.fit(loader, max_epochs=3)
    assert losses[8:] == rest


@pytest.mark.parametrize("way", ["nothing to do", "wrong argument", "setup", "nested"])
def test_a_save_after_a_fit_that_read_nothing_keeps_the_place(tmp_path, way):
    """With a generator of the user's: where it is, is all that tells the next order."""

    class Fails(Callback):
        def setup(self, trainer):
            if way == "setup" and trainer.global_step:
                raise OSError("no disk")

        def on_train_epoch_end(self, trainer, metrics):
            if way == "nested":
                trainer.fit(batches_of(4), max_epochs=5)

    def batches_of(size):
        return DataLoader(
            TensorDataset(torch.from_numpy(x), torch.from_numpy(y)),
            size,
            shuffle=True,
            generator=torch.Generator().manual_seed(3),
        )

    def trainer(*callbacks):
        model = Mlp(jax.random.key(0))
        return Trainer(model, callbacks=callbacks, enable_progress_bar=False)

    x, y = rows(24)
    whole, rest = Recorder(), Recorder()
    trainer(whole).fit(batches_of(4), max_epochs=3)
    first, loader = trainer(Fails()), batches_of(4)
    with contextlib.suppress(RuntimeError):
        first.fit(loader, max_epochs=1)
    options = {
        "wrong argument": {"max_epochs": 2, "check_val_every_n_epoch": 0},
        "setup": {"max_epochs": 3},
    }.get(way, {"max_epochs": 1})
    with warnings.catch_warnings(), contextlib.suppress(ValueError, OSError):
        warnings.simplefilter("ignore")
        first.fit(loader, **options)
    path = first.save(tmp_path / "saved")
    trainer(rest).fit(batches_of(4), max_epochs=3, ckpt_path=path)
    assert first.global_step == 6
    assert whole.losses[6:] == rest.losses


def test_validation_draws_nothing_before_training():
    """From a dataset with a generator of its own, which both read."""

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
def test_an_iterator_goes_on_in_a_cut_epoch(kind):
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


def test_a_look_at_the_first_batch_leaves_the_pass_where_it_is():
    x, y = rows(24)
    data = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    for loader in (
        DataLoader(data, 4, shuffle=True, generator=torch.Generator()),
        [(x, y)],
    ):
        source = open_loader(loader, "loader", 0)
        next(source.epoch(5))
        before = source.of_epoch, source.state
        source.peek()
        assert (source.of_epoch, source.state) == before and before[0] == 5
