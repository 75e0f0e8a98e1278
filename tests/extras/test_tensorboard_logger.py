"""Event files for TensorBoard."""

import jax
import pytest
from shown_events import events
from toys import On, batches, linear_trainer

from jaxdp.callbacks import TensorBoardLogger


def test_a_resumed_run_removes_later_events(tmp_path):
    pytest.importorskip("tensorboard")
    data = batches(*[8] * 4), batches(8)
    whole, trainer, again = (
        linear_trainer(TensorBoardLogger(tmp_path / name))
        for name in ("whole", "a", "a")
    )
    whole.fit(*data, max_epochs=3)
    trainer.fit(*data, max_epochs=1)
    path = trainer.save(tmp_path / "saved")
    trainer.fit(*data, max_epochs=2)
    (tmp_path / "a" / "events.out.tfevents.1.other").write_text("of another run")
    again.fit(*data, max_epochs=3, ckpt_path=path)
    (tmp_path / "a" / "events.out.tfevents.1.other").unlink()
    assert events(tmp_path / "a") == events(tmp_path / "whole")


def test_tensorboard_reads_values_texts_and_figures(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def note(trainer, metrics):
        logger.log_text("note", "4 bytes per device")
        logger.log_figure("curves", trainer.history.plot())

    logger = TensorBoardLogger(tmp_path, hyperparameters={"width": 64})
    trainer = linear_trainer(logger, On(on_train_epoch_end=note))
    history = trainer.fit(batches(*[8] * 4), batches(8))
    found = EventAccumulator(str(tmp_path)).Reload()

    def scalars(tag):
        return [(event.step, event.value) for event in found.Scalars(tag)]

    assert [step for step, _ in scalars("loss")] == [2, 4]
    assert scalars("val_loss") == [(4, pytest.approx(history["val_loss"][0]))]
    assert scalars("epoch_loss") == [(4, pytest.approx(history["loss"][0]))]
    texts = {
        tag: found.Tensors(tag)[0].tensor_proto.string_val[0].decode()
        for tag in found.Tags()["tensors"]
        if found.SummaryMetadata(tag).plugin_data.plugin_name == "text"
    }
    assert texts["note"] == "4 bytes per device"
    assert "| width | 64 |" in texts["hyperparameters"]
    assert "polynomial_schedule(" in texts["hyperparameters"]
    assert f"| versions/jax | {jax.__version__} |" in texts["environment"]
    (image,) = found.Images("curves")
    assert image.encoded_image_string.startswith(b"\x89PNG") and image.step == 4
    with pytest.raises(RuntimeError, match="writes during a fit only"):
        logger.log_text("late", "")
