"""Checkpoints in folders of odd names."""

import os
import re
from pathlib import Path

import jax
import optax
import pytest
from toys import Mlp, assert_equal_leaves, batches
from toys import on_one_device as make

import jaxdp
from jaxdp import Trainer
from jaxdp.callbacks import ModelCheckpoint

DATA = batches(16, 16, 5)
ODD = ["lr=0.1,seed=[1]", "a*b", "a?b", "[", "back\\slash", "\udcff"]
HARMLESS = ["spa ce", "\u00fc\u4e16", "100%25", "#{x}", "'\"\n", "-dash", "$HOME;&|"]


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
    assert_equal_leaves(again.model, trained.model)
    assert_equal_leaves(model, trained.model)


@pytest.mark.parametrize("name", ODD)
def test_a_name_that_orbax_misreads_is_refused_before_the_first_step(
    name, trained, tmp_path
):
    odd = re.escape(repr(min(set(name) & set("*?[]\\\udcff"))))
    match = f"can't write checkpoints in .*because there is {odd}.*Rename the folder"
    for folder in (tmp_path / name, tmp_path / name / "runs"):
        with pytest.raises(ValueError, match=f"`dirpath`: Orbax {match}"):
            ModelCheckpoint(folder)
        for use in trained.save, trained.load:
            with pytest.raises(ValueError, match=f"`path`: Orbax {match}"):
                use(folder)
    assert os.listdir(tmp_path) == []
    trainer = make(ModelCheckpoint(), default_root_dir=tmp_path / name)
    with pytest.raises(ValueError, match=f"`dirpath`: Orbax {match}"):
        trainer.fit(DATA, max_epochs=1)
    assert trainer.global_step == 0


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
