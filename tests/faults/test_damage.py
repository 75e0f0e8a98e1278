"""Files of a checkpoint that come to harm after it was saved."""

import os
import pathlib
import random
import shutil
import warnings

import jax
import numpy as np
import optax
import pytest
from conftest import LONG
from toys import Mlp, batches

from jaxdp import SingleDevice, Trainer
from jaxdp.callbacks import ModelCheckpoint
from jaxdp.checkpoint import CheckpointCorrupt

FLIPS = 60 if LONG else 5


def make(*callbacks):
    return Trainer(
        Mlp(jax.random.key(0)),
        optax.adam(1e-2),
        loss="cross_entropy",
        strategy=SingleDevice(),
        callbacks=callbacks,
        enable_progress_bar=False,
    )


def leaves(trainer):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(trainer.state)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with checkpoints of steps 2 and 4, and the state of step 4."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    trainer = make(ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1))
    trainer.fit(batches(8, 8, 8, 8))
    return folder, leaves(trainer)


def flipped(content, generator):
    position = generator.randrange(len(content))
    bit = bytes([content[position] ^ 1 << generator.randrange(8)])
    return content[:position] + bit + content[position + 1 :]


def harms(content):
    """Names of harms, and what they leave of a file (None: nothing)."""
    generator = random.Random(len(content))
    for _ in range(FLIPS):
        yield "a bit is flipped", flipped(content, generator)
    yield "a file is cut off", content[:-1]
    yield "a file is cut off", content[: len(content) // 2]
    yield "a file is cut off", b""
    yield "a file is lost", None
    middle = len(content) // 3
    yield "a block is zeros", content[:middle] + bytes(512) + content[middle + 512 :]
    yield "a file is longer", content + content


def test_damage_to_any_file_is_seen_or_harmless(saved, table):
    folder, expected = saved
    tried, harmless = {}, {}
    trainer = make()
    for path in sorted((folder / "4").rglob("*")):
        if path.is_dir() or path.stat().st_size == 0:
            continue
        whole = path.read_bytes()
        for what, content in harms(whole):
            path.unlink() if content is None else path.write_bytes(content)
            tried[what] = tried.get(what, 0) + 1
            try:
                trainer.load(folder / "4")
            except CheckpointCorrupt as error:
                assert str(folder / "4") in str(error)
            else:
                for ours, theirs in zip(leaves(trainer), expected, strict=True):
                    np.testing.assert_array_equal(ours, theirs, str(path))
                assert (trainer.global_step, trainer.current_epoch) == (4, 1)
                harmless[what] = harmless.get(what, 0) + 1
            path.write_bytes(whole)
    trainer.load(folder / "4")
    for what, count in tried.items():
        seen = count - harmless.get(what, 0)
        table.add(
            f"{what}, in every file of a checkpoint",
            count,
            count,
            f"{seen} times `the checkpoint ... is damaged`, else no harm was done",
        )


def data_file(step):
    """The largest file, which has the arrays in it."""
    return max(step.rglob("*"), key=lambda path: path.stat().st_size)


def copied(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    return tmp_path / "run"


def harm(folder, *steps):
    for step in steps:
        path = data_file(folder / str(step))
        path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize("word", ["last", "auto"])
def test_the_newest_whole_one_is_used(saved, table, tmp_path, word):
    folder = copied(saved[0], tmp_path)
    harm(folder, 4)
    trainer = make(ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1))
    with pytest.warns(UserWarning, match=r"run/4 is damaged.*Skipped"):
        trainer.fit(batches(8, 8, 8, 8), ckpt_path=word)
    for ours, theirs in zip(leaves(trainer), saved[1], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert (folder / "before-1" / "4").is_dir()
    make().load(folder / "4")
    table.add(
        "the newest checkpoint is torn",
        1,
        1,
        "a warning that names it; the one before is used",
    )


def test_a_run_does_not_start_over_when_all_are_damaged(saved, table, tmp_path):
    folder = copied(saved[0], tmp_path)
    harm(folder, 2, 4)
    trainer = make(ModelCheckpoint(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(
            CheckpointCorrupt, match="(?s)none is whole.*4.*2.*Nothing w"
        ):
            trainer.fit(batches(8), ckpt_path="auto")
    assert trainer.global_step == 0
    assert sorted(os.listdir(folder)) == [".lock", "2", "4"]
    table.add(
        "all checkpoints are torn", 1, 1, "an error; nothing is changed or started over"
    )


def test_links_and_strange_folders_are_refused(saved, table, tmp_path):
    folder = copied(saved[0], tmp_path)
    (folder / "6").symlink_to(folder / "4")
    (folder / "007").mkdir()
    (folder / "-1").mkdir()
    (folder / "8").mkdir()  # empty
    saver = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
    trainer = make(saver)
    with pytest.warns(UserWarning, match="no checkpoint at .*/8"):
        trainer.fit(batches(8, 8, 8, 8), ckpt_path="last", max_epochs=2)
    assert trainer.global_step == 8
    meta = folder / "4" / "meta" / "metadata"
    shutil.copy(meta, tmp_path / "elsewhere")
    meta.unlink()
    meta.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointCorrupt, match="is a symbolic link"):
        make().load(folder / "4")
    empty = tmp_path / "empty"
    empty.mkdir()
    for path, error in (
        (folder, FileNotFoundError),  # has checkpoints in it
        (empty, FileNotFoundError),
        (pathlib.Path(__file__), NotADirectoryError),
    ):
        before = sorted(os.listdir(folder))
        with pytest.raises(error, match=str(path)):
            make().load(path)
        assert sorted(os.listdir(folder)) == before
    table.add(
        "links, empty and foreign folders",
        5,
        5,
        "an error that says what is there, or a warning",
    )
