"""`fit(..., ckpt_path=...)`: the run goes on, whatever it was in the middle of."""

import os
import time

import numpy as np
import pytest
from toys import At, Recorder, assert_equal_leaves, batches, fail_with, rows, steps_in
from toys import on_one_device as make

from jaxdp import Pmap, Sharded, SingleDevice
from jaxdp.callbacks import CSVLogger, EarlyStopping, ModelCheckpoint

DATA = batches(16, 16, 5)


def assert_same(trainer, other):
    assert_equal_leaves(trainer.state, other.state)
    assert trainer.history.state_dict() == other.history.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("before, after", [
    (lambda: Sharded(8), lambda: Sharded(2)), (lambda: Sharded(8), SingleDevice),
    (lambda: Sharded(2), lambda: Pmap(8)), (lambda: Pmap(4), lambda: Sharded(3)),
])  # fmt: skip
def test_a_run_goes_on_on_other_devices(tmp_path, before, after):
    whole, first, second = Recorder(), Recorder(), Recorder()
    make(whole).fit(DATA, max_epochs=3)
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1)
    make(first, saver, strategy=before()).fit(DATA, max_steps=5)
    again = make(second, ModelCheckpoint(tmp_path), strategy=after())
    again.fit(DATA, max_epochs=3, ckpt_path="auto")
    np.testing.assert_allclose(
        first.losses + second.losses, whole.losses, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("hook, step, steps_per_execution", [
    ("on_train_batch_end", 4, 1), ("on_validation_end", 5, 1),
    ("on_train_epoch_end", 5, 1), ("on_train_batch_end", 2, 3),
    ("on_train_batch_start", 2, 3),
])  # fmt: skip
def test_no_row_is_lost_where_a_hook_raises(tmp_path, hook, step, steps_per_execution):
    data = batches(16, 16, 16, 16, 5)

    def fit(name, *crash):
        saver = ModelCheckpoint(
            tmp_path / name, every_n_train_steps=2, save_on_exception=True
        )
        options = {"steps_per_execution": steps_per_execution, "log_every_n_steps": 1}
        trainer = make(saver, CSVLogger(tmp_path / name), *crash, **options)
        trainer.fit(data, data[:2], max_epochs=3, ckpt_path="auto")
        return trainer, (tmp_path / name / "metrics.csv").read_text()

    whole, log = fit("whole")
    with pytest.raises(RuntimeError, match="crash"):
        fit("killed", At(step, fail_with(RuntimeError("crash")), hook))
    resumed, resumed_log = fit("killed")
    assert_same(resumed, whole)
    assert resumed_log == log


def test_a_new_iterator_continues_after_the_batches_that_were_trained_on(tmp_path):
    data = batches(16, 16, 16, 16)
    whole, first, second = Recorder(), Recorder(), Recorder()
    make(whole).fit(iter(data), max_steps=4)
    saver = ModelCheckpoint(tmp_path)
    make(first, saver).fit(iter(data), max_steps=2)
    make(second, saver).fit(iter(data), max_steps=4, ckpt_path="last")
    assert first.losses + second.losses == whole.losses


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_generator_of_the_users_moves_on_where_an_epoch_is_limited(tmp_path, step):
    torch = pytest.importorskip("torch")
    data = list(zip(np.eye(8, 4, dtype=np.float32), np.arange(8) % 3, strict=True))

    def fit(*callbacks, **arguments):
        loader = torch.utils.data.DataLoader(
            data, 2, shuffle=True, generator=torch.Generator().manual_seed(1)
        )
        trainer = make(*callbacks)
        trainer.fit(loader, max_epochs=3, limit_train_batches=2, **arguments)
        return trainer

    path = tmp_path / "saved"
    whole = fit(
        At(step, lambda trainer: path.exists() or trainer.save(path), "on_boundary")
    )
    assert_same(fit(ckpt_path=path), whole)


@pytest.mark.parametrize("rule", [
    {"stopping_threshold": 100.0}, {"divergence_threshold": 0.01}, {"patience": 1},
])  # fmt: skip
def test_a_run_that_was_to_stop_does_so_again(tmp_path, rule):
    def fit():
        stopping = EarlyStopping("loss", mode="min", min_delta=1e3, **rule)
        trainer = make(stopping, ModelCheckpoint(tmp_path))
        trainer.fit(DATA, max_epochs=5, ckpt_path="auto")
        return trainer.global_step

    assert fit() == fit() < 15


def test_larger_batches_after_a_save_leave_no_trace_in_what_is_resumed(tmp_path):
    expected = make()
    expected.fit(DATA, DATA, max_epochs=3)
    used = make()
    used.fit(DATA, DATA, max_epochs=1)
    used.save(tmp_path / "saved")
    used.fit(batches(64, 64), batches(64), max_epochs=2)
    assert {*used.run.engine.padding.values()} == {64}
    used.fit(DATA, DATA, max_epochs=3, ckpt_path=str(tmp_path / "saved"))
    assert used.run.engine.padding == expected.run.engine.padding
    assert_same(used, expected)


def test_a_run_that_the_clock_has_ended_goes_on(tmp_path):
    """Wherever that was: at its third step, unless the machine is slow."""

    def saver():
        return ModelCheckpoint(tmp_path, every_n_epochs=1, save_last=True)

    whole, first, second = Recorder(), Recorder(), Recorder()
    expected = make(whole)
    expected.fit(batches(16, 16, 5, 16), max_epochs=3)
    trainer = make(first, At(3, lambda trainer: time.sleep(0.6)), saver())
    trainer.fit(batches(16, 16, 5, 16), max_epochs=3, max_time=0.5)
    assert 1 <= trainer.global_step <= 3
    again = make(second, saver())
    again.fit(batches(16, 16, 5, 16), max_epochs=3, ckpt_path="last")
    assert first.losses + second.losses == whole.losses
    assert_same(again, expected)


def test_words_say_which_checkpoint(tmp_path, caplog):
    val = batches(16, seed=1)
    saver = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=2, save_last=True)
    trainer = make(saver)
    history = trainer.fit(DATA, val, max_epochs=5)
    best = 3 * (1 + int(np.argmin(history["val_loss"])))
    other = min({*steps_in(tmp_path)} - {best})  # as if measured after it was saved
    for linked in (other, best):
        (tmp_path / "best").unlink()
        (tmp_path / "best").symlink_to(str(linked))
        make(ModelCheckpoint(tmp_path, "val_loss")).validate(val, ckpt_path="best")
        assert f"uses the weights of step {linked}" in caplog.text
    again = make(ModelCheckpoint(tmp_path, monitor="val_loss"))
    with pytest.warns(UserWarning, match="nothing to do"):
        again.fit(DATA, val, max_epochs=1, ckpt_path="best")
    assert again.global_step == best
    with pytest.raises(ValueError, match="'best' looks where .* with a `monitor`"):
        make(ModelCheckpoint(tmp_path)).fit(DATA, ckpt_path="best")
    with pytest.raises(FileNotFoundError, match="there are no checkpoints in .*empty"):
        make(ModelCheckpoint(tmp_path / "empty")).fit(DATA, ckpt_path="last")
    fresh = make(ModelCheckpoint(tmp_path / "empty"))
    fresh.fit(DATA, ckpt_path="auto")
    assert fresh.global_step == 3
    by_path = make()
    by_path.fit(DATA, max_epochs=6, ckpt_path=tmp_path / "15")
    assert by_path.global_step == 18


def test_checkpoints_of_another_run_are_moved_and_kept(tmp_path, caplog):
    make(ModelCheckpoint(tmp_path)).fit(DATA, max_epochs=2)
    make(ModelCheckpoint(tmp_path)).fit(DATA)
    assert set(os.listdir(tmp_path)) == {".lock", "3", "before-1"}
    assert os.listdir(tmp_path / "before-1") == ["6"]
    assert 'use `ckpt_path="auto"`' in caplog.text
    make().load(tmp_path / "before-1" / "6")


def test_resuming_far_into_an_epoch_reads_nothing_that_was_read(tmp_path):
    torch = pytest.importorskip("torch")
    x, y = rows(4)

    class Counting(torch.utils.data.Dataset):
        reads = 0

        def __len__(self):
            return 4

        def __getitem__(self, index):
            Counting.reads += 1
            return x[index], int(y[index])

    big = torch.utils.data.Subset(Counting(), np.zeros(40_004, int))
    loader = torch.utils.data.DataLoader(big, 4, shuffle=True)
    trainer = make()
    trainer.fit(loader, max_steps=1)
    trainer.run.progress.batches_done = trainer.run.progress.global_step = 10_000
    path = trainer.save(tmp_path / "saved")
    Counting.reads = 0
    again = make()
    again.load(path)
    again.fit(loader, max_steps=10_001)
    assert Counting.reads == 4
    assert again.current_epoch == 1


@pytest.mark.slow
def test_another_batch_size_after_a_resume_is_said(tmp_path):
    part, six = make(), batches(*[8] * 6)
    part.fit(six, max_steps=3)
    path = part.save(tmp_path / "part")
    for accumulate, steps in (1, 6), (2, 5):
        same, other = (make(accumulate_grad_batches=accumulate) for _ in range(2))
        same.fit(six, ckpt_path=path)  # no warning: the rows are the same
        assert same.global_step == steps
        match = "had 6 steps .* and has 4 now.* 3 batches"
        with pytest.warns(UserWarning, match=match):
            other.fit(batches(*[12] * 4), ckpt_path=path)
