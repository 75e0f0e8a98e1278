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

DATA = batches(16, 16, 5)
ODD = ["lr=0.1,seed=[1]", "a*b", "a?b", "[", "back\\slash", "new\n\udcff"]
HARMLESS = [
    "spa ce", "\u00fc\u4e16", "100%25", "#{x}", "'\"", "new\nline", "-dash", "gs:x",
    "~", "$HOME;&|", "trailing.",
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


@pytest.mark.parametrize("name", HARMLESS)
def test_a_checkpoint_in_a_folder_of_any_other_name_comes_back(name, trained, tmp_path):
    path = trained.save(tmp_path / name / name)
    assert os.listdir(tmp_path / name) == [name]
    again = make()
    again.load(path)
    model = jaxdp.load_model(path, like=Mlp(jax.random.key(1)))
    for found in (again.model, model):
        for ours, theirs in zip(weights(found), weights(trained.model), strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", ODD)
def test_a_name_that_orbax_misreads_is_refused_before_the_first_step(
    name, trained, tmp_path
):
    for folder in (tmp_path / name, tmp_path / name / "runs"):
        saver = ModelCheckpoint(folder, every_n_train_steps=2)
        with pytest.raises(ValueError, match="`dirpath`: Orbax, which .* Rename"):
            make([saver]).fit(DATA, max_epochs=1)
        with pytest.raises(ValueError, match="`path`: Orbax, which .* Rename"):
            trained.save(folder)
    assert os.listdir(tmp_path) == []


def test_checkpoints_in_folders_of_such_names_stay_readable(trained, tmp_path):
    """Brackets hinder Orbax in writing alone."""
    trained.save(tmp_path / "plain" / "9")
    for name in ("lr=0.1,seed=[1]", "back\\slash"):
        (tmp_path / "plain").rename(tmp_path / name)
        (tmp_path / "plain").symlink_to(tmp_path / name)
        paths = [tmp_path / "plain" / "9"]
        if "\\" in name:
            with pytest.raises(ValueError, match="Rename the folder"):
                make().load(tmp_path / name / "9")
        else:
            paths.append(tmp_path / name / "9")
        for path in paths:
            again = make()
            again.load(path)
            for ours, theirs in zip(leaves(again), leaves(trained), strict=True):
                np.testing.assert_array_equal(ours, theirs)
        (tmp_path / "plain").unlink()
        (tmp_path / name).rename(tmp_path / "plain")


def test_what_cannot_be_read_back_is_given_no_name(trained, tmp_path, monkeypatch):
    seal = jaxdp.checkpoint.saving._seal

    def lose(path, shapes):
        (manifest,) = glob.glob(f"{path}.*/state/manifest.ocdbt")
        os.remove(manifest)
        seal(path, shapes)

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
