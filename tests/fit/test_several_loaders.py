"""Validation on several loaders, each by its name."""

import jax
import numpy as np
import pytest
from toys import On, batches, make_small

from jaxdp.callbacks import CSVLogger, ModelCheckpoint

DATA = batches(16, 16, 5)
CLEAN, SHIFTED = batches(16, 3, seed=1), [(x + 1, y) for x, y in batches(8, 8, seed=2)]
BOTH = {"clean": CLEAN, "shifted": SHIFTED}


def make(*callbacks, **options):
    return make_small(callbacks=callbacks, metrics=["accuracy"], **options)


def test_each_has_the_means_that_it_has_alone(tmp_path):
    starts, numbers, ends = [], [], []
    hears = On(
        on_validation_start=starts.append,
        on_validation_batch_end=lambda trainer, batch_idx: numbers.append(batch_idx),
        on_validation_end=lambda trainer, metrics: ends.append(dict(metrics)),
    )
    saver = ModelCheckpoint(tmp_path, monitor="val_shifted_loss")
    trainer = make(hears, saver, CSVLogger(tmp_path / "logs"))
    history = trainer.fit(DATA, BOTH, max_epochs=2)
    alone = {name: trainer.validate(each) for name, each in BOTH.items()}
    ends.clear()
    found = trainer.validate(BOTH)
    expected = {
        name.replace("val", f"val_{which}", 1): value
        for which, values in alone.items()
        for name, value in values.items()
    }
    assert found == expected == ends[0]
    assert {name: history[name][-1] for name in expected} == expected
    assert "val_loss" not in history.state_dict()["metrics"]
    tested = {name.replace("val", "test", 1): v for name, v in expected.items()}
    assert trainer.test(BOTH) == tested

    # In a fit callbacks hear of one validation.
    starts.clear(), numbers.clear()
    trainer.fit(DATA, BOTH, max_epochs=3, limit_val_batches=1)
    assert len(starts) == 1 and numbers == [0, 1]


def test_mistakes_are_told():
    trainer = make()
    with pytest.raises(TypeError, match="`val_loader` is a list of 2 loaders.*'clean'"):
        trainer.fit(DATA, [map(tuple, CLEAN), map(tuple, SHIFTED)])
    with pytest.raises(
        TypeError, match=r"`val_loader\['x'\]` is a ndarray, not an iter"
    ):
        trainer.fit(DATA, {"x": np.ones((4, 4)), "y": np.ones(4)})
    with pytest.raises(ValueError, match=r"`loader\['empty'\]` gave no batches"):
        trainer.validate({"clean": CLEAN, "empty": []})
    with pytest.raises(ValueError, match="'val_clean_loss'"):
        make(ModelCheckpoint("runs", monitor="val_loss")).fit(DATA, BOTH)


def test_names_that_would_be_the_same_are_refused():
    def loss_fn(model, x, y):
        each = jax.vmap(model)(x).sum(-1)
        return each, {"b_loss": each}

    trainer = make_small(loss_fn=loss_fn)
    with pytest.raises(ValueError, match="val_a_b_loss.*Rename one of them"):
        trainer.fit(DATA, {"a": CLEAN, "a_b": CLEAN})


def once(*sizes):
    yield from batches(*sizes)


def test_a_generator_is_for_one_validation():
    trainer = make()
    with pytest.raises(ValueError, match="`val_loader` is a generator.* iterated once"):
        trainer.fit(batches(8, 8), once(8, 8), max_epochs=2)
    assert trainer.global_step == 0
    trainer.fit(batches(8, 8), once(8, 8), max_epochs=2, limit_val_batches=1)
    assert trainer.validate(once(8, 8))


def test_one_iterator_is_not_both_loaders():
    both = iter(batches(*[8] * 12))
    with pytest.raises(ValueError, match="`val_loader\\['a'\\]` is the iterator that"):
        make().fit(both, {"a": both}, max_steps=4)
