"""Arguments of callbacks: paths are those of the folder they were given in; reprs."""

import os

import pytest
from toys import On, batches
from toys import linear_on_one_device as make

from jaxdp import Callback
from jaxdp.callbacks import (
    CSVLogger,
    EarlyStopping,
    LivePlot,
    ModelCheckpoint,
    NanGuard,
    Profiler,
    TensorBoardLogger,
)

DATA = batches(8, 8, 8)


@pytest.mark.parametrize("callback", [
    lambda: CSVLogger("runs"),
    lambda: TensorBoardLogger("runs"),
    lambda: ModelCheckpoint("runs", every_n_train_steps=1, save_top_k=-1),
    lambda: Profiler("runs", start_step=2, num_steps=1),
    lambda: LivePlot("runs/curves.png"),
    *(CSVLogger, TensorBoardLogger, ModelCheckpoint, LivePlot),
    lambda: Profiler(start_step=2, num_steps=1),
])  # fmt: skip
def test_a_change_of_the_working_directory_splits_no_run(
    tmp_path, monkeypatch, callback
):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second, first / "runs"):
        folder.mkdir()
    monkeypatch.chdir(first)
    leave = On(on_train_batch_end=lambda *_: os.chdir(second))
    options = {"default_root_dir": "runs", "log_every_n_steps": 2}
    trainer = make(leave, callback(), **options)
    trainer.fit(DATA, DATA[:1], max_epochs=2)
    assert os.listdir(second) == []
    assert [name for name in os.listdir(first) if name != "runs"] == []


def test_a_repr_has_the_arguments_that_differ_from_their_defaults(tmp_path):
    class Mine(Callback):
        def __init__(self, path):
            self.path = path

    assert repr(Mine(3)) == "Mine(path=3)"
    assert repr(NanGuard()) == "NanGuard()"
    assert repr(NanGuard("skip")) == "NanGuard(action='skip')"
    stopping = EarlyStopping("loss", patience=5)
    assert repr(stopping) == "EarlyStopping(monitor='loss', patience=5, mode='min')"
    assert repr(CSVLogger(tmp_path)) == f"CSVLogger(dirpath={str(tmp_path)!r})"
