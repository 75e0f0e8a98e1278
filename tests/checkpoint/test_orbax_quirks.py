"""Checkpoints in folders of any name."""

import glob
import os
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from toys import Mlp, batches

import jaxdp
from jaxdp import SingleDevice, Trainer
from jaxdp.callbacks import ModelCheckpoint
from jaxdp.checkpoint import SaveFailed
from jaxdp.checkpoint.orbax_quirks import unreadable
from jaxdp.cli import main

DATA = batches(16, 16, 5)
ODD = ["lr=0.1,seed=[1]", "a*b", "a?b", "[", "back\\slash"]
HARMLESS = [
    "spa ce", "\u00fc\u4e16", "100%25", "#{x}", "'\"", "new\nline", "-dash", "gs:x",
    "~", "$HOME;&|", "trailing.", "\udcff",
]  # fmt: skip


def make(callbacks=()):
    return Trainer(
        Mlp(jax.random.key(0)),
        optax.adam(1e-2),
        loss="cross_entropy",
        strategy=SingleDevice(),
        callbacks=callbacks,
        enable_progress_bar=False,
    )


def leaves(trainer):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(trainer.state.params)]


def weights(model):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(model)]


@pytest.fixture(scope="module")
def trained():
    trainer = make()
    trainer.fit(DATA, max_epochs=1)
    return trainer


@pytest.mark.parametrize("name", ODD + HARMLESS)
def test_a_checkpoint_in_a_folder_of_any_name_comes_back(name, trained, tmp_path):
    # What a glob or a file system of another kind could take for it.
    for near in ("lr=0.1,seed=1", "axb", "back/slash"):
        (tmp_path / near / near).mkdir(parents=True)
    path = trained.save(tmp_path / name / name)
    assert os.listdir(tmp_path / name) == [name]
    again = make()
    again.load(path)
    model = jaxdp.load_model(path, like=Mlp(jax.random.key(1)))
    for found in (again.model, model):
        for ours, theirs in zip(weights(found), weights(trained.model), strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", ["lr=0.1,seed=[1]", "back\\slash", "new\n\udcff"])
def test_a_run_in_a_folder_of_any_name_is_gone_on_with(name, trained, tmp_path):
    folder = tmp_path / name
    saver = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
    make([saver]).fit(DATA, max_steps=2)
    assert set(os.listdir(folder)) == {".lock", "2"}
    resumed = make([saver])
    resumed.fit(DATA, max_epochs=1, ckpt_path="auto")
    for ours, theirs in zip(leaves(resumed), leaves(trained), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", ODD)
def test_weights_are_exported_from_and_to_a_folder_of_any_name(name, trained, tmp_path):
    pytest.importorskip("safetensors")
    path = trained.save(tmp_path / name / name)
    out = tmp_path / f"{name}.safetensors"
    assert main(["export", path, str(out)]) == 0
    model = jaxdp.load_model(out, like=Mlp(jax.random.key(1)))
    for ours, theirs in zip(weights(model), weights(trained.model), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_plain_orbax_reads_what_lies_under_brackets(trained, tmp_path):
    path = trained.save(tmp_path / "lr=0.1,seed=[1]" / "9")
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(os.path.join(path, "state"))
    kernel = state["params"]["first.weight"]
    np.testing.assert_array_equal(kernel, trained.model.first.weight)


def test_nothing_is_left_where_other_programs_look(trained, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    path = trained.save(tmp_path / "[1]")
    trained.load(path)
    assert os.listdir(tmp_path / "tmp") == []
    assert sorted(os.listdir(tmp_path)) == ["[1]", "tmp"]


def test_where_no_link_can_be_made_it_is_said_before_the_first_step(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "[1]"))
    (tmp_path / "[1]").mkdir()
    saver = ModelCheckpoint(tmp_path / "[1]")
    with pytest.raises(OSError, match="`dirpath`.*TMPDIR"):
        make([saver]).fit(DATA, max_epochs=1)


def test_what_cannot_be_read_back_is_given_no_name(trained, tmp_path, monkeypatch):
    seal = jaxdp.checkpoint.saving._seal

    def lose(folder, name, shapes):
        (manifest,) = glob.glob(f"{folder}/{name}.*/state/manifest.ocdbt")
        os.remove(manifest)
        seal(folder, name, shapes)

    monkeypatch.setattr("jaxdp.checkpoint.saving._seal", lose)
    with pytest.raises(SaveFailed, match=r"lack params\.first\.weight"):
        trained.save(tmp_path / "9")
    assert os.listdir(tmp_path) == []


def test_an_array_of_which_a_part_is_missing_is_not_readable(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "9", {"a": {"b": np.ones((3, 2), "float32")}})
    folder = str(tmp_path / "9")
    assert unreadable(folder, {"a.b": (3, 2)}) == []
    assert unreadable(folder, {"a.b": (3, 3), "a.c": ()}) == ["a.b", "a.c"]


@pytest.mark.parametrize("path", ["gs://bucket/run", Path("s3://bucket/run")])
def test_an_address_is_not_taken_for_a_folder(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="`dirpath` must be in a file system"):
        ModelCheckpoint(path)
    with pytest.raises(ValueError, match="`default_root_dir` must be in a file system"):
        Trainer(Mlp(jax.random.key(0)), optax.sgd(1.0), default_root_dir=path)
    with pytest.raises(ValueError, match="`path` must be in a file system"):
        make().save(path)
    assert os.listdir(tmp_path) == []
