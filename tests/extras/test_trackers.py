"""W&B and MLflow have the values of a run, as their own readers show."""

import struct
import time

import jax
import pytest
from toys import batches, linear_on_one_device

from jaxdp import Callback
from jaxdp.callbacks import MLFlowLogger, WandbLogger

# Both tools use what their own dependencies have deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")


def make_trainer(*callbacks, **options):
    return linear_on_one_device(*callbacks, log_every_n_steps=2, **options)


class Notes(Callback):
    """Hands a text to the logger, and may fail."""

    def __init__(self, logger, fails=False):
        self.logger, self.fails = logger, fails

    def on_train_epoch_end(self, trainer, metrics):
        self.logger.log_text("note", "4 < 5 bytes")
        self.logger.log_figure("history", trainer.history.plot())
        if self.fails:
            raise RuntimeError("the cable was pulled")


@pytest.fixture
def offline(monkeypatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_SILENT", "WANDB_DISABLE_GIT", "WANDB_DISABLE_CODE"):
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")


def wandb_records(folder):
    """Returns the config, history rows and exit codes in the files of offline runs."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # its service has then written all
    config, rows, codes = {}, [], []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for data in leveldb_records(path.read_bytes()[7:]):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            for update in (record.run.config, record.config):
                config |= {item.key: item.value_json for item in update.update}
                config |= {
                    "/".join(item.nested_key): item.value_json
                    for item in update.update
                    if item.nested_key
                }
            if record.HasField("history"):
                items = record.history.item
                row = {"/".join(i.nested_key) or i.key: i.value_json for i in items}
                rows.append(row)
            if record.HasField("exit"):
                codes.append(record.exit.exit_code)
    return config, rows, codes


def leveldb_records(data, start=7, block=32768):
    """Records of a LevelDB log whose first `start` bytes, a header, are cut off.

    wandb ships no reader in Python any more; its messages are its own.
    """
    place, parts = start, b""
    while place - start + 7 <= len(data):
        if block - place % block < 7:  # the rest of a block is padding
            place += block - place % block
            continue
        header = data[place - start : place - start + 7]
        length, kind = struct.unpack("<4xHB", header)
        parts += data[place - start + 7 : place - start + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_wandb_has_the_run(tmp_path, offline):
    logger = WandbLogger(
        "toys", "first", tmp_path, offline=True, hyperparameters={"width": 64}
    )
    trainer = make_trainer(logger, Notes(logger))
    history = trainer.fit(batches(*[8] * 4), batches(8))
    config, rows, codes = wandb_records(tmp_path)
    assert config["width"] == "64" and config["model"] == '"Linear"'
    assert config["versions/jax"] == f'"{jax.__version__}"'
    steps = [(int(row["step"]), float(row["loss"])) for row in rows if "loss" in row]
    assert [step for step, _ in steps] == [2, 4]
    (last,) = [row for row in rows if "val_loss" in row]
    assert int(last["step"]) == 4
    assert float(last["val_loss"]) == pytest.approx(history["val_loss"][0])
    assert any("history/path" in row for row in rows)
    texts = {
        path.name.split("_")[0]: path.read_text()
        for path in tmp_path.glob("wandb/offline-run-*/files/media/html/*.html")
    }
    assert "4 &lt; 5 bytes" in texts["note"]
    (image,) = tmp_path.glob("wandb/offline-run-*/files/media/images/*.png")
    assert image.read_bytes().startswith(b"\x89PNG")
    assert codes == [0] and logger.run is None


def test_wandb_goes_on_with_a_run_that_is_resumed(tmp_path, offline):
    first = WandbLogger("toys", None, tmp_path, offline=True)
    trainer = make_trainer(first)
    trainer.fit(batches(*[8] * 4))
    trainer.save(str(tmp_path / "saved"))
    time.sleep(1.1)  # W&B names its folders by the second
    second = WandbLogger("toys", None, tmp_path, offline=True)
    resumed = make_trainer(second)
    resumed.load(str(tmp_path / "saved"))
    resumed.fit(batches(*[8] * 4), max_epochs=2)
    assert second.id == first.id
    _, rows, codes = wandb_records(tmp_path)
    assert sorted({int(row["step"]) for row in rows if "loss" in row}) == [2, 4, 6, 8]
    assert codes == [0, 0]


def test_wandb_knows_a_failed_run(tmp_path, offline):
    logger = WandbLogger("toys", None, tmp_path, offline=True)
    with pytest.raises(RuntimeError, match="the cable"):
        make_trainer(logger, Notes(logger, fails=True)).fit(batches(8, 8))
    assert wandb_records(tmp_path)[2] == [1]


@pytest.fixture
def mlflow(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return pytest.importorskip("mlflow")


def test_mlflow_has_the_run(tmp_path, mlflow):
    logger = MLFlowLogger(
        "toys",
        "first",
        dirpath=tmp_path,
        hyperparameters={"width": 64},
        tags={"a": "b"},
    )
    trainer = make_trainer(logger, Notes(logger))
    history = trainer.fit(batches(*[8] * 4), batches(8))
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("toys").experiment_id
    (run,) = client.search_runs([experiment])
    assert run.info.status == "FINISHED" and run.info.run_name == "first"
    assert run.data.params["width"] == "64"
    assert run.data.params["optimizer"] == "EmptyState, EmptyState"
    assert run.data.tags["versions/jax"] == jax.__version__
    assert run.data.tags["a"] == "b"
    loss = client.get_metric_history(run.info.run_id, "loss")
    assert [metric.step for metric in loss] == [2, 4]
    (val_loss,) = client.get_metric_history(run.info.run_id, "val_loss")
    assert val_loss.step == 4
    assert val_loss.value == pytest.approx(history["val_loss"][0])
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert files == {"note.txt", "history.png"}


def test_mlflow_goes_on_with_a_run_that_is_resumed(tmp_path, mlflow):
    first = make_trainer(MLFlowLogger(dirpath=tmp_path))
    first.fit(batches(*[8] * 4))
    first.save(str(tmp_path / "saved"))
    logger = MLFlowLogger(dirpath=tmp_path)
    resumed = make_trainer(logger)
    resumed.load(str(tmp_path / "saved"))
    resumed.fit(batches(*[8] * 4), max_epochs=2)
    client = mlflow.MlflowClient(logger.tracking_uri)
    experiment = client.get_experiment_by_name("jaxdp").experiment_id
    (run,) = client.search_runs([experiment])
    loss = client.get_metric_history(run.info.run_id, "loss")
    assert [metric.step for metric in loss] == [2, 4, 6, 8]
    assert run.info.status == "FINISHED"


def test_mlflow_is_not_sent_where_only_a_checkpoint_says(tmp_path, mlflow, caplog):
    first = make_trainer(MLFlowLogger(dirpath=tmp_path / "first"))
    first.fit(batches(*[8] * 4))
    path = first.save(tmp_path / "saved")
    store = tmp_path / "first" / "mlflow.db"
    store.rename(tmp_path / "moved.db")
    logger = MLFlowLogger(dirpath=tmp_path / "second")
    make_trainer(logger).fit(batches(*[8] * 4), max_epochs=2, ckpt_path=path)
    assert logger.tracking_uri == f"sqlite:///{tmp_path / 'second' / 'mlflow.db'}"
    assert logger.run_id != first.callbacks[0].run_id and not store.exists()
    assert "not found. A new run begins" in caplog.text


def test_mlflow_knows_a_failed_run(tmp_path, mlflow):
    logger = MLFlowLogger(dirpath=tmp_path)
    with pytest.raises(RuntimeError, match="the cable"):
        make_trainer(logger, Notes(logger, fails=True)).fit(batches(8, 8))
    client = mlflow.MlflowClient(logger.tracking_uri)
    assert client.get_run(logger.run_id).info.status == "FAILED"
