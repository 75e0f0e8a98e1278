"""Saving and loading the whole trainer."""

import os
import signal
import threading
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import Mlp, Recorder, batches, leaves

import jaxdp
from jaxdp import FSDP, Callback, Pmap, Sharded, SingleDevice, Trainer
from jaxdp.callbacks import ModelCheckpoint

DATA = batches(16, 16, 5)


def make(strategy=None, optimizer=None, model=None, callbacks=(), **kwargs):
    return Trainer(
        Mlp(jax.random.key(0)) if model is None else model,
        optax.adam(1e-2) if optimizer is None else optimizer,
        loss="cross_entropy",
        strategy=strategy,
        callbacks=callbacks,
        enable_progress_bar=False,
        **kwargs,
    )


def test_a_loaded_trainer_goes_on_as_if_it_had_never_stopped(tmp_path):
    whole = Recorder()
    make(Sharded(3), callbacks=[whole]).fit(DATA, max_epochs=4)
    first, second = Recorder(), Recorder()
    trainer = make(Sharded(3), callbacks=[first])
    trainer.fit(DATA, max_epochs=2)
    path = trainer.save(tmp_path / "saved")
    again = make(Sharded(3), callbacks=[second])
    again.load(path)
    assert (again.global_step, again.current_epoch) == (6, 2)
    assert again.history["loss"] == trainer.history["loss"]
    for ours, theirs in zip(leaves(again), leaves(trainer), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    again.fit(DATA, max_epochs=4)
    assert first.losses + second.losses == whole.losses


def test_a_model_may_hold_prng_keys_and_numpy_arrays(tmp_path):
    class Noisy(eqx.Module):
        linear: eqx.nn.Linear
        key: jax.Array
        scale: np.ndarray

        def __call__(self, x):
            noise = jax.random.normal(self.key, (3,))
            return self.linear(x) + noise * self.scale

    linear = eqx.nn.Linear(4, 3, key=jax.random.key(0))
    model = Noisy(linear, jax.random.key(5), np.ones(3, np.float32))
    trainer = make(model=model)
    trainer.fit(DATA)
    path = trainer.save(tmp_path / "saved")
    again = make(SingleDevice(), model=model)
    again.load(path)
    assert (
        jax.random.key_data(again.model.key) == jax.random.key_data(model.key)
    ).all()
    assert eqx.tree_equal(again.model.linear, trainer.model.linear)


def test_plain_orbax_reads_a_checkpoint(tmp_path):
    import orbax.checkpoint as ocp

    trainer = make()
    trainer.fit(DATA)
    path = trainer.save(str(tmp_path / "saved"))
    with ocp.StandardCheckpointer() as checkpointer:
        stored = checkpointer.restore(f"{path}/state")
    np.testing.assert_array_equal(
        stored["params"]["first.weight"], trainer.model.first.weight
    )
    assert not list((tmp_path / "saved").rglob("*.pkl"))


def test_a_folder_that_exists_is_not_overwritten(tmp_path):
    with pytest.raises(FileExistsError, match="exists already; pass a new folder"):
        make().save(tmp_path)


def test_another_model_is_shown_leaf_by_leaf(tmp_path):
    path = make().save(tmp_path / "saved")
    other = make(model=eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0)))
    with pytest.raises(ValueError, match="layers.*the checkpoint has nothing"):
        other.load(path)
    wide = eqx.tree_at(lambda m: m.last.bias, Mlp(jax.random.key(0)), jax.numpy.ones(4))
    with pytest.raises(
        ValueError, match=r"last.bias: the checkpoint has float32\(3,\)"
    ):
        make(model=wide).load(path)


def folders(path):
    return sorted(int(child.name) for child in path.iterdir() if child.name.isdigit())


def test_model_checkpoint_by_steps_keeps_the_newest(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=3)
    saved = []

    class Saved(Recorder):
        def on_save_checkpoint(self, trainer, path):
            saved.append(path)

    trainer = make(callbacks=[checkpoint, Saved()])
    trainer.fit(DATA, max_epochs=4)
    assert folders(tmp_path) == [8, 10, 12]
    assert checkpoint.last_model_path == str(tmp_path / "12") == saved[-1]
    assert len(saved) == 6


class Zoo(eqx.Module):
    """A leaf of every kind that a model may have."""

    weight: jax.Array
    buffers: dict

    def __init__(self):
        def odd(dtype):
            return jnp.array([[0, 1], [3, 2]]).astype(dtype)

        self.weight = jnp.arange(12.0).reshape(4, 3)
        names = "bfloat16 float16 float8_e4m3fn float8_e5m2 int8 uint8 int32 bool"
        self.buffers = {name: odd(name) for name in [*names.split(), "complex64"]} | {
            "scalar": jnp.float32(2.5),
            "no rows": jnp.zeros((0, 3)),
            "no columns": jnp.zeros((3, 0), jnp.int8),
            "special": jnp.array([jnp.nan, jnp.inf, -jnp.inf, -0.0, 1e-45]),
            "key": jax.random.key(5),
            "keys": jax.random.split(jax.random.key(6), 3),
            "no keys": jax.random.split(jax.random.key(6), 3)[:0],
            "other key": jax.random.key(7, impl="rbg"),
        }

    def __call__(self, x):
        return x @ self.weight


def bits(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return leaf.dtype, leaf.shape, np.asarray(leaf).tobytes()


@pytest.mark.slow_but("Sharded-<lambda>")
@pytest.mark.parametrize("before, after", [
    (lambda: FSDP(min_size=1), SingleDevice), (Sharded, lambda: FSDP(min_size=1)),
    (Pmap, lambda: Sharded(2)),
])  # fmt: skip
def test_every_kind_of_leaf_comes_back_bit_for_bit(tmp_path, before, after):
    def weight_alone(leaf):
        return eqx.is_array(leaf) and leaf.shape == (4, 3)

    trainer = make(before(), model=Zoo(), filter_spec=weight_alone)
    trainer.fit(DATA)
    path = trainer.save(tmp_path / "saved")
    again = make(after(), model=Zoo(), filter_spec=weight_alone)
    again.load(path)
    pairs = zip(
        *map(jax.tree_util.tree_leaves_with_path, (again.state, trainer.state)),
        strict=True,
    )
    for (where, ours), (_, theirs) in pairs:
        assert bits(ours) == bits(theirs), jax.tree_util.keystr(where)
    again.fit(DATA, max_epochs=2)
    model = jaxdp.load_model(path, like=Zoo())
    for ours, theirs in zip(
        jax.tree.leaves(model), jax.tree.leaves(trainer.model), strict=True
    ):
        assert bits(ours) == bits(theirs)


VAL = batches(16, seed=1)


class Sigterm(Callback):
    def __init__(self, step, hook="on_train_batch_end"):
        self.step = step
        setattr(self, hook, self.kill)

    def kill(self, trainer, *arguments):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.filterwarnings("ignore:.*takes larger values for better")
def test_what_a_signal_saves_before_its_validation_is_judged_by_it(tmp_path):
    def judging():
        return ModelCheckpoint(tmp_path, monitor="val_loss", mode="max")

    with pytest.raises(SystemExit):
        killed = make(callbacks=[judging(), Sigterm(3, "on_validation_start")])
        killed.fit(DATA, VAL, max_epochs=3)
    assert folders(tmp_path) == [3]
    resumed = judging()
    trainer = make(callbacks=[resumed])
    history = trainer.fit(DATA, VAL, max_epochs=3, ckpt_path="auto")
    assert max(history["val_loss"]) == history["val_loss"][0]
    assert resumed.best_model_path == str(tmp_path / "3")
    assert resumed.best_model_score == history["val_loss"][0]


def test_a_callback_in_a_second_trainer_begins_anew(tmp_path):
    checkpoint = ModelCheckpoint(monitor="loss")
    for root, model in (("one", Mlp(jax.random.key(1))), ("two", None)):
        folder = tmp_path / root
        trainer = make(callbacks=[checkpoint], model=model, default_root_dir=folder)
        trainer.fit(DATA, max_epochs=2)
        assert folders(folder / "checkpoints") == [6]
        assert checkpoint.best_model_path == str(folder / "checkpoints" / "6")
        assert checkpoint.best_model_score == trainer.history["loss"][1]
    given = ModelCheckpoint(tmp_path / "given")
    for key in range(2):
        trainer = make(callbacks=[given], model=Mlp(jax.random.key(key)))
        trainer.fit(DATA)
        saved = make()
        saved.load(given.best_model_path)
        assert [*map(bits, leaves(saved))] == [*map(bits, leaves(trainer))]
    assert os.listdir(tmp_path / "given" / "before-1") == ["3"]


def test_a_validation_outside_of_a_fit_judges_nothing(tmp_path):
    checkpoint = ModelCheckpoint(
        tmp_path, monitor="val_loss", every_n_train_steps=2, save_top_k=-1
    )
    trainer = make(callbacks=[checkpoint])
    trainer.fit(DATA, VAL, max_epochs=1)
    other = trainer.validate(batches(16, seed=2))["val_loss"]
    trainer.fit(DATA, VAL, max_epochs=2)
    assert checkpoint.best_model_score not in (None, other)
    assert str(other) not in [score for _, score in checkpoint.state_dict()["scores"]]


def test_a_validation_by_a_callback_inside_a_fit_judges_nothing(tmp_path):
    class Probe(Callback):
        ended = 0

        def on_train_epoch_start(self, trainer):
            self.value = trainer.validate(batches(16, seed=2))["val_loss"]

        def on_validation_end(self, trainer, metrics):
            self.ended += 1
            assert metrics["val_loss"] != self.value

    checkpoint, probe = ModelCheckpoint(tmp_path, monitor="val_loss"), Probe()
    trainer = make(callbacks=[checkpoint, probe])
    trainer.fit(DATA, VAL, max_epochs=2)
    assert probe.ended == 2
    assert checkpoint.best_model_score == min(trainer.history["val_loss"])


def test_training_goes_on_where_a_name_is_taken(tmp_path):
    class Squat(Callback):
        def on_boundary(self, trainer):
            if trainer.global_step == 4:
                (tmp_path / "6").write_text("not a checkpoint")

    def fit(**options):
        saver = ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=-1, **options)
        make(callbacks=[saver, Squat()]).fit(DATA, max_epochs=3)

    with pytest.warns(UserWarning, match="6 exists already.*Training continues"):
        fit(on_save_error="warn")
    assert folders(tmp_path) == [3, 6, 9]
    assert (tmp_path / "6").read_text() == "not a checkpoint"
    with pytest.raises(FileExistsError, match="6 exists already"):
        fit()


def test_training_goes_on_where_the_folder_is_gone(tmp_path):
    folder = tmp_path / "share" / "run"

    class Unmount(Callback):
        def on_boundary(self, trainer):
            if trainer.global_step == 4:
                while not (folder / "3").is_dir():
                    time.sleep(0.01)
                folder.parent.rename(tmp_path / "away")
                folder.parent.write_text("")

    checkpoint = ModelCheckpoint(folder, on_save_error="warn")
    trainer = make(callbacks=[checkpoint, Unmount()])
    with pytest.warns(UserWarning, match="could not be written"):
        trainer.fit(DATA, max_epochs=3)
    assert trainer.global_step == 9


def test_an_error_at_the_end_of_an_epoch_leaves_the_place_right(tmp_path):
    class Failing(Callback):
        fails = True

        def on_train_epoch_end(self, trainer, metrics):
            if self.fails:
                self.fails = False
                raise KeyError("once")

    trainer = make(callbacks=[Failing()])
    with pytest.raises(KeyError, match="once"):
        trainer.fit(DATA, max_epochs=2)
    trainer.fit(DATA, max_steps=5)
    resumed = make()
    history = resumed.fit(DATA, max_epochs=2, ckpt_path=trainer.save(tmp_path / "5"))
    assert (resumed.global_step, history.epochs) == (6, [0, 1])


def test_a_metric_can_not_have_the_name_of_a_column():
    with pytest.raises(ValueError, match="'step' is taken.*columns of every log"):
        make(metrics={"step": lambda predictions, targets: targets})


def test_saves_of_several_threads_do_not_meet(tmp_path):
    trainers = [make(SingleDevice()) for _ in range(3)]
    faults = []

    def save(number, trainer):
        try:
            for step in range(5):
                trainer.save(tmp_path / str(number) / str(step))
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=save, args=pair) for pair in enumerate(trainers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    for number, trainer in enumerate(trainers):
        trainer.load(tmp_path / str(number) / "4")


def test_a_checkpoint_is_there_before_those_that_were_begun_after_it(tmp_path):
    large = make(SingleDevice(), model=eqx.nn.MLP(4, 3, 1500, 2, key=jax.random.key(0)))
    small = make(SingleDevice())
    first = large.start_saving(tmp_path / "first")
    small.save(tmp_path / "second")
    assert (tmp_path / "first").is_dir()
    first.finish()
