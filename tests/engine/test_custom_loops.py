"""Several steps per dispatch in a custom loop over `trainer.steps`."""

import jax
import pytest
from toys import Mlp, Recorder, batches, bits

from jaxdp import SingleDevice, Trainer


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


def by_hand(steps, loader, epochs=2, **options):
    """Returns the losses of the loop with their steps, of hooks, and the trainer."""
    recorder = Recorder()
    trainer = Trainer(
        Mlp(jax.random.key(0)), loss="cross_entropy", steps_per_execution=steps,
        strategy=Counting(), callbacks=[recorder], enable_progress_bar=False,
        **options,
    )  # fmt: skip
    found = []
    for _ in range(epochs):
        for metrics in trainer.steps(loader()):
            found.append((float(metrics["loss"]), trainer.global_step))
    return found, recorder.losses, trainer


@pytest.mark.parametrize("loader", [list, iter])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_custom_loop_has_dispatches_of_several_steps(loader, accumulate):
    data, options = batches(*[16] * 8), {"accumulate_grad_batches": accumulate}
    size = 4 // accumulate
    one, other = (by_hand(n, lambda: loader(data), **options) for n in (1, size))
    assert one[0] == other[0] and one[1] == other[1]
    assert [loss for loss, _ in one[0]] == one[1]
    assert bits(one[2].state) == bits(other[2].state)
    assert other[2].current_epoch == 2
    calls = [trainer.strategy.calls for *_, trainer in (one, other)]
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
