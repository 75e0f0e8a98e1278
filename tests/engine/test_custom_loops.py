"""Several steps per dispatch in a custom loop over `trainer.steps`."""

import jax
import pytest
from toys import Mlp, Recorder, batches, bits

from jaxdp import SingleDevice, Trainer


def by_hand(steps, loader, epochs=2, **options):
    """Returns the losses of the loop with their steps, of hooks, and the trainer."""
    recorder = Recorder()
    trainer = Trainer(
        Mlp(jax.random.key(0)), loss="cross_entropy", steps_per_execution=steps,
        strategy=SingleDevice(), callbacks=[recorder], enable_progress_bar=False,
        **options,
    )  # fmt: skip
    found = []
    for _ in range(epochs):
        for metrics in trainer.steps(loader()):
            found.append((float(metrics["loss"]), trainer.global_step))
    return found, recorder.losses, trainer


@pytest.mark.parametrize("loader", [list, iter])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_custom_loop_has_dispatches_of_several_steps(loader, accumulate, monkeypatch):
    data, options = batches(*[16] * 8), {"accumulate_grad_batches": accumulate}
    size = 4 // accumulate
    runs, calls, call = [], [], jax.stages.Compiled.__call__

    def count(self, *arguments):
        calls[-1] += len(arguments) == 2  # of the train step
        return call(self, *arguments)

    monkeypatch.setattr(jax.stages.Compiled, "__call__", count)
    for steps in 1, size:
        calls.append(0)
        runs.append(by_hand(steps, lambda: loader(data), **options))
    one, other = runs
    assert one[0] == other[0] and one[1] == other[1]
    assert [loss for loss, _ in one[0]] == one[1]
    assert bits(one[2].state) == bits(other[2].state)
    assert other[2].current_epoch == 2
    assert calls == [16 // accumulate, 16 // accumulate // size]


@pytest.mark.parametrize("use", ["save", "load", "fit"])
def test_methods_are_refused_inside_a_dispatch_of_a_custom_loop(use, tmp_path):
    data = batches(*[16] * 8)
    _, _, trainer = by_hand(4, lambda: data, epochs=1)
    steps = trainer.steps(data)
    next(steps)
    with pytest.raises(RuntimeError, match=f"`{use}`.* step 9, .* that of step 12"):
        getattr(trainer, use)(data if use == "fit" else tmp_path / "saved")
    steps.close()
    assert trainer.global_step == 12  # the state has all steps of the dispatch
    trainer.save(tmp_path / "saved")
