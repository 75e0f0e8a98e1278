"""`Trainer.compare`: what it measures, and that it finds what is wrong."""

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from toys import Mlp, NormNet, Recorder, batches, cross_entropy, hand_written, quiet

from jaxdp import FSDP, Pmap, Sharded, SingleDevice
from jaxdp.extras.comparison import Comparison, Difference, Run, compare
from jaxdp.strategies import Collectives


def make(**options):
    options.setdefault("loss", "cross_entropy")
    model = options.pop("model", None) or Mlp(jax.random.key(0), rate=0.0)
    return quiet(model, optax.adam(1e-2), **options)


def test_the_losses_are_those_of_the_first_steps_by_hand():
    data = batches(16, 16, 16, 16, 5)
    strategies = Sharded(), Pmap(4), FSDP(2), SingleDevice()
    found = make(strategy=SingleDevice()).compare(data, *strategies, steps=5)
    _, expected = hand_written(
        Mlp(jax.random.key(0), rate=0.0), optax.adam(1e-2), data, 1, cross_entropy
    )
    for run in (found.reference, *found.runs):
        np.testing.assert_allclose(run.losses, expected, rtol=1e-5)
        assert len(run.step_seconds) == 5 and min(run.step_seconds) > 0
        assert run.compile_seconds > 0
    assert [run.strategy for run in found.runs] == [*map(repr, strategies)]
    found.assert_close()
    found.assert_close(1e-5, leaves_rtol=1e-4)
    assert "5 steps from the same start" in str(found)
    same = Comparison(found.reference, found.runs[3:])
    assert same.is_equal
    same.assert_equal()
    assert "all 13 leaves have equal bits after every step" in str(same)


def test_it_starts_where_the_trainer_is_and_leaves_it_there():
    data = batches(16, 16)
    trainer = make(strategy=Sharded(2))
    trainer.fit(data, max_epochs=2)
    before = jax.tree.map(np.array, trainer.state)
    found = trainer.compare(data, steps=2)
    assert eqx.tree_equal(before, jax.tree.map(np.array, trainer.state))
    assert trainer.global_step == 4

    trainer.callbacks.append(recorder := Recorder())
    trainer.fit(data, max_epochs=3)
    assert found.reference.losses == recorder.losses


class Uphill(Sharded):
    """Gives the optimizer the gradients' negatives."""

    def collectives(self, groups, rows):
        class Negative(Collectives):
            def sum_gradients(self, gradients):
                return jax.tree.map(lambda leaf: -leaf, gradients)

        return Negative()


def test_a_wrong_strategy_is_found_with_its_leaf_and_its_step():
    found = make(strategy=SingleDevice()).compare(batches(16, 16, 16), Uphill())
    (run,) = found.runs
    # The first loss comes before any gradient; the first update already differs.
    assert run.loss.first_step == 2 or run.losses[0] == found.reference.losses[0]
    weight = run.leaves["params: last.weight"]
    assert weight.first_step == 1 and weight.largest > 1e-3
    for check, words in {
        found.assert_close: "same numbers anywhere: loss under Uphill",
        found.assert_equal: "has other bits under",
        lambda: found.assert_close(1e9, 1e-4): "params: last.weight under|optimizer",
    }.items():
        with pytest.raises(AssertionError, match=words):
            check()
    assert "params: last.weight" in str(found) and "from step 1" in str(found)


ONES = np.ones(3, np.float32)


@pytest.mark.parametrize("found, expected, difference", [
    ([ONES, ONES * 2.5], [ONES, ONES * 2], (0.25, 2)),
    ([ONES], [ONES], (0.0, None)),
    ([ONES * np.nan], [ONES], (np.inf, 1)),
    ([ONES.astype(int)], [ONES.astype(int) * 2], (np.inf, 1)),
    ([np.float32(-0.0)], [np.float32(0.0)], (0.0, 1)),
])  # fmt: skip
def test_differences_are_relative_to_the_arrays_magnitude(found, expected, difference):
    run = Run("", [], [], 0.0, Difference(0.0, None), {})
    traces = ((run, [{"loss": x} for x in values]) for values in (expected, found))
    reference, other = traces
    assert compare(reference, [other]).runs[0].loss == difference


def test_it_follows_the_trainers_options():
    model, state = eqx.nn.make_with_state(NormNet)(jax.random.key(0))
    trainer = make(
        model=model, state=state, accumulate_grad_batches=2, precision="bf16-mixed",
        strategy=SingleDevice(), loss=None,
    )  # fmt: skip
    found = trainer.compare(batches(16, 16, 16), Sharded(2), steps=9)
    assert len(found.reference.losses) == 2  # batches in pairs, and one left over
    assert any(name.startswith("model state: ") for name in found.reference.leaves)
    found.assert_close(2e-2)
