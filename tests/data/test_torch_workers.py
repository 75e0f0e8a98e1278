"""Workers of torch loaders give the same batches, and are not forked."""

import multiprocessing
import os
import pathlib
import pickle
import random
import re
import signal
import subprocess
import sys
import time
import warnings
import zlib

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from squares import Squares, assert_same, flat  # noqa: E402
from torch.utils.data import (  # noqa: E402
    DataLoader,
    Subset,
    TensorDataset,
    default_collate,
)
from toys import linear  # noqa: E402

from jaxdp import Arrays, Trainer  # noqa: E402
from jaxdp.callbacks import ModelCheckpoint  # noqa: E402
from jaxdp.data import Position, open_loader  # noqa: E402
from jaxdp.data.torch_workers import SmallArrays  # noqa: E402


def test_a_worker_that_imports_a_training_script_is_reported_at_once(
    monkeypatch, tmp_path
):
    saver = ModelCheckpoint(tmp_path / "checkpoints")
    trainer = Trainer(linear(1, 1), loss_fn=lambda *_: 0.0, callbacks=[saver])
    worker = multiprocessing.current_process()
    monkeypatch.setattr(worker, "_inheriting", True, raising=False)
    for train in (trainer.fit, trainer.steps):
        with pytest.raises(
            RuntimeError, match="put the training under `if __name__ == "
        ):
            train(DataLoader(Squares(), 4))
    assert not (tmp_path / "checkpoints").exists()


def test_persistent_workers_end_with_the_fit():
    loader = DataLoader(Squares(), 4, num_workers=1, persistent_workers=True)
    trainer = Trainer(linear(1, 1), loss_fn=loss_of_squares)
    for steps in (2, 4):
        trainer.fit(loader, loader, max_steps=steps, limit_val_batches=1)
        assert not multiprocessing.active_children()
    for look in (trainer.validate, trainer.plan):
        look(loader)
        assert not multiprocessing.active_children()
    trainer.fit(loader, overfit_batches=1, max_epochs=2)
    assert not multiprocessing.active_children()


def loss_of_squares(model, i, x):
    return model.weight[0] * x


@pytest.mark.parametrize("workers, persistent", [(1, False), (2, True)])
def test_batches_are_the_same_for_any_number_of_workers(workers, persistent):
    """Warnings of forks would be errors."""

    def read(workers, **options):
        dataset, generator = Squares(16, noisy=True), torch.Generator().manual_seed(3)
        options |= {"num_workers": workers, "generator": generator, "shuffle": True}
        loader = DataLoader(dataset, 4, **options)
        source = open_loader(loader, "train_loader", seed=5)
        epochs = [flat(source.read_epoch(Position(epoch))) for epoch in range(2)]
        assert loader.multiprocessing_context is None or persistent
        return epochs

    first, second = read(0)
    for other in (second[0], first[1]):  # another epoch, another batch
        assert (first[0][1] != other[1]).all()
    epochs = read(workers, persistent_workers=persistent)
    assert_same(first, epochs[0])
    assert_same(second, epochs[1])


class Several(Squares):
    """Has tensors that are small, medium and large, in a batch of two."""

    def __getitem__(self, row):
        return tuple(torch.zeros(size) for size in (1000, 30_000, 70_000))


def test_of_a_large_batch_only_small_tensors_are_copied():
    collate = SmallArrays(default_collate)
    dataset = Several()
    large = collate([dataset[0], dataset[1]])
    assert [type(leaf) is np.ndarray for leaf in large] == [True, False, False]
    small = collate([pair[:2] for pair in (dataset[0], dataset[1])])
    assert [type(leaf) is np.ndarray for leaf in small] == [True, True]
    assert [*map(type, collate([{"a": 1, "b": "c"}])["b"])] == [str]


class Mixed(Squares):
    """Has small and large arrays of several dtypes."""

    def __getitem__(self, row):
        draw = np.random.default_rng(row)
        large = draw.normal(size=(200, 200)).astype(np.float32)
        half = torch.from_numpy(large[:4]).to(torch.bfloat16)
        one = {"large": large, "half": half, "double": float(row), "yes": row > 3}
        return one, (np.int64(row), torch.zeros(0), np.complex64(row * 1j))


def test_small_and_large_tensors_come_from_workers_as_they_are():
    def read(workers):
        loader = DataLoader(Mixed(8), 4, num_workers=workers)
        return [*open_loader(loader, "train_loader", seed=0).read_epoch()]

    for batch, expected in zip(read(2), read(0), strict=True):
        assert jax.tree.structure(batch) == jax.tree.structure(expected)
        for pair in zip(*map(jax.tree.leaves, (batch, expected)), strict=True):
            assert len({(each.dtype, each.shape, each.tobytes()) for each in pair}) == 1
            assert pair[0].flags.writeable == pair[1].flags.writeable


@pytest.mark.parametrize("kind", ["DataLoader", "Arrays"])
def test_tensors_may_be_sent_to_workers_while_they_are_read(kind):
    """torch moves them to shared memory then: a view from before is of freed memory."""
    x = torch.arange(64.0)[:, None].repeat(1, 4096)  # no batch is fetched ahead
    loader = DataLoader(TensorDataset(x), 16)
    if kind == "Arrays":
        loader = Arrays(x, batch_size=16)
    batches = open_loader(loader, "loader", seed=0, in_order=True).read_epoch()
    found = [next(batches)]
    x.share_memory_()
    x += 100
    rows = np.concatenate([jax.tree.leaves(batch)[0] for batch in [*found, *batches]])
    expected = np.arange(64) + 100 * (np.arange(64) >= 16)
    np.testing.assert_array_equal(rows[:, -1], expected)


class Shared(Squares):
    """Its own `collate` uses what `__getitem__` has counted."""

    seen = 0

    def __getitem__(self, i):
        self.seen += 1
        return i

    def collate(self, rows):
        return np.full(len(rows), self.seen)


def test_a_worker_has_one_dataset_with_its_methods():
    dataset = Shared(8)
    loader = DataLoader(dataset, 4, num_workers=1, collate_fn=dataset.collate)
    batches = open_loader(loader, "loader", seed=0).read_epoch()
    assert [batch.tolist() for batch in batches] == [[4] * 4, [8] * 4]


class Pictures(Squares):
    """A dataset with arrays of all kinds, which overwrites rows of one of them."""

    def __init__(self):
        super().__init__(4)
        self.big = np.arange(4 * 2**13, dtype=np.float32).reshape(4, -1)
        read_only = self.big + 1
        read_only.flags.writeable = False
        self.others = {
            "columns first": np.asfortranarray(self.big),
            "every second column": self.big[:, ::2],
            "read-only": read_only,
            "empty": self.big[:0],
            "scalar": np.array(3.0),
            "objects": np.array([1.5, "two"], dtype=object),
            "masked": np.ma.masked_less(self.big, 5),
        }

    def __getitem__(self, row):
        self.big[row] = -1
        arrays = self.others.values()
        described = repr([(type(a), a.flags, a.dtype, a.tolist()) for a in arrays])
        return self.count_overwritten(), zlib.crc32(described.encode()) // 2

    def count_overwritten(self):
        return (self.big[:, 0] < 0).sum()

    def collate(self, rows):
        return np.array([(*rows[0], self.count_overwritten())])


def test_workers_map_large_arrays_which_are_written_once(monkeypatch):
    written, write = [], os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda *parts: written.append(write(*parts)) or written[-1]
    )
    dataset = Pictures()
    _, described = pickle.loads(pickle.dumps(dataset))[0]
    loader = DataLoader(dataset, 1, num_workers=2, collate_fn=dataset.collate)
    for _ in range(2):  # epochs
        # Each worker gets two rows, and its `collate_fn` is that of its dataset.
        batches = [*open_loader(loader, "loader", seed=0).read_epoch()]
        rows = np.concatenate(batches).tolist()
        assert rows == [[n, described, n] for n in (1, 1, 2, 2)]
    # Three of the arrays are large, contiguous and pickled by NumPy itself.
    assert sum(written) == 2 * 3 * dataset.big.nbytes
    assert dataset.big.min() == 0


class Held(Squares):
    def __getstate__(self):
        raise RuntimeError("holds a lock")


class Broken(torch.utils.data.Sampler):
    def __init__(self):
        pass

    def __iter__(self):
        raise ValueError("nothing to draw from")


class Breaking(Squares):
    def __getstate__(self):
        raise BrokenPipeError("ends at once")


@pytest.mark.parametrize("parts, match", [
    ({"collate_fn": lambda items: items}, "pickle.*lambda"),
    ({"dataset": Held()}, "holds a lock"),
    ({"dataset": Breaking()}, "ends at once"),
    ({"sampler": Broken()}, "nothing to draw from"),
])  # fmt: skip
def test_errors_at_the_start_of_workers_are_explained(parts, match):
    loader = DataLoader(**{"dataset": Squares(), "num_workers": 1} | parts)
    with pytest.raises(Exception, match=match) as caught:
        list(open_loader(loader, "x", seed=0).read_epoch())
    (note,) = caught.value.__notes__
    for part in ("workers of `x`", "num_workers=0", 'if __name__ == "__main__":`'):
        assert part in note
    assert not multiprocessing.active_children()


HERE = pathlib.Path(__file__).parent


def with_path(folder):
    """Returns the environment, with a folder to import from."""
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def run(*command, **options):
    options |= {"capture_output": True, "text": True, "timeout": 300}
    return subprocess.run([sys.executable, *command], **options)


UNPACKED = """
import jax
import numpy as np
from torch.utils.data import DataLoader, Dataset

from jaxdp.data import open_loader


class Unpacked(Dataset):
    def __setstate__(self, state):
        vars(self).update(state, platforms=jax.config.jax_platforms)

    def __len__(self):
        return 2

    def __getitem__(self, i):
        return np.array([self.platforms == "cpu", jax.config.jax_platforms == "cpu"])


if __name__ == "__main__":
    print(jax.config.jax_platforms)
    dataset = Unpacked()
    dataset.any = 1  # else there is nothing to unpack
    loader = DataLoader(dataset, 2, num_workers=1)
    (batch,) = open_loader(loader, "train_loader", seed=0).read_epoch()
    print(batch.tolist())
"""


@pytest.mark.slow
def test_workers_leave_gpus_alone_before_they_unpack_their_dataset(tmp_path):
    """Which may hold arrays of JAX's."""
    script = tmp_path / "script.py"
    script.write_text(UNPACKED)
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    done = run(str(script), env=environment)
    assert done.stdout.splitlines() == ["None", str([[True] * 2] * 2)], done.stderr


SESSION = """
import warnings

warnings.simplefilter("error")  # no fork
from torch.utils.data import DataLoader

from jaxdp.data import open_loader
from squares import Squares


class Rows(Squares):
    pass

loader = DataLoader(Rows(), 4, num_workers=1)
next(open_loader(loader, "train_loader", seed=0).read_epoch())
"""


def test_a_dataset_of_a_notebook_gets_the_remedy():
    done = run("-c", SESSION, env=with_path(HERE))
    assert "notebook (put it into a module)" in done.stderr


class Dying(Squares):
    def __getitem__(self, index):
        if index == 6:
            os._exit(3)
        return super().__getitem__(index)


def test_workers_that_end_later_are_explained():
    # What the next batches are sent by ends with them, so the error varies.
    loader = DataLoader(Dying(), 4, num_workers=1)
    with pytest.raises((RuntimeError, ConnectionError, EOFError)) as raised:
        Trainer(linear(1, 1), loss_fn=loss_of_squares).fit(loader)
    notes = " ".join(raised.value.__notes__)
    assert "a worker of `train_loader` ended" in notes and '"__main__":`' in notes


class Drawing(Squares):
    def __init__(self):
        self.rng = np.random.default_rng(0)


class Holding(Squares):
    def __init__(self, **parts):
        vars(self).update(parts, library=np, kind=Drawing)


def of_subset(dataset):
    return {"dataset": Subset(dataset, range(4))}


class Collates(Drawing):
    def __call__(self, rows):
        return default_collate(rows)


@pytest.mark.parametrize("parts, names", [
    ({"dataset": Drawing(), "num_workers": 0}, []),
    ({"dataset": Drawing()}, ["dataset's `rng`"]),
    (of_subset(Drawing()), ["dataset's `dataset.rng`"]),
    (of_subset(Holding(part=Drawing())), ["dataset's `dataset.part.rng`"]),
    (of_subset(Holding(parts=[Drawing()], by_name={"rng": random.Random(0)})),
     ["dataset's `dataset.parts.0.rng`", "dataset's `dataset.by_name.rng`"]),
    ({"collate_fn": Collates()}, ["collate_fn's `rng`"]),
])  # fmt: skip
def test_generators_that_workers_copy_are_warned_of(parts, names):
    options = {"dataset": Squares(), "batch_size": 4, "num_workers": 2} | parts
    source = open_loader(DataLoader(**options), "loader", 0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        source.start_training()
    copies = [str(w.message) for w in seen if "has a copy" in str(w.message)]
    assert len(copies) == len(names)
    for message, name in zip(copies, names, strict=True):
        assert re.search(rf"copy of the {name}, a (Generator|Random),", message)


WAITING = '''
"""Trains with workers that last, and then does nothing."""
import time
from multiprocessing import active_children, forkserver
from torch.utils.data import DataLoader
from toys import On, make_small, rows

def wait(trainer, metrics):
    server = forkserver._forkserver._forkserver_pid
    print(server, *[child.pid for child in active_children()], flush=True)
    time.sleep(600)

if __name__ == "__main__":
    pairs = [*zip(*rows(16), strict=True)]
    loader = DataLoader(pairs, 4, num_workers=2, persistent_workers=True)
    make_small(callbacks=[On(on_train_epoch_end=wait)]).fit(loader)
'''


def is_running(pid):
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not pathlib.Path("/proc/self/stat").exists(), reason="no /proc")
def test_workers_end_with_a_killed_trainer(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(WAITING)
    command, options = [sys.executable, "-W", "ignore", str(script)], {"text": True}
    options |= {"env": with_path(HERE.parent), "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **options) as trainer:
        assert trainer.stdout is not None
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        trainer.kill()
    assert len(pids) == 3  # the fork server, and the workers
    end = time.monotonic() + 10
    while (left := [*filter(is_running, pids)]) and time.monotonic() < end:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
