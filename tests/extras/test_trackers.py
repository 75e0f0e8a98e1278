"""W&B and MLflow have the values of a run, as their own readers show."""

import struct
import time
from typing import NamedTuple

import jax
import pytest
from toys import On, batches, fail_with, linear_on_one_device

from jaxdp.callbacks import MLFlowLogger, WandbLogger

# Both tools use what their own dependencies have deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")


def make_trainer(*callbacks, **options):
    return linear_on_one_device(*callbacks, log_every_n_steps=2, **options)


class Seen(NamedTuple):
    """A run as its tool has it; the parts of a resumed run are one."""

    settings: dict
    loss_steps: list
    val_losses: list
    """Steps and values."""
    states: set
    """`"finished"`, `"failed"`."""
    shown: set
    """Names of texts and pictures."""


def read_wandb(folder):
    """Reads the files of offline runs."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # its service has then written all
    settings, rows, states = {}, [], set()
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for data in leveldb_records(path.read_bytes()[7:]):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            for update in (record.run.config, record.config):
                for item in update.update:
                    name = "/".join(item.nested_key) or item.key
                    settings[name] = item.value_json.strip('"')
            if record.HasField("history"):
                items = record.history.item
                row = {"/".join(i.nested_key) or i.key: i.value_json for i in items}
                rows.append(row)
            if record.HasField("exit"):
                states.add("failed" if record.exit.exit_code else "finished")
    media = folder.glob("wandb/offline-run-*/files/media/*/*")
    shown = {path.name.split("_")[0]: path.read_bytes() for path in media}
    for name, content in shown.items():
        beginning = b"\x89PNG" if name == "history" else b"4 &lt; 5 bytes"
        assert beginning in content
    losses = [(int(row["step"]), row["val_loss"]) for row in rows if "val_loss" in row]
    return Seen(
        settings,
        [int(row["step"]) for row in rows if "loss" in row],
        [(step, float(value)) for step, value in losses],
        states,
        set(shown),
    )


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


def read_mlflow(folder):
    """Reads the one run of a store."""
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("toys").experiment_id
    (run,) = client.search_runs([experiment])
    id = run.info.run_id
    assert run.info.run_name == "first" and run.data.tags["a"] == "b"
    return Seen(
        run.data.params | run.data.tags,
        [metric.step for metric in client.get_metric_history(id, "loss")],
        [(one.step, one.value) for one in client.get_metric_history(id, "val_loss")],
        {run.info.status.lower()},
        {file.path.split(".")[0] for file in client.list_artifacts(id)},
    )


class Tool(NamedTuple):
    make_logger: object
    read: object


@pytest.fixture(params=["wandb", "mlflow"])
def tool(request, monkeypatch, tmp_path):
    pytest.importorskip(request.param)
    for name in ("WANDB_SILENT", "WANDB_DISABLE_GIT", "WANDB_DISABLE_CODE"):
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def make_logger(**options):
        if request.param == "wandb":
            return WandbLogger("toys", "first", tmp_path, offline=True, **options)
        options |= {"dirpath": tmp_path, "tags": {"a": "b"}}
        return MLFlowLogger("toys", "first", **options)

    readers = {"wandb": read_wandb, "mlflow": read_mlflow}
    return Tool(make_logger, lambda: readers[request.param](tmp_path))


def test_a_tool_has_the_run(tool):
    logger = tool.make_logger(hyperparameters={"width": 64})

    def note(trainer, metrics):
        logger.log_text("note", "4 < 5 bytes")
        logger.log_figure("history", trainer.history.plot())

    trainer = make_trainer(logger, On(on_train_epoch_end=note))
    history = trainer.fit(batches(*[8] * 4), batches(8))
    seen = tool.read()
    settings = {"width": "64", "model": "Linear", "versions/jax": jax.__version__}
    assert settings.items() <= seen.settings.items()
    assert seen.loss_steps == [2, 4]
    assert seen.val_losses == [(4, pytest.approx(history["val_loss"][0]))]
    assert seen.shown == {"note", "history"}
    assert seen.states == {"finished"}


def test_a_tool_goes_on_with_a_run_that_is_resumed(tool, tmp_path):
    first, data = make_trainer(tool.make_logger()), batches(*[8] * 4)
    first.fit(data)
    path = first.save(tmp_path / "saved")
    time.sleep(1.1)  # W&B names its folders by the second
    resumed = make_trainer(tool.make_logger())
    resumed.fit(data, max_epochs=2, ckpt_path=path)
    seen = tool.read()
    assert seen.loss_steps == [2, 4, 6, 8] and seen.states == {"finished"}
    assert resumed.callbacks[0].state_dict() == first.callbacks[0].state_dict()


def test_a_tool_knows_a_failed_run(tool):
    fail = On(on_train_epoch_end=fail_with(RuntimeError("the cable was pulled")))
    with pytest.raises(RuntimeError, match="the cable"):
        make_trainer(tool.make_logger(), fail).fit(batches(8, 8))
    assert tool.read().states == {"failed"}


def test_mlflow_is_not_sent_where_only_a_checkpoint_says(tmp_path, monkeypatch, caplog):
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
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
