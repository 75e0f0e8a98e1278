"""Blocks of steps in a loop of the user's own, over `trainer.steps`."""

import re

import jax
import pytest
from toys import Mlp, Recorder, batches, bits

from jaxdp import SingleDevice, Trainer


def test_steps_by_hand_may_look_at_every_one():
    losses = {}
    for steps in (1, 4):
        trainer = Trainer(
            Mlp(jax.random.key(0)),
            loss="cross_entropy",
            steps_per_execution=steps,
            enable_progress_bar=False,
        )
        losses[steps] = [
            (metrics["loss"], trainer.global_step, *bits(trainer.model))
            for metrics in trainer.steps(batches(*[16] * 9))
        ]
    assert losses[1] == losses[4]


class Counting(SingleDevice):
    """Counts the calls of compiled steps."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def compile(self, *arguments, **options):
        compiled = super().compile(*arguments, **options)

        def call(*arguments):
            self.calls += 1
            return compiled(*arguments)

        return call


class Sized:
    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


def by_hand(steps, loader, epochs=4, loop=lambda trainer, metrics: None, **options):
    """Losses that the loop of `trainer.steps` has seen, those of hooks, the trainer."""
    recorder = Recorder()
    trainer = Trainer(
        Mlp(jax.random.key(0)), loss="cross_entropy", steps_per_execution=steps,
        strategy=Counting(), callbacks=[recorder], enable_progress_bar=False,
        **options,
    )  # fmt: skip
    found = []
    for _ in range(epochs):
        for metrics in trainer.steps(loader()):
            found.append(float(metrics["loss"]))
            loop(trainer, metrics)
    return found, recorder.losses, trainer


@pytest.mark.slow_but("1-list", "2-tuple", "2-Sized")
@pytest.mark.parametrize("loader", [list, tuple, Sized])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loop_by_hand_over_known_batches_has_blocks(loader, accumulate):
    data, options = batches(*[16] * 8), {"accumulate_grad_batches": accumulate}
    found = [
        by_hand(steps, lambda: loader(data), **options)
        for steps in (1, 8 // accumulate, "auto")
    ]
    for losses, of_hooks, trainer in found:
        assert losses == of_hooks == found[0][0]
        assert trainer.global_step == 32 // accumulate
        assert trainer.current_epoch == 4
        assert bits(trainer.state) == bits(found[0][2].state)
    # The first epoch shows, step by step, whether the loop uses the trainer.
    assert [trainer.strategy.calls for *_, trainer in found[:2]] == [
        32 // accumulate,
        8 // accumulate + 3,
    ]


def test_a_loop_by_hand_over_batches_of_unknown_number_has_single_steps(capsys):
    _, _, trainer = by_hand(4, lambda: iter(batches(*[16] * 8)), epochs=2)
    assert trainer.strategy.calls == 16
    assert "how many batches come is not known" in capsys.readouterr().err


USES = {
    "model": lambda trainer: trainer.model,
    "state": lambda trainer: trainer.state,
    "predict": lambda trainer: trainer.predict([batches(16)[0][0]]),
    "validate": lambda trainer: trainer.validate(batches(16)),
    "hyperparams": lambda trainer: trainer.hyperparams,
}


@pytest.mark.parametrize("use", USES)
def test_a_loop_by_hand_that_uses_the_trainer_has_single_steps(use, capsys):
    data, models = batches(*[16] * 8), []

    def loop(trainer, metrics):
        USES[use](trainer)
        models.append(bits(trainer.model))

    _, _, trainer = by_hand(4, lambda: data, epochs=2, loop=loop)
    assert len({*map(tuple, models)}) == trainer.global_step == 16
    said = capsys.readouterr().err
    assert re.search(rf"1 at a time, because the loop uses `(trainer\.)?{use}`", said)


@pytest.mark.parametrize("use", [*USES, "load", "steps", "fit"])
def test_a_loop_by_hand_can_not_use_the_trainer_inside_a_block(use, tmp_path):
    data = batches(*[16] * 8)
    uses = USES | {
        "load": lambda trainer: trainer.load(tmp_path),
        "steps": lambda trainer: trainer.steps(data),
        "fit": lambda trainer: trainer.fit(data),
    }
    _, _, trainer = by_hand(4, lambda: data, epochs=2)
    steps = trainer.steps(data)
    next(steps)
    with pytest.raises(RuntimeError, match="in one call.*`steps_per_execution`=4"):
        uses[use](trainer)
    steps.close()
    assert trainer.global_step == 20  # the state has the whole block
    uses["state"](trainer)
    for _ in trainer.steps(data):  # the next loop may
        uses[use if use in USES else "state"](trainer)
    assert trainer.global_step == 28
