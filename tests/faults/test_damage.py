"""Files of a checkpoint that come to harm after it was saved."""

import os
import pathlib
import random
import re
import shutil
import warnings

import pytest
from how_long import LONG
from toys import assert_equal_leaves, batches, leaves
from toys import on_one_device as make

from jaxdp.callbacks import ModelCheckpoint
from jaxdp.checkpoint import CheckpointCorrupt

FLIPS = 60 if LONG else 5


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
    """Contents of a file after each harm; None if it is lost."""
    generator = random.Random(len(content))
    for _ in range(FLIPS):
        yield flipped(content, generator)
    yield content[:-1]
    yield content[: len(content) // 2]
    yield b""
    yield None  # the file is lost
    middle = len(content) // 3
    yield content[:middle] + bytes(512) + content[middle + 512 :]
    yield content + content


def test_damage_to_any_file_is_seen_or_harmless(saved, table):
    folder, expected = saved
    tried = harmless = 0
    trainer = make()
    for path in sorted((folder / "4").rglob("*")):
        if path.is_dir() or path.stat().st_size == 0:
            continue
        whole = path.read_bytes()
        for content in harms(whole):
            path.unlink() if content is None else path.write_bytes(content)
            tried += 1
            try:
                trainer.load(folder / "4")
            except CheckpointCorrupt as error:
                assert str(folder / "4") in str(error)
            else:
                assert_equal_leaves(leaves(trainer), expected)
                assert (trainer.global_step, trainer.current_epoch) == (4, 1)
                harmless += 1
            path.write_bytes(whole)
    trainer.load(folder / "4")
    fault = "each file of a checkpoint: a flipped bit, zeros, cut off, longer, lost"
    damaged = f"{tried - harmless} times `the checkpoint ... is damaged`"
    table.add(fault, f"{damaged}; the others were harmless", tried)


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


@pytest.mark.slow_cases("auto")
@pytest.mark.parametrize("word", ["last", "auto"])
def test_the_newest_whole_one_is_used(saved, table, tmp_path, word):
    folder = copied(saved[0], tmp_path)
    harm(folder, 4)
    trainer = make(ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1))
    with pytest.warns(UserWarning, match=r"run/4 is damaged.*Skipped"):
        trainer.fit(batches(8, 8, 8, 8), ckpt_path=word)
    assert_equal_leaves(leaves(trainer), saved[1])
    assert (folder / "before-1" / "4").is_dir()
    make().load(folder / "4")
    saw = "a warning that names it; the previous one is used"
    table.add("the newest checkpoint is damaged", saw)


def make_links(folder, *steps):
    for step in steps:
        shutil.rmtree(folder / str(step))
        (folder / str(step)).symlink_to(folder.parent)


@pytest.mark.filterwarnings("ignore:.*is damaged", "ignore:.*a symbolic link or")
@pytest.mark.parametrize("spoil", [harm, make_links])
def test_a_run_does_not_start_over_when_all_are_damaged(saved, table, tmp_path, spoil):
    folder = copied(saved[0], tmp_path)
    spoil(folder, 2, 4)
    trainer = make(ModelCheckpoint(folder))
    with pytest.raises(CheckpointCorrupt, match="(?s)none is whole.*4.*2.*Nothing w"):
        trainer.fit(batches(8), ckpt_path="auto")
    assert trainer.global_step == 0
    assert set(os.listdir(folder)) == {".lock", "2", "4"}
    saw = "an error; the run does not start over"
    table.add("all checkpoints are damaged, or links", saw)


def test_links_and_strange_folders_are_refused(saved, table, tmp_path):
    folder = copied(saved[0], tmp_path)
    (folder / "6").symlink_to(folder / "4")
    (folder / "007").mkdir()
    (folder / "-1").mkdir()
    (folder / "8").mkdir()  # empty
    trainer = make(ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1))
    with (
        pytest.warns(UserWarning, match="6 is a symbolic link or a file"),
        pytest.warns(UserWarning, match="no checkpoint at .*/8"),
    ):
        trainer.fit(batches(8, 8, 8, 8), ckpt_path="last", max_epochs=2)
    assert trainer.global_step == 8
    (tmp_path / "empty").mkdir()
    before = sorted(os.listdir(folder))
    for path in (folder, tmp_path / "empty", pathlib.Path(__file__)):
        with pytest.raises(FileNotFoundError, match=str(path)):
            make().load(path)
    assert sorted(os.listdir(folder)) == before
    saw = "an error that says what is there, or a warning"
    table.add("links, empty and foreign folders", saw, tries=4)


def swap(a, b):
    a.rename(a.parent / "between")
    b.rename(a)
    (a.parent / "between").rename(b)


# What is done to the folder of a run with steps 2 and 4, and what the user is told.
MISCHIEF = {
    "files are swapped between steps": (
        lambda run: swap(run / "4" / "state", run / "2" / "state"), "4 is damaged"),
    "steps change names": (
        lambda run: swap(run / "4", run / "2"),
        "4 has step 2, and not that of its name"),
    "metadata of another step": (
        lambda run: swap(run / "4" / "meta", run / "2" / "meta"), "4 is damaged"),
    "a step becomes a link": (
        lambda run: make_links(run, 4), "4 is a symbolic link or a file"),
    "a step becomes a file": (
        lambda run: (shutil.rmtree(run / "4"), (run / "4").write_text("")),
        "4 is a symbolic link or a file"),
    "a file more": (
        lambda run: (run / "4" / "state" / "more").write_text("x"),
        "4 is damaged: changed since it was saved.*state/more"),
    "the list of files is no list": (
        lambda run: (run / "4" / "files.json").write_text("null"),
        "files.json is not a list of files"),
}  # fmt: skip


@pytest.mark.slow_cases("steps change names", "a step becomes a file", "a file more")
@pytest.mark.parametrize("what", MISCHIEF)
def test_mischief_is_told_and_the_run_ends_as_it_should(saved, table, tmp_path, what):
    folder = copied(saved[0], tmp_path)
    harm, told = MISCHIEF[what]
    harm(folder)
    trainer = make(ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(batches(8, 8, 8, 8), ckpt_path="auto")
        except CheckpointCorrupt:  # both are damaged
            shutil.rmtree(folder)
            trainer = make(ModelCheckpoint(folder))
            trainer.fit(batches(8, 8, 8, 8))
    assert any(re.search(told, str(warning.message)) for warning in caught)
    assert_equal_leaves(leaves(trainer), saved[1])
    saw = "a warning or an error that names it"
    table.add("files, metadata or folders are swapped, forged or replaced", saw)
