"""Saving and loading the whole trainer."""

import concurrent.futures
import signal
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import At, Mlp, batches, mlp, steps_in
from toys import on_one_device as make

import jaxdp
from jaxdp import FSDP, Pmap, Sharded, SingleDevice
from jaxdp.callbacks import ModelCheckpoint

DATA = batches(16, 16, 5)


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


class Keeps(jaxdp.Callback):
    """Has any state."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return {"kept": self.state}


LOOP = []
LOOP.append(LOOP)


@pytest.mark.parametrize("state, error, cause", [
    (np.ones(2), TypeError, "Object of type ndarray"),
    ({1, 2}, TypeError, "Object of type set"),
    ({(1, 2): 3}, TypeError, "keys must be str"),
    (LOOP, ValueError, "Circular reference"),
])  # fmt: skip
def test_a_state_that_is_not_json_names_its_callback(tmp_path, state, error, cause):
    trainer = make(Keeps(1), Keeps(state))
    with pytest.raises(error) as caught:
        trainer.save(tmp_path / "saved")
    message = str(caught.value)  # without its notes
    assert "`state_dict` of the callback Keeps:1 must return JSON" in message
    assert cause in message and "array.tolist()" in message
    assert not (tmp_path / "saved").exists()


def test_another_model_is_shown_leaf_by_leaf(tmp_path):
    path = make().save(tmp_path / "saved")
    other = make(model=mlp())
    with pytest.raises(ValueError, match="layers.*the checkpoint has nothing"):
        other.load(path)
    wide = eqx.tree_at(lambda m: m.last.bias, Mlp(jax.random.key(0)), jax.numpy.ones(4))
    with pytest.raises(
        ValueError, match=r"last.bias: the checkpoint has float32\(3,\)"
    ):
        make(model=wide).load(path)


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
            "numpy": np.ones(3, np.float32),
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

    trainer, again = (
        make(strategy=strategy(), model=Zoo(), filter_spec=weight_alone)
        for strategy in (before, after)
    )
    trainer.fit(DATA)
    path = trainer.save(tmp_path / "saved")
    again.load(path)
    model = jaxdp.load_model(path, like=Zoo())
    for found, saved in (again.state, trainer.state), (model, trainer.model):
        leaves = map(jax.tree_util.tree_leaves_with_path, (found, saved))
        for (where, ours), (_, theirs) in zip(*leaves, strict=True):
            assert bits(ours) == bits(theirs), jax.tree_util.keystr(where)
    again.fit(DATA, max_epochs=2)


VAL = batches(16, seed=1)


@pytest.mark.filterwarnings("ignore:.*takes larger values for better")
def test_what_a_signal_saves_before_its_validation_is_judged_by_it(tmp_path):
    def judging():
        return ModelCheckpoint(tmp_path, monitor="val_loss", mode="max")

    def kill(trainer):
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit):
        killed = make(judging(), At(3, kill, "on_validation_start"))
        killed.fit(DATA, VAL, max_epochs=3)
    assert steps_in(tmp_path) == [3]
    trainer = make(resumed := judging())
    history = trainer.fit(DATA, VAL, max_epochs=3, ckpt_path="auto")
    assert max(history["val_loss"]) == history["val_loss"][0]
    assert resumed.best_model_path == str(tmp_path / "3")
    assert resumed.best_model_score == history["val_loss"][0]


def test_training_goes_on_where_a_name_is_taken(tmp_path):
    def squat(trainer):
        (tmp_path / "6").write_text("not a checkpoint")

    def fit(**options):
        saver = ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=-1, **options)
        make(saver, At(4, squat, "on_boundary")).fit(DATA, max_epochs=3)

    with pytest.warns(UserWarning, match="6 exists already.*Training continues"):
        fit(on_save_error="warn")
    assert steps_in(tmp_path) == [3, 6, 9]
    assert (tmp_path / "6").read_text() == "not a checkpoint"
    with pytest.raises(FileExistsError, match="6 exists already"):
        fit()


def test_training_goes_on_where_the_folder_is_gone(tmp_path):
    folder = tmp_path / "share" / "run"

    def unmount(trainer):
        while not (folder / "3").is_dir():
            time.sleep(0.01)
        folder.parent.rename(tmp_path / "away")
        folder.parent.write_text("")

    checkpoint = ModelCheckpoint(folder, on_save_error="warn")
    trainer = make(checkpoint, At(4, unmount, "on_boundary"))
    with pytest.warns(UserWarning, match="could not be written"):
        trainer.fit(DATA, max_epochs=3)
    assert trainer.global_step == 9


def test_saves_of_several_threads_do_not_meet(tmp_path):
    def save(number):
        trainer = trainers[number]
        return [trainer.save(tmp_path / str(number) / str(step)) for step in range(5)]

    trainers = [make() for _ in range(3)]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        paths = [*pool.map(save, range(3))]
    for trainer, (*_, last) in zip(trainers, paths, strict=True):
        trainer.load(last)


def test_a_checkpoint_is_there_before_those_that_were_begun_after_it(tmp_path):
    large = make(model=eqx.nn.MLP(4, 3, 1500, 2, key=jax.random.key(0)))
    small = make()
    first = large.start_saving(tmp_path / "first")
    small.save(tmp_path / "second")
    assert (tmp_path / "first").is_dir()
    first.finish()
