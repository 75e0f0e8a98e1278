"""From the same state a step is one device's; a run drifts as a loop by hand does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kinds_of_models import CASES, noise, wide
from toys import Recorder, cross_entropy, hand_written, quiet

from jaxdp import (
    FSDP,
    Bitwise,
    Pipeline,
    Pmap,
    Sharded,
    SingleDevice,
    TensorParallel,
    ZeRO,
)

slow = pytest.mark.slow
rare = [slow, pytest.mark.kin]  # the quick ones show the same promise


DEVICES = 1, 2, 4, 8
STRATEGIES = {
    "Sharded": Sharded,
    "Pmap": Pmap,
    "ZeRO": lambda count: ZeRO(devices=count),
    "FSDP": lambda count: FSDP(devices=count, min_size=1),
    "Bitwise": lambda count: Bitwise(Sharded(count)),
}


def strategies_for(case, name):
    """Returns a name's strategies that fit a model, each on another device count."""
    if name == "TensorParallel":
        grids = [{"data": count // 2, "model": 2} for count in DEVICES[1:]]
        return [
            TensorParallel(grid, [*case.split], devices=2 * grid["data"])
            for grid in grids
        ]
    if name == "Pipeline":
        return [Pipeline(2, 2, count) for count in DEVICES[1:]]
    return [STRATEGIES[name](count) for count in DEVICES]


def keeping(optimizer):
    """An optimizer that keeps the last gradients in its state."""

    def init(params):
        return jax.tree.map(jnp.zeros_like, params), optimizer.init(params)

    def update(grads, state, params=None):
        updates, inner = optimizer.update(grads, state[1], params)
        return updates, (grads, inner)

    return optax.GradientTransformation(init, update)


def trained(case, strategy, recorder):
    model, options = case.make(jax.random.key(0)), dict(case.options)
    if isinstance(model, tuple):
        model, options["state"] = model
    options |= {"strategy": strategy, "callbacks": [recorder]}
    return quiet(model, keeping(optax.adam(1e-3)), **options)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """By model: where it was saved, and loss and gradients of the step after that."""

    @functools.cache
    def of(name):
        case, recorder = CASES[name], Recorder()
        trainer = trained(case, SingleDevice(), recorder)
        trainer.fit(case.data[:-1])
        path = trainer.save(tmp_path_factory.mktemp("states") / "state")
        return path, take_step(trainer, recorder, case.data[-1:])

    return of


def take_step(trainer, recorder, data):
    """The loss and gradients of one more step."""
    trainer.fit(data, max_epochs=2)
    grads = jax.tree.map(np.asarray, trainer.state.opt_state[0])
    return recorder.losses[-1], jax.tree.leaves(grads)


QUICK = [("small MLP, dropout, a ragged batch", "Sharded"), ("embeddings", "FSDP")]
PAIRS = [
    pytest.param(model, strategy, marks=[] if (model, strategy) in QUICK else rare)
    for model, case in CASES.items()
    for strategy in (*STRATEGIES, "TensorParallel", "Pipeline")
    if strategy in STRATEGIES or (case.split if strategy[0] == "T" else case.has_stack)
    if strategy != "Bitwise" or "loss_fn" not in case.options
]


@pytest.mark.parametrize(("model", "strategy"), PAIRS)
def test_a_step_from_the_same_state_is_that_of_one_device(model, strategy, one_device):
    case = CASES[model]
    path, (loss, grads) = one_device(model)
    norm = np.sqrt(sum((grad.astype(np.float64) ** 2).sum() for grad in grads))
    for there in strategies_for(case, strategy):
        trainer = trained(case, there, recorder := Recorder())
        trainer.load(path)
        ours, our_grads = take_step(trainer, recorder, case.data[-1:])
        assert trainer.global_step == len(case.data)
        np.testing.assert_allclose(ours, loss, rtol=1e-5, err_msg=repr(there))
        for one, other in zip(grads, our_grads, strict=True):
            assert np.abs(one - other).max() <= 1e-5 * norm, there


def drift(losses, others):
    return np.max(np.abs(losses - others) / np.abs(others))


@slow
def test_a_run_drifts_from_one_device_no_more_than_a_loop_by_hand():
    ours, theirs, optimizer = [], [], optax.adam(1e-3)
    for seed in range(2):
        model, data = wide(jax.random.key(seed)), noise(128, 5, seed=seed)
        backwards = [(x[::-1].copy(), y[::-1].copy()) for x, y in data]
        by_hand = [
            np.array(hand_written(model, optimizer, rows, 10, cross_entropy)[1])
            for rows in (backwards, data)
        ]
        theirs.append(drift(*by_hand))
        losses = []
        for strategy in (SingleDevice(), Sharded()):
            options = {"strategy": strategy, "callbacks": [recorder := Recorder()]}
            quiet(model, optimizer, loss="cross_entropy", **options).fit(data * 10)
            losses.append(np.array(recorder.losses))
        ours.append(drift(*losses))
    assert max(theirs) > 1e-5  # what is claimed of such models
    assert max(ours) < 10 * max(theirs)  # the same rounding, amplified at random
