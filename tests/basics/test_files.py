"""Files and rows are written as a whole; a fault is an error or a warning."""

import os
import resource
import signal

import pytest
from toys import At, batches, linear_trainer

from jaxdp import History
from jaxdp.basics.files import (
    add_path_to_errors,
    append_atomically,
    write_atomically,
    write_text_atomically,
)
from jaxdp.callbacks import CSVLogger, Logger, ModelCheckpoint
from jaxdp.extras.reports import read_run


@pytest.fixture
def little_room():
    """Yields a function that limits the size of files, as a nearly full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, previous)


def fit(folder, max_epochs, ckpt_path="auto", saved=None):
    saver = ModelCheckpoint((saved or folder) / "checkpoints", save_top_k=-1)
    trainer = linear_trainer(saver, CSVLogger(folder), log_every_n_steps=1)
    trainer.fit(batches(8, 8, 8), max_epochs=max_epochs, ckpt_path=ckpt_path)


@pytest.mark.parametrize("cut", [1, 1000])
def test_rows_after_those_that_a_table_has_lost_come_again(tmp_path, cut):
    fit(tmp_path, 2)
    table = tmp_path / "metrics.csv"
    whole = table.read_bytes()
    row = whole.splitlines(keepends=True)[-1]
    # The checkpoint of an epoch was saved before the next one's steps, so that its last
    # row is this: of 1000 bytes as many as there are.
    os.truncate(table, len(whole) - min(cut, len(row)))
    fit(tmp_path, 3)
    assert table.read_bytes().startswith(whole[: -len(row)])
    assert table.read_text().count("\n") == 1 + 3 * 4 - 1


def test_rows_are_written_whole_or_not_at_all(tmp_path, little_room):
    table = tmp_path / "metrics.csv"

    written = []

    def fill(trainer):
        written.append(table.read_bytes())
        little_room(len(written[0]) + 5)

    disk = At(12, fill, "on_boundary")  # rows are read late
    trainer = linear_trainer(CSVLogger(tmp_path), disk, log_every_n_steps=1)
    loader = batches(*[8] * 20)
    with pytest.raises(OSError, match=r"CSVLogger`: .* can't be written"):
        trainer.fit(loader)
    assert table.read_bytes() == written[0]
    little_room(10**6)
    trainer.fit(loader)
    rows = table.read_bytes().decode().split("\r\n")
    assert {row.count(",") for row in rows[:-1]} == {rows[0].count(",")}
    assert rows[-1] == ""


def test_a_table_that_cannot_be_read_is_named(tmp_path):
    table = tmp_path / "metrics.csv"
    fit(tmp_path, 1)
    table.write_text(f"epoch,step,loss\r\n0,1,{'9' * 200_000}\r\n")
    with pytest.raises(ValueError, match="metrics.csv` is not what"):
        read_run(tmp_path)


def test_a_folder_that_is_not_utf_8_is_written_to(tmp_path):
    folder = tmp_path / os.fsdecode(b"\xff")
    fit(folder, 1, saved=tmp_path)
    fit(folder, 2, saved=tmp_path)
    assert (folder / "metrics.csv").read_text().count("\n") == 1 + 2 * 4


def test_a_full_disk_of_logs_costs_no_checkpoint(tmp_path):
    class Full(Logger):
        def log(self, epoch, step, values):
            with add_path_to_errors("rows", "Full"):
                raise OSError(28, "No space left on device")

    saves = At(2, lambda trainer: trainer.save(tmp_path / "2"), "on_boundary")
    trainer = linear_trainer(Full(tmp_path), saves, log_every_n_steps=1)
    with (
        pytest.raises(OSError, match="`Full`: 'rows' can't be written: No space left"),
        pytest.warns(UserWarning, match="These rows are missing"),
    ):
        trainer.fit(batches(8, 8, 8))
    linear_trainer().load(tmp_path / "2")


def test_a_report_leaves_out_a_row_that_is_being_written(tmp_path):
    fit(tmp_path, 1)
    columns = read_run(tmp_path).columns
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("1,4")
    assert read_run(tmp_path).columns == columns


def test_files_are_replaced_as_a_whole(tmp_path, little_room):
    history = History()
    history.append(0, {"loss": 1.0})
    path, link = tmp_path / "history.csv", tmp_path / "link.csv"
    link.symlink_to(path)
    history.to_csv(path)
    whole = path.read_bytes()
    history.append(1, {"loss": 0.5})
    little_room(len(whole) + 2)
    with pytest.raises(OSError, match=r"History.to_csv`: .*history.csv' can't be"):
        history.to_csv(path)
    assert path.read_bytes() == whole
    little_room(10**6)
    history.to_csv(link)
    assert link.is_symlink() and path.read_bytes().startswith(whole)
    assert sorted(os.listdir(tmp_path)) == ["history.csv", "link.csv"]
    write_text_atomically("/dev/null", "of which nothing is left")
    with pytest.raises(RuntimeError), write_atomically(path) as temporary:
        temporary.touch()
        raise RuntimeError
    assert sorted(os.listdir(tmp_path)) == ["history.csv", "link.csv"]
    with path.open("ab", buffering=0) as file:
        append_atomically(file, "2\n")
    assert path.read_text().endswith("2\n")
