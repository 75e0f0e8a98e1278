"""Mistakes a user makes: each an error that says what to change, before training."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import At, On, batches, linear, mlp, stop
from toys import make_small as make

from jaxdp.callbacks import NanGuard

X = np.ones((8, 4), np.float32)
Y = np.zeros(8, np.int32)


def test_arrays_in_the_place_of_loaders_are_told_how_to_be_batches():
    trainer, one = make(), r"pass one loader of both, jaxdp.Arrays\(x, y"
    x = jnp.asarray(X)
    for arguments, name in (
        ((X, Y), "train_loader"),
        (([(X, Y)], x), "val_loader"),
    ):
        with pytest.raises(TypeError, match=f"`{name}` is an? .*{one}"):
            trainer.fit(*arguments)
    with pytest.raises(
        TypeError, match=r"shape \(8, 4\).*arrays x and y, pass\s+jaxdp\.Arrays\(x, y"
    ):
        trainer.fit([X, Y])
    for given in (({"x": X}, Y), (({"x": X}, Y),), ([(X, Y)], (X, Y))):
        with pytest.raises(TypeError, match=r"jaxdp\.Arrays\(x, y, batch_size=32\)"):
            trainer.fit(*given)
    for method in (trainer.fit, trainer.validate, trainer.predict):
        with pytest.raises(TypeError, match=f"a tuple of arrays, .*{one}"):
            method((X, Y))
    assert trainer.global_step == 0


@pytest.mark.parametrize("criterion, reduces", [
    (lambda p, t: (p - t) ** 2, False),
    (lambda p, t: ((p - t) ** 2).mean(), True),
])  # fmt: skip
def test_broadcasting_of_predictions_against_targets_is_not_silent(
    criterion, reduces, caplog
):
    model, target = linear(4, 1), X[:, 0]
    with jax.numpy_rank_promotion("allow"):
        if reduces:
            make(model, loss=criterion).fit([(X, target)])
            note = "the shapes (1,) and () for each row: arithmetic broadcasts them"
            assert caplog.text.count(note) == 1
            return
        with pytest.raises(ValueError, match=r"\(8, 8\) for a batch of 8 rows"):
            make(model, loss=criterion).fit([(X, target)])
        # A criterion that makes the shapes equal itself is right, as named ones are.
        own = make(model, loss=lambda p, t: (p[:, 0] - t) ** 2)
        expected = own.fit([(X, target)])["loss"]
        assert make(model).fit([(X, target)])["loss"] == expected
        data = batches(8)
        data = [(data[0][0], data[0][0][:, 0])]
        huber = [make(model, loss=loss) for loss in ("huber", optax.huber_loss)]
        first, second = (each.fit(data)["loss"] for each in huber)
        assert first == second


@pytest.mark.parametrize("data, error, match", [
    (batches(8), TypeError, "need batches"),
    (batches(8, 8, 5), ValueError, "must share a leading axis"),
])  # fmt: skip
def test_what_is_no_list_of_batches_to_validate_on_is_named(data, error, match):
    trainer = make()
    with pytest.raises(error, match=match) as caught:
        trainer.fit(data, [data, data])
    assert any("first batch of `val_loader`" in n for n in caught.value.__notes__)
    assert trainer.global_step == 0


def test_a_batch_that_changes_mid_run_is_named_and_the_model_kept():
    trainer = make()
    data = [(X, Y), (X[:, :2], Y)]
    message = r"batch\[0\] was float32 \(rows, 4\), is float32 \(rows, 2\)"
    with pytest.raises(TypeError, match="dot_general") as caught:
        trainer.fit(data)
    assert any(re.search(message, note) for note in caught.value.__notes__)
    assert trainer.global_step == 1
    assert not (trainer.model.layers[0].weight == mlp().layers[0].weight).all()


def test_an_optimizer_with_parameters_of_its_own_kind_is_explained():
    lookahead = optax.lookahead(optax.sgd(0.1), 2, 0.5)
    with pytest.raises(ValueError, match="lookahead trains pairs.*WeightAveraging"):
        make(optimizer=lookahead).fit(batches(8))


@pytest.mark.parametrize("method", ["fit", "steps"])
def test_a_fit_inside_a_fit_is_refused_and_changes_nothing(method):
    def again(trainer):
        list(getattr(trainer, method)(batches(16, 16)))

    trainer = make(callbacks=[At(2, again)])
    with pytest.raises(RuntimeError, match=f"`{method}` was called while a fit of the"):
        trainer.fit(batches(8, 8, 8), max_epochs=2)
    assert (trainer.global_step, trainer.num_training_batches) == (2, 3)
    assert (trainer.max_epochs, trainer.record.batch_idx) == (2, 2)


@pytest.mark.parametrize("call", ["fit", "validate", "predict"])
def test_after_a_first_batch_that_does_not_fit_comes_one_that_does(call):
    trainer = make()
    wrong = [(np.ones((8, 5), np.float32), np.ones((8, 3), np.float32))]
    if call == "predict":
        wrong = [wrong[0][0]]
    with pytest.raises(TypeError, match="contracting dimensions") as caught:
        getattr(trainer, call)(wrong)
    assert "called on one example, of shape (5,) (jax" in caught.value.__notes__[0]
    getattr(trainer, call)(batches(8, 8))  # with labels: the loss is another one


def test_names_of_values_from_two_callbacks_must_differ():
    def inside(name):
        return On(inside_step=lambda grads, updates, state: {name: jnp.float32(0)})

    for name, other in {
        "norm": [inside("norm")], "skipped": [NanGuard()], "loss": [], "step": [],
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=rf"two values named \['{name}'\]"):
            make(callbacks=[inside(name), *other]).fit(batches(8))
    make(callbacks=[inside("norm"), inside("skipped")]).fit(batches(8))


def test_an_epoch_that_was_cut_and_has_no_more_batches_is_said(caplog):
    trainer = make()
    trainer.fit(batches(*[8] * 6), max_steps=4)
    trainer.fit(batches(8, 8), max_epochs=1)
    assert "epoch 0 is over: 4 batches of `train_loader` are done, and" in caplog.text
    assert (trainer.global_step, trainer.current_epoch) == (4, 1)
    trainer.fit(batches(8, 8, 8), max_steps=6)
    trainer.fit(batches(8, 8, 8), max_epochs=2, limit_train_batches=1)
    assert "epoch 1 is over: 2 batches of `train_loader` are done" in caplog.text


@pytest.mark.parametrize("loader", [iter(batches(8)), []], ids=["iterator", "empty"])
def test_a_fit_of_no_steps_reads_nothing(loader):
    with pytest.warns(UserWarning, match="`fit` has nothing to do: 0 epochs"):
        assert not [*make().fit(loader, max_steps=0)]


def test_an_epoch_that_a_hook_stops_before_its_first_batch_is_no_empty_loader(recwarn):
    trainer = make(callbacks=[At(1, stop, "on_train_epoch_start")])
    trainer.fit(batches(8), max_epochs=3)
    assert (trainer.global_step, [str(w.message) for w in recwarn]) == (1, [])


def test_an_exhausted_generator_ends_the_fit_with_a_warning():
    trainer = make()
    with pytest.warns(UserWarning, match="gave no batches in epoch 1"):
        trainer.fit((batch for batch in batches(8, 8)), max_epochs=3)
    assert trainer.global_step == 2
    assert len(trainer.history["loss"]) == 1


def test_the_inferred_loss_is_said_once(caplog):
    trainer = make()
    trainer.fit(batches(8, 8), max_epochs=2)
    trainer.fit(batches(8, 8), max_epochs=4)
    assert caplog.text.count("'cross_entropy', as targets are integers") == 1


@pytest.mark.parametrize("accumulate, options, is_said", [
    (4, {}, True),
    (3, {}, False),
    (2, {}, False),
    (4, {"limit_train_batches": 2}, False),
    (4, {"overfit_batches": 1}, False),
    (4, {"fast_dev_run": True}, False),
])  # fmt: skip
def test_an_accumulation_longer_than_an_epoch_is_said(
    accumulate, options, is_said, caplog
):
    trainer = make(accumulate_grad_batches=accumulate)
    trainer.fit(batches(8, 8, 8), **options)
    text = "`accumulate_grad_batches`=4 is more than the 3 batches of an epoch"
    assert (text in caplog.text) is is_said
