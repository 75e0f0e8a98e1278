"""Snapshots: taken while a fit runs, whole or not taken up, with room or without."""

import os
import resource
import signal
import stat
import threading
import time

import jax
import numpy as np
import optax
import pytest
from toys import Mlp, Recorder, batches

from jaxdp import FSDP, Callback, LocalSGD, Sharded, SingleDevice, Trainer
from jaxdp.callbacks import ModelCheckpoint
from jaxdp.checkpoint import CheckpointCorrupt, Snapshots, is_snapshot, snapshots
from jaxdp.supervisor import channel, leftovers
from jaxdp.supervisor.channel import read_beat

DATA = batches(16, 16, 5)


class Crash(Callback):
    def __init__(self, at):
        self.at = at

    def on_train_batch_end(self, trainer, metrics, batch_idx):
        if trainer.global_step == self.at:
            raise OSError("crash")


def make(folder, *callbacks, strategy=None, **options):
    return Trainer(
        Mlp(jax.random.key(0)),
        optax.adam(1e-2),
        loss="cross_entropy",
        strategy=strategy or SingleDevice(),
        callbacks=[*callbacks, ModelCheckpoint(folder, every_n_epochs=100)],
        enable_progress_bar=False,
        **options,
    )


def crash(folder, at, **options):
    """A run that crashes, and the folder of its snapshots."""
    trainer = make(folder, Crash(at), **options)
    with pytest.raises(OSError, match="crash"):
        trainer.fit(DATA, max_epochs=4, ckpt_path="auto")
    root = channel().snapshots
    return Snapshots(leftovers.find_snapshots(root, str(folder)))


def leaves(trainer):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(trainer.state)]


@pytest.mark.parametrize(
    "strategy, options",
    [
        (SingleDevice, {}),
        (Sharded, {"steps_per_execution": 3, "precision": "16-mixed"}),
        (lambda: FSDP(min_size=1), {"precision": "bf16-true"}),
        (lambda: LocalSGD(every=3, outer=optax.sgd(0.7)), {}),
        (Sharded, {"offload": "optimizer"}),
    ],
    ids=["one", "blocks", "split", "replicas", "offloaded"],
)
def test_a_run_goes_on_from_a_snapshot_bit_for_bit(
    supervised, tmp_path, strategy, options
):
    whole, folder = Recorder(), tmp_path / "a"
    alone = make(tmp_path / "b", whole, strategy=strategy(), **options)
    alone.fit(DATA, max_epochs=4, ckpt_path="auto")

    snapshots = crash(folder, 7, strategy=strategy(), **options)
    assert snapshots.steps()[-1] == 6
    assert read_beat(str(supervised)).step in (6, 7)
    again = Recorder()
    trainer = make(folder, again, strategy=strategy(), **options)
    trainer.fit(DATA, max_epochs=4, ckpt_path="auto")
    assert again.losses == whole.losses[6:]
    assert leaves(trainer) == leaves(alone)
    assert trainer.history["loss"] == alone.history["loss"]
    assert read_beat(str(supervised)).step == 12


class Newest(Callback):
    """What a kill at each step would cost: how many steps the newest one is behind."""

    def __init__(self, folder, at_step=None, do=None):
        self.folder, self.at_step, self.do, self.behind = folder, at_step, do, []

    def on_train_batch_end(self, trainer, metrics, batch_idx):
        path = leftovers.find_snapshots(channel().snapshots, str(self.folder))
        newest = max(Snapshots(path).steps(), default=0)
        self.behind.append(trainer.global_step - newest)
        if trainer.global_step == self.at_step:
            self.do()


def test_no_more_steps_than_asked_are_lost_however_slow_it_is(
    supervised, tmp_path, monkeypatch
):
    def slow(*arguments, write=snapshots._fill):
        time.sleep(0.1)
        write(*arguments)

    monkeypatch.setattr(snapshots, "_fill", slow)
    newest = Newest(tmp_path / "a")
    make(tmp_path / "a", newest).fit(DATA, max_epochs=4, ckpt_path="auto")
    assert len(newest.behind) == 12 and max(newest.behind) <= 4


def test_nothing_waits_for_one_that_waits_for_a_checkpoint(
    supervised, tmp_path, monkeypatch
):
    is_saved = threading.Event()
    monkeypatch.setattr(snapshots, "wait_for_savings", is_saved.wait)
    newest = Newest(tmp_path / "a", at_step=10, do=is_saved.set)
    make(tmp_path / "a", newest).fit(DATA, max_epochs=4, ckpt_path="auto")
    assert newest.behind[:10] == list(range(1, 11))


def test_there_are_two_and_only_the_user_can_read_them(supervised, tmp_path):
    found = crash(tmp_path / "a", 9)
    assert found.steps() == [6, 8]
    assert stat.S_IMODE(os.stat(found.path).st_mode) == 0o700
    assert not os.path.exists(os.path.join(found.path, ".writing"))


def test_a_checkpoint_as_new_is_taken_first_and_the_snapshots_go(supervised, tmp_path):
    folder = tmp_path / "a"
    path = crash(folder, 7).path
    trainer = make(folder)
    trainer.callbacks[0].every_n_train_steps = 1
    trainer.fit(DATA, max_epochs=4, ckpt_path="auto")
    assert not os.path.exists(path) and not (folder / ".snapshots").exists()


def test_one_that_is_torn_or_changed_is_passed_over(supervised, tmp_path):
    path = crash(tmp_path / "a", 9).path_of(8)
    with open(path, "rb") as file:
        whole = file.read()
    assert is_snapshot(path)
    before = leaves(trainer := make(tmp_path / "a"))
    generator = np.random.default_rng(0)
    harmed = [whole[: int(size)] for size in generator.integers(16, len(whole), 8)]
    for place in generator.integers(16, len(whole), 16):
        changed = bytearray(whole)
        changed[place] ^= 1 << int(generator.integers(8))
        harmed.append(bytes(changed))
    for content in harmed:
        with open(path, "wb") as file:
            file.write(content)
        with pytest.raises(CheckpointCorrupt, match="is damaged"):
            trainer.load(path)
        assert leaves(trainer) == before and trainer.global_step == 0

    # The one before is used, and says so.
    with pytest.warns(UserWarning, match="is damaged.*Skipped"):
        trainer.fit(DATA, max_epochs=4, ckpt_path="auto")
    assert trainer.global_step == 12


def test_one_of_another_model_is_an_error(supervised, tmp_path):
    crash(tmp_path / "a", 5)
    trainer = make(tmp_path / "a", ensemble=None, precision="bf16-true")
    with pytest.raises(ValueError, match="saved from another model or optimizer"):
        trainer.fit(DATA, max_epochs=4, ckpt_path="auto")


def test_links_are_not_followed(supervised, tmp_path):
    path = crash(tmp_path / "a", 5).path_of(4)
    os.rename(path, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", path)
    with pytest.raises((OSError, ValueError)):
        make(tmp_path / "a").load(path)


def test_where_no_thread_can_be_started_training_waits(
    supervised, tmp_path, monkeypatch
):
    def no_more(*_):
        raise RuntimeError("can't start new thread")

    def stop():
        monkeypatch.setattr(threading, "_start_new_thread", no_more)

    newest = Newest(tmp_path / "a", at_step=3, do=stop)
    make(tmp_path / "a", newest).fit(DATA, max_epochs=4, ckpt_path="auto")
    assert newest.behind[4:] == [1, 2] * 4


def test_too_little_room_is_told_once_and_ends_nothing(supervised, tmp_path, caplog):
    alone = make(tmp_path / "b")
    alone.fit(DATA, max_epochs=4, ckpt_path="auto")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    trainer = make(tmp_path / "a")
    trainer.callbacks[0].every_n_epochs = 10**6
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
        trainer.fit(DATA, max_epochs=4, ckpt_path="auto")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert leaves(trainer) == leaves(alone)
    said = [m for m in caplog.messages if "no snapshot of step" in m]
    assert len(said) == 1 and "File too large" in said[0]


def test_a_fit_that_would_not_go_on_warns(supervised, tmp_path):
    with pytest.warns(UserWarning, match="use fit\\(..., ckpt_path='auto'\\)"):
        make(tmp_path / "a").fit(DATA, max_epochs=1)
