"""A run resumes with other callbacks: no state gets another meaning."""

import numpy as np
import pytest
from toys import batches, injected, make_small, scores

from jaxdp.callbacks import CSVLogger, EarlyStopping, ModelCheckpoint, ReduceLROnPlateau


def trainer_with(*callbacks):
    made_up = scores(range(9, 0, -1)), scores(range(9), "val_area")
    callbacks = [*made_up, *callbacks]
    return make_small(None, injected(), callbacks=callbacks, log_every_n_steps=1)


def fit(trainer, epochs, **options):
    return trainer.fit(batches(8, 8), batches(8), max_epochs=epochs, **options)


def run(callback, folder, epochs=1):
    """Fits a trainer with a callback; returns a checkpoint of it."""
    trainer = trainer_with(callback)
    fit(trainer, epochs)
    return trainer.save(folder / "saved")


@pytest.mark.parametrize("saved, resumed", [
    (EarlyStopping("val_loss", patience=2),
     EarlyStopping("val_area", mode="max", patience=2)),
    (EarlyStopping("val_area", patience=9),
     EarlyStopping("val_area", mode="max", patience=2)),
    (ReduceLROnPlateau("val_loss"),
     ReduceLROnPlateau("val_area", mode="max", patience=1)),
    (ReduceLROnPlateau("val_area", mode="min"),
     ReduceLROnPlateau("val_area", mode="max", patience=1)),
    (ModelCheckpoint("d"), ModelCheckpoint("d", "val_area", "max")),
    (ModelCheckpoint("d", "val_loss"), ModelCheckpoint("d", "val_area", "max")),
    (ModelCheckpoint("d", "val_area"), ModelCheckpoint("d", "val_area", "max")),
    (ModelCheckpoint("d", "val_area", "max"), ModelCheckpoint("d")),
])  # fmt: skip
def test_another_monitor_or_mode_starts_afresh_with_one_warning(
    saved, resumed, tmp_path
):
    for callback in (saved, resumed):
        if isinstance(callback, ModelCheckpoint):
            callback.dirpath = str(tmp_path / "d")
    path, second = run(saved, tmp_path, epochs=4), trainer_with(resumed)
    name = type(saved).__name__
    with pytest.warns(UserWarning) as told:
        fit(second, 8, ckpt_path=path)
    (text,) = [str(each.message) for each in told]
    assert f"has no state for the callback {name} (" in text
    assert second.global_step == 16  # all values improve
    assert float(second.hyperparams["learning_rate"]) == np.float32(0.1)
    if isinstance(resumed, ModelCheckpoint):
        assert resumed.last_model_path == str(tmp_path / "d" / "16")
        assert resumed.best_model_path == str(tmp_path / "d" / "16")
        assert (tmp_path / "d" / "16").is_dir()


@pytest.mark.filterwarnings("ignore:.*no state for the callback")
def test_no_checkpoint_is_deleted_for_scores_of_another_monitor(tmp_path):
    fit(trainer_with(ModelCheckpoint(tmp_path, save_top_k=-1)), 3)
    resumed = ModelCheckpoint(tmp_path, "val_loss")
    fit(trainer_with(resumed), 6, ckpt_path="auto")
    kept = {path.name for path in tmp_path.rglob("*") if path.name.isdecimal()}
    assert kept == {"2", "4", "6", "12"} and resumed.best_model_score == 4.0
    with pytest.raises(
        ValueError, match="of no checkpoint in .* was 'val_area' measured"
    ):
        fit(trainer_with(ModelCheckpoint(tmp_path, "val_area")), 7, ckpt_path="best")


@pytest.mark.parametrize("name", ["runs", "renamed"])
def test_a_folder_that_was_moved_keeps_its_scores(name, tmp_path):
    saver = ModelCheckpoint(tmp_path / "runs", "val_loss", save_top_k=2)
    first = trainer_with(saver, CSVLogger(tmp_path / "runs"))
    fit(first, 3)
    there = tmp_path / "elsewhere" / name
    there.parent.mkdir()
    (tmp_path / "runs").rename(there)
    moved = ModelCheckpoint(there, "val_loss", save_top_k=2)
    fit(trainer_with(moved, CSVLogger(there)), 4, ckpt_path="last")
    assert sorted(p.name for p in there.iterdir() if p.name.isdecimal()) == ["6", "8"]
    assert not (there / "before-1").exists()
