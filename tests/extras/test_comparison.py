"""`Trainer.compare`: what it measures, and that it finds what is wrong."""

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from toys import Mlp, NormNet, Recorder, batches, cross_entropy, hand_written, quiet

from jaxdp import FSDP, Pmap, Sharded, SingleDevice
from jaxdp.step import Collectives


def make(**options):
    options.setdefault("loss", "cross_entropy")
    model = options.pop("model", None) or Mlp(jax.random.key(0), rate=0.0)
    return quiet(model, optax.adam(1e-2), **options)


def test_the_losses_are_those_of_the_first_steps_by_hand():
    data = batches(16, 16, 16, 16, 5)
    trainer = make(strategy=SingleDevice())
    found = trainer.compare(data, Sharded(), Pmap(4), FSDP(2), steps=5)
    _, expected = hand_written(
        Mlp(jax.random.key(0), rate=0.0), optax.adam(1e-2), data, 1, cross_entropy
    )
    for run in (found.reference, *found.runs):
        np.testing.assert_allclose(run.losses, expected, rtol=1e-5)
        assert len(run.step_seconds) == 5 and min(run.step_seconds) > 0
        assert run.compile_seconds > 0
    assert [run.strategy for run in found.runs] == [
        repr(strategy) for strategy in (Sharded(), Pmap(4), FSDP(2))
    ]
    found.assert_close()
    found.assert_close(1e-5, leaves_rtol=1e-4)


def test_it_starts_where_the_trainer_is_and_leaves_it_there():
    data = batches(16, 16)
    trainer = make(strategy=Sharded(2))
    trainer.fit(data, max_epochs=2)
    before = jax.tree.map(np.array, trainer.state)
    found = trainer.compare(data, steps=2)
    assert eqx.tree_equal(before, jax.tree.map(np.array, trainer.state))
    assert trainer.global_step == 4

    recorder = Recorder()
    trainer.callbacks.append(recorder)
    again = make(strategy=Sharded(2), callbacks=[recorder])
    again.fit(data, max_epochs=3)
    assert found.reference.losses == recorder.losses[4:]


def test_the_same_strategy_has_equal_bits():
    found = make(strategy=Sharded(4)).compare(batches(16, 16), Sharded(4), steps=2)
    assert found.is_equal
    found.assert_equal()
    assert "all 13 leaves have equal bits after every step" in str(found)
    assert "2 steps from the same start" in str(found)


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
    with pytest.raises(
        AssertionError, match=r"same numbers anywhere: loss under Uphill"
    ):
        found.assert_close()
    with pytest.raises(AssertionError, match="has other bits under"):
        found.assert_equal()
    with pytest.raises(AssertionError, match=r"params: last.weight under|optimizer"):
        found.assert_close(rtol=1e9, leaves_rtol=1e-4)
    table = str(found)
    assert "params: last.weight" in table and "from step 1" in table


def test_the_largest_difference_is_relative_to_the_arrays_magnitude():
    from jaxdp.extras.comparison import _describe_difference

    ones = np.ones(3, np.float32)
    found = _describe_difference([ones, ones * 2.5], [ones, ones * 2])
    assert found == (0.25, 2)
    assert _describe_difference([ones], [ones]) == (0.0, None)
    assert _describe_difference([ones * np.nan], [ones]).largest == np.inf
    assert (
        _describe_difference([ones.astype(int)], [ones.astype(int) * 2]).largest
        == np.inf
    )
    assert _describe_difference([np.float32(-0.0)], [np.float32(0.0)]) == (0.0, 1)


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
