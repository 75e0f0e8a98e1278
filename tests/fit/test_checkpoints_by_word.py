"""`test(ckpt_path=...)` and `load_model(folder)`: which weights, and nothing else."""

import os
import re
import shutil

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from toys import Mlp, On, arrays, assert_equal_leaves, batches, quiet

import jaxdp
from jaxdp import FSDP, LocalSGD, SingleDevice
from jaxdp.callbacks import ModelCheckpoint, WeightAveraging
from jaxdp.extras.cli import main

TRAIN, VAL, TEST = batches(16, 16, 5), batches(16, seed=1), batches(16, 9, seed=2)


class Weights(ModelCheckpoint):
    """Keeps a copy of the weights of every epoch, too."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.models = {}

    def on_train_epoch_end(self, trainer, metrics):
        super().on_train_epoch_end(trainer, metrics)
        self.models[trainer.global_step] = trainer.model


def saver(folder, **options):
    return Weights(folder, monitor="val_loss", save_top_k=-1, **options)


def downhill_then_up():
    rates = optax.constant_schedule(0.5), optax.constant_schedule(-2.0)
    return optax.sgd(optax.join_schedules(rates, [6]))


def make(*callbacks, key=0, optimizer=None, **options):
    options = {"loss": "cross_entropy", "metrics": ["accuracy"]} | options
    return quiet(
        Mlp(jax.random.key(key), rate=0.0),
        optimizer or downhill_then_up(),
        callbacks=callbacks,
        **options,
    )


def trained(folder, *others, strategy=None):
    """A trainer whose best epoch is not its last."""
    weights = saver(folder)
    trainer = make(weights, *others, strategy=strategy or SingleDevice())
    trainer.fit(TRAIN, VAL, max_epochs=4)
    return trainer, weights


def by_hand(model):
    """Mean loss and accuracy over the rows of `TEST`."""
    x, y = (np.concatenate(each) for each in zip(*TEST, strict=True))
    logits = jax.vmap(eqx.nn.inference_mode(model))(x)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return [float(loss), float((logits.argmax(1) == y).mean())]


@pytest.mark.parametrize("strategy", [SingleDevice(), FSDP(min_size=1)], ids=repr)
def test_it_tests_the_weights_of_a_checkpoint_and_keeps_its_own(tmp_path, strategy):
    trainer, weights = trained(tmp_path, strategy=strategy)
    best = trainer.history.epochs[int(np.argmin(trainer.history["val_loss"]))]
    steps = sorted(weights.models)
    assert best < 3 and steps == [3, 6, 9, 12]

    now, last = trainer.test(TEST), trainer.predict(TEST)
    program = trainer.run.engine.compiled_steps["evaluate"].programs
    programs = dict(program)
    before, progress = arrays(trainer.model), trainer.run.progress.state_dict
    counted = progress(trainer.run.make_partition("train"))

    found = {
        word: list(trainer.test(TEST, ckpt_path=word).values())
        for word in ("best", "last", str(tmp_path / "3"))
    }
    wanted = {"best": steps[best], "last": 12, str(tmp_path / "3"): 3}
    for word, step in wanted.items():
        np.testing.assert_allclose(
            found[word], by_hand(weights.models[step]), rtol=1e-5, err_msg=word
        )
    assert found["best"] != found["last"] == list(now.values())
    np.testing.assert_array_equal(trainer.predict(TEST, "last"), last)
    assert (trainer.predict(TEST, "best") != last).any()

    # Nothing else has changed, and nothing was compiled again.
    assert dict(program) == programs and trainer.global_step == 12
    assert progress(trainer.run.make_partition("train")) == counted
    assert_equal_leaves(arrays(trainer.model), before)
    assert trainer.test(TEST) == now


def test_a_fresh_trainer_tests_what_another_has_saved(tmp_path):
    trainer, weights = trained(tmp_path, WeightAveraging(0.5))
    average = weights.models[3]
    again = make(saver(tmp_path), WeightAveraging(0.5), key=1)
    found = again.test(TEST, ckpt_path=tmp_path / "3")  # of the average, on 8 devices
    np.testing.assert_allclose(list(found.values()), by_hand(average), rtol=1e-5)
    assert again.global_step == 0
    assert again.test(TEST, "last") == pytest.approx(trainer.test(TEST), rel=1e-5)


@pytest.mark.slow_but("FSDP(8)-'32-true'-0.5", "SingleDevice()-'bf16-true'-0.5")
@pytest.mark.parametrize("strategy, precision, average", [
    (SingleDevice(), "32-true", 0.5), (FSDP(min_size=1), "32-true", None),
    (FSDP(min_size=1), "32-true", 0.5), (SingleDevice(), "bf16-true", 0.5),
    (LocalSGD(2), "32-true", None),
], ids=repr)  # fmt: skip
def test_the_weights_of_a_checkpoint_are_those_scored(
    tmp_path, strategy, precision, average, capsys
):
    raw_weights, scored = {}, {}

    def see(trainer, metrics):
        scored[trainer.global_step] = arrays(trainer.model)
        params = jax.tree.map(np.array, trainer.state.params)
        raw_weights[trainer.global_step] = arrays(params)

    saver = ModelCheckpoint(tmp_path / "run", "val_loss")
    averaging = [WeightAveraging(average)] if average else []
    options = {"strategy": strategy, "precision": precision}
    trainer = make(saver, On(on_validation_end=see), *averaging, **options)
    trainer.fit(TRAIN, VAL, max_epochs=4)
    score, step = saver.best_model_score, int(os.path.basename(saver.best_model_path))

    def load(**options):
        return jaxdp.load_model(tmp_path / "run", Mlp(jax.random.key(1)), **options)

    def loaded(**options):
        return arrays(load(**options))

    assert_equal_leaves(loaded(), scored[step])
    floats = [leaf for leaf in loaded(which="raw") if leaf.dtype == np.float32]
    assert_equal_leaves(floats, raw_weights[step])
    pairs = zip(loaded(), loaded(which="raw"), strict=True)
    is_apart = average is not None or isinstance(strategy, LocalSGD)
    assert any((a != b).any() for a, b in pairs) == is_apart

    # Also where another trainer, whose optimizer is another one, tests them.
    again = ModelCheckpoint(tmp_path / "run", "val_loss")
    other = make(again, optimizer=optax.adam(1.0), **options)
    for each in trainer, other:
        assert each.test(VAL, "best")["test_loss"] == score

    def exported(*options):
        file = tmp_path / "weights.npz"
        main(["export", str(tmp_path / "run"), str(file), *options])
        with np.load(file) as weights:
            return weights["first.weight"]

    if precision == "32-true":
        raw = load(which="raw").first.weight
        np.testing.assert_array_equal(exported("--which", "raw"), raw)
        np.testing.assert_array_equal(exported(), load().first.weight)


def test_a_damaged_checkpoint_is_passed_over_and_there_must_be_some(tmp_path):
    trainer, weights = trained(tmp_path)
    os.remove(tmp_path / "12" / "files.json")
    with pytest.warns(UserWarning, match=r"'last'.*12.*Skipped"):
        found = trainer.test(TEST, "last")
    np.testing.assert_allclose(
        list(found.values()), by_hand(weights.models[9]), rtol=1e-5
    )

    with pytest.raises(FileNotFoundError, match="'auto' is none of"):
        trainer.test(TEST, "auto")


def test_load_model_takes_the_best_of_a_folder_by_its_record(tmp_path, caplog):
    trainer, weights = trained(tmp_path / "run")
    best = trainer.history.epochs[int(np.argmin(trainer.history["val_loss"]))]
    folder = shutil.move(tmp_path / "run", tmp_path / "moved" / "run")
    step = sorted(weights.models)[best]

    def loaded():
        return arrays(jaxdp.load_model(folder, like=Mlp(jax.random.key(1))))

    assert_equal_leaves(loaded(), arrays(weights.models[step]))
    assert f"{step}, the best by val_loss (min) of 4 checkpoints" in caplog.text

    # The one that its saver has kept is the best, and not just the last.
    one = shutil.copytree(folder, tmp_path / "one" / "run")
    for other in set(weights.models) - {step}:
        shutil.rmtree(one / str(other))
    jaxdp.load_model(one, like=Mlp(jax.random.key(1)))
    assert f"{step}, the best by val_loss (min) of 1 checkpoint\n" in caplog.text

    # The best that is still there.
    shutil.rmtree(folder / str(step))
    order = np.argsort(trainer.history["val_loss"])
    second = sorted(weights.models)[order[1]]
    assert_equal_leaves(loaded(), arrays(weights.models[second]))


def test_load_model_takes_the_last_where_nothing_says_which_is_best(tmp_path, caplog):
    trainer = make(ModelCheckpoint(tmp_path / "run", save_top_k=-1))
    trainer.fit(TRAIN, max_epochs=3)
    for folder in (tmp_path / "run", tmp_path / "by hand"):
        if not folder.exists():
            trainer.callbacks = ()
            trainer.save(folder / "9")
        model = jaxdp.load_model(folder, like=Mlp(jax.random.key(1)))
        assert_equal_leaves(arrays(model), arrays(trainer.model))
        assert re.search(r"9, the last of \d checkpoints", caplog.text)

    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(FileNotFoundError, match=f"no checkpoint at {empty}"):
        jaxdp.load_model(empty, like=Mlp(jax.random.key(1)))

    (tmp_path / "by hand" / "10").mkdir()
    match = r"(?s)in it: 9, 10\. Pass .*/10; .*'auto'\) with .*argument `ckpt_path`='"
    with pytest.raises(FileNotFoundError, match=match):
        trainer.fit(TRAIN, max_epochs=4, ckpt_path=tmp_path / "by hand")
