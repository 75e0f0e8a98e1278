"""The score of a checkpoint is that of its weights, whatever it is saved by."""

import math
import os
import signal

import optax
import pytest
from toys import (
    At,
    On,
    assert_equal_leaves,
    batches,
    fail_with,
    on_one_device,
    steps_in,
)

from jaxdp.callbacks import ModelCheckpoint

DATA, VAL = batches(*[16] * 6), batches(16, 9, seed=1)


def values_of(values):
    """Returns a callback that logs the values given for steps as `val_q`."""

    def log(trainer, metrics):
        trainer.log("val_q", values[trainer.global_step])

    return On(on_validation_end=log)


def make(*callbacks, **options):
    """Its validation loss goes down, up, and down again."""
    rates = [optax.constant_schedule(rate) for rate in (0.5, -1.0, 0.5)]
    optimizer = optax.sgd(optax.join_schedules(rates, [5, 9]))
    return on_one_device(*callbacks, optimizer=optimizer, **options)


def scores(saver):
    return {
        step: score and float(score) for step, score in saver.state_dict()["scores"]
    }


def linked(path, name):
    return os.path.realpath(path / name) if os.path.lexists(path / name) else ""


AND_3, EVERY_2 = {"val_check_interval": 3}, {"every_n_train_steps": 2}
COMBINATIONS = {
    "epochs": ({}, {}, {}),
    "intervals": ({}, {"val_check_interval": 2}, {}),
    "steps, others than those validated": (EVERY_2, AND_3, {"steps_per_execution": 4}),
    "steps and epochs": ({"every_n_train_steps": 5, "every_n_epochs": 2,
                          "save_top_k": -1}, {"val_check_interval": 4}, {}),
    "epochs, every second of which is validated": (
        {"every_n_epochs": 1, "save_last": True}, {"check_val_every_n_epoch": 2}, {}),
    "time": ({"train_time_interval": 1e-6}, {"val_check_interval": 4},
             {"steps_per_execution": 3}),
    "only the last": (EVERY_2 | {"save_last": True, "save_top_k": 0}, AND_3, {}),
    "accumulation": ({"every_n_train_steps": 1, "save_top_k": 2}, AND_3,
                     {"accumulate_grad_batches": 2}),
    "a signal between two validations": (
        {"every_n_train_steps": 5}, AND_3 | {"stops_after": 7}, {}),
    "a signal after a validation": (
        {}, {"val_check_interval": 2, "stops_after": 8}, {"steps_per_execution": 2}),
}  # fmt: skip


@pytest.mark.slow_cases(
    "epochs, every second of which is validated",
    "accumulation",
)
@pytest.mark.parametrize("of_saver, of_fit, of_trainer", [
    pytest.param(*each, id=name) for name, each in COMBINATIONS.items()
])  # fmt: skip
def test_the_best_tests_as_it_was_scored(tmp_path, of_saver, of_fit, of_trainer):
    def saving():
        return ModelCheckpoint(tmp_path, monitor="val_loss", **of_saver)

    fit = {"max_epochs": 3, **of_fit}
    if (step := fit.pop("stops_after", None)) is not None:
        kill = At(step, lambda trainer: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(SystemExit):
            make(saving(), kill, **of_trainer).fit(DATA, VAL, **fit)
        assert step in steps_in(tmp_path)
    saver = saving()
    trainer = make(saver, **of_trainer)
    trainer.fit(DATA, VAL, ckpt_path="auto", **fit)

    # All that is kept has the score that it is measured to have, or none.
    kept = scores(saver)
    assert steps_in(tmp_path) == sorted(kept)
    loss = "test_loss"
    for step, score in kept.items():
        if score is not None:
            assert trainer.test(VAL, str(tmp_path / str(step)))[loss] == score
    unscored = [step for step, score in kept.items() if score is None]
    if of_saver.get("save_top_k") != -1:
        assert unscored in ([], [max(kept)])

    # The best of them is the best, for whoever asks.
    scored = {step: score for step, score in kept.items() if score is not None}
    last = str(tmp_path / str(max(kept)))
    assert saver.last_model_path == last
    assert linked(tmp_path, "last") == (last if saver.save_last else "")
    if saver.save_top_k == 0:
        assert len(kept) == 1
        return
    best = min(scored, key=scored.get)
    assert saver.best_model_score == scored[best]
    assert (
        saver.best_model_path == linked(tmp_path, "best") == str(tmp_path / str(best))
    )
    assert trainer.test(VAL, "best")[loss] == saver.best_model_score
    assert make(saving(), **of_trainer).test(VAL, "best")[loss] == scored[best]


Q = {2: 1.0, 4: 5.0, 6: 4.0}


@pytest.mark.parametrize("values, interval, options, expected", [
    ({2: 5.0, 4: 1.0, 6: 7.0}, 2, {}, {4: 1.0}),
    (Q, 2, {"mode": "max"}, {4: 5.0}),
    (Q, 2, {"save_top_k": 2}, {2: 1.0, 6: 4.0}),
    (Q, 2, {"save_last": True}, {2: 1.0, 6: 4.0}),
    (Q, 2, {"save_top_k": -1}, Q),
    (Q, 2, {"every_n_epochs": 2}, {}),
    # Of equal ones the older stays, and NaN is worse than anything.
    ({2: 1.0, 4: 1.0, 6: 1.0}, 2, {}, {2: 1.0}),
    ({2: 2.0, 4: 2.0, 6: 1.0}, 2, {"save_top_k": 2}, {2: 2.0, 6: 1.0}),
    ({2: math.nan, 4: 3.0, 6: math.nan}, 2, {}, {4: 3.0}),
    # Without a score, only the newest of all.
    ({3: 5.0, 6: 1.0}, 3, {"every_n_train_steps": 2}, {6: 1.0}),
    ({3: 1.0, 6: 5.0}, 3, {"every_n_train_steps": 2}, {3: 1.0, 4: None}),
    ({3: 1.0, 6: 5.0}, 3, {"every_n_train_steps": 4, "save_top_k": -1},
     {3: 1.0, 4: None, 6: 5.0}),
    ({3: 1.0, 6: 5.0}, 3, {"every_n_train_steps": 4, "save_top_k": 0}, {}),
])  # fmt: skip
def test_what_is_kept(tmp_path, values, interval, options, expected):
    options = {"save_last": False} | options
    saver = ModelCheckpoint(tmp_path, monitor="val_q", **options)
    make(values_of(values), saver).fit(DATA, VAL, val_check_interval=interval)
    assert scores(saver) == expected
    assert steps_in(tmp_path) == sorted(expected)


def test_by_steps_there_is_no_score_but_at_the_end_of_an_epoch(tmp_path):
    saver = ModelCheckpoint(tmp_path, "loss", every_n_train_steps=4, save_top_k=-1)
    trainer = make(saver)
    history = trainer.fit(DATA, max_epochs=2)
    first, second = history["loss"]
    assert scores(saver) == {4: None, 6: first, 8: None, 12: second}
    assert saver.best_model_score == min(first, second)
    next(make(ModelCheckpoint(tmp_path / "a", every_n_train_steps=1)).steps(DATA))
    with pytest.warns(UserWarning, match="ends no epoch, so this saves nothing"):
        next(make(ModelCheckpoint(tmp_path / "none")).steps(DATA))


def test_what_is_gone_on_from_stays_until_another_one_is_whole(tmp_path):
    def saving(save_top_k=1):
        return ModelCheckpoint(tmp_path, "val_q", "min", save_top_k, save_last=False)

    make(values_of(Q), saving(save_top_k=3)).fit(DATA, VAL, val_check_interval=2)
    assert steps_in(tmp_path) == [2, 4, 6]
    seen = []
    look = On(on_boundary=lambda trainer: seen.append(steps_in(tmp_path)))
    # The best of two is step 2, and it goes on from 4. Step 6 is another one then.
    values = {6: 7.0, 9: 0.5, 12: 9.0}
    trainer = make(values_of(values), look, saving())
    trainer.fit(DATA, VAL, max_epochs=2, val_check_interval=3, ckpt_path=tmp_path / "4")
    assert seen[0] == seen[4] == [2, 4]
    assert steps_in(tmp_path) == [9] and steps_in(tmp_path / "before-1") == [6]


@pytest.mark.parametrize("on", [False, True])
def test_an_exception_is_saved_if_it_is_asked_for(tmp_path, on):
    def saving(**options):
        return ModelCheckpoint(tmp_path, "val_loss", save_on_exception=on, **options)

    saver = saving()
    with pytest.raises(KeyError, match="on purpose"):
        fails = At(8, fail_with(KeyError("on purpose")))
        make(saver, fails).fit(DATA, VAL, max_epochs=2)
    assert steps_in(tmp_path) == ([6, 8] if on else [6])
    assert saver.best_model_path == str(tmp_path / "6")
    whole = make()
    whole.fit(DATA, VAL, max_epochs=2)
    again = make(saving())
    again.fit(DATA, VAL, max_epochs=2, ckpt_path="auto")
    assert_equal_leaves(again.state, whole.state)


def test_keeps_every_nth_step_whatever_its_score(tmp_path):
    def saver():
        options = {"every_n_train_steps": 2, "keep_every_n_steps": 4}
        return ModelCheckpoint(tmp_path, "val_loss", **options)

    values = values_of(dict.fromkeys(range(99), 0.0))
    make(saver(), values).fit(DATA, VAL, max_epochs=1)
    assert steps_in(tmp_path) == [4, 6]
    make(saver(), values).fit(DATA, VAL, max_epochs=3, ckpt_path="auto")
    assert {4, 8, 12, 16} < {*steps_in(tmp_path)} and 10 not in steps_in(tmp_path)
    with pytest.raises(ValueError, match="`keep_every_n_steps` must be 1 or more or N"):
        ModelCheckpoint(tmp_path, keep_every_n_steps=0)
