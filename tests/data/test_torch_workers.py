"""Workers of torch loaders: the same batches, put together and sent faster."""

import multiprocessing
import os
import subprocess
import sys

import equinox as eqx
import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from squares import Squares, assert_same, flat  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from jaxdp import Trainer  # noqa: E402
from jaxdp.callbacks import ModelCheckpoint  # noqa: E402
from jaxdp.data import Position, open_loader  # noqa: E402
from jaxdp.data.conversion import to_host  # noqa: E402
from jaxdp.data.torch_source import TorchSource  # noqa: E402
from jaxdp.data.torch_workers import PIPE_BYTES  # noqa: E402


def linear():
    return eqx.nn.Linear(1, 1, key=jax.random.key(0))


def test_a_worker_that_imports_a_script_that_trains_says_so_at_once(
    monkeypatch, tmp_path
):
    saver = ModelCheckpoint(tmp_path / "checkpoints")
    trainer = Trainer(linear(), loss_fn=lambda *_: 0.0, callbacks=[saver])
    worker = multiprocessing.current_process()
    monkeypatch.setattr(worker, "_inheriting", True, raising=False)
    for train in (trainer.fit, trainer.steps):
        with pytest.raises(
            RuntimeError, match="put the training under `if __name__ == "
        ):
            train(DataLoader(Squares(), 4))
    assert not (tmp_path / "checkpoints").exists()


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


def test_random_augmentations_are_the_same_for_any_number_of_workers():
    def epochs_with(workers):
        dataset = Squares(16, noisy=True)
        loader = DataLoader(dataset, 4, shuffle=True, num_workers=workers)
        source = open_loader(loader, "train_loader", seed=5)
        return [flat(source.epoch(Position(epoch))) for epoch in range(2)]

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
        assert_same(source.epoch(Position(epoch)), plain)
    assert loader.multiprocessing_context is None


def test_batches_fit_into_the_pipe_that_they_come_through(monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    if not hasattr(fcntl, "F_GETPIPE_SZ"):
        pytest.skip("only Linux has wider pipes")
    sizes, set_size = [], fcntl.fcntl

    def noted(pipe, *arguments):
        try:
            return set_size(pipe, *arguments)
        finally:
            sizes.append(set_size(pipe, fcntl.F_GETPIPE_SZ))

    monkeypatch.setattr(fcntl, "fcntl", noted)
    plain = DataLoader(Squares(), 4)
    loader = DataLoader(Squares(), 4, num_workers=1)
    assert_same(open_loader(loader, "train_loader", seed=0).epoch(), plain)
    # Where that is forbidden, they come through a narrow one.
    monkeypatch.setattr(fcntl, "F_SETPIPE_SZ", -1)
    assert_same(open_loader(loader, "train_loader", seed=0).epoch(), plain)
    assert sizes == [PIPE_BYTES, 2**16]


class Platforms(Squares):
    """What a worker's JAX may open."""

    def __getitem__(self, i):
        return np.array(jax.config.jax_platforms == "cpu")


def test_workers_never_open_a_gpu():
    loader = DataLoader(Platforms(), 4, num_workers=1)
    for batch in open_loader(loader, "train_loader", seed=0).epoch():
        assert np.asarray(batch).all()


def test_parts_that_workers_cannot_import_are_refused_with_the_remedy(monkeypatch):
    # As in a script; a process of pytest-xdist has no file, as a notebook has none.
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", __file__, raising=False)
    loader = DataLoader(Squares(), 4, num_workers=1, collate_fn=lambda items: items)
    with pytest.raises(TypeError, match="can't be sent to its workers.*num_workers=0"):
        list(open_loader(loader, "train_loader", seed=0).epoch())


class Held(Squares):
    def __getstate__(self):
        raise RuntimeError("holds a lock")


class Broken(torch.utils.data.Sampler):
    def __init__(self):
        pass

    def __iter__(self):
        raise ValueError("nothing to draw from")


def test_errors_of_sending_and_of_samplers_are_told_apart():
    loader = DataLoader(Held(), 4, num_workers=1)
    with pytest.raises(TypeError, match="`x` can't be sent to its workers: holds a l"):
        list(open_loader(loader, "x", seed=0).epoch())
    loader = DataLoader(Squares(), 4, num_workers=1, sampler=Broken())
    with pytest.raises(ValueError, match="nothing to draw from"):
        list(open_loader(loader, "x", seed=0).epoch())
    assert not multiprocessing.active_children()


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

from jaxdp.data import open_loader
from jaxdp.data import Position


class Imported(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return np.array([i, own.library.PID == os.getpid()])


if __name__ == "__main__":
    sysconfig.get_path = lambda name: os.path.dirname(own.library.__file__)
    loader = DataLoader(Imported(), 2, num_workers=1)
    print(next(open_loader(loader, "train_loader", seed=0).epoch()).tolist())
"""


@pytest.mark.slow
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


UNPACKED = """
import jax
import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset

from jaxdp.data import open_loader


class Unpacked:
    def __setstate__(self, state):
        vars(self).update(state, platforms=jax.config.jax_platforms)

    def __len__(self):
        return 2

    def __getitem__(self, i):
        return np.array([self.platforms == "cpu", jax.config.jax_platforms == "cpu"])


class Indexed(Unpacked, Dataset):
    pass


class Stream(Unpacked, IterableDataset):
    def __iter__(self):
        return iter([self[0], self[1]])


if __name__ == "__main__":
    print(jax.config.jax_platforms)
    for dataset in Indexed(), Stream():
        dataset.any = 1  # else there is nothing to unpack
        loader = DataLoader(dataset, 2, num_workers=1)
        (batch,) = open_loader(loader, "train_loader", seed=0).epoch()
        print(batch.tolist())
"""


@pytest.mark.slow
def test_workers_leave_gpus_alone_before_they_unpack_their_dataset(tmp_path):
    """Which may hold arrays of JAX's."""
    script = tmp_path / "script.py"
    script.write_text(UNPACKED)
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    true = [[True, True]] * 2
    assert done.stdout.splitlines() == ["None", str(true), str(true)], done.stderr


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
    found = list(TorchSource(loader, "loader", seed=0).epoch())
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
        list(TorchSource(DataLoader(Uneven(""), 3), "loader", seed=0).epoch())
