"""From the same state a step is one device's; a run drifts as a loop by hand does."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from kinds_of_models import CASES, noise, wide
from toys import Recorder, quiet

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
        shapes = [(count // 2, 2) for count in DEVICES[1:]] if case.split else []
        axes = [{"data": rows, "model": parts} for rows, parts in shapes]
        return [
            TensorParallel(mesh, [*case.split], devices=2 * mesh["data"])
            for mesh in axes
        ]
    if name == "Pipeline":
        counts = DEVICES[1:] if case.has_stack else []
        return [Pipeline(2, 2, count) for count in counts]
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
    return quiet(
        model,
        keeping(optax.adam(1e-3)),
        strategy=strategy,
        callbacks=[recorder],
        **options,
    )


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """By model: where it was saved, and loss and gradients of the step after that."""
    known = {}

    def of(name):
        if name not in known:
            case = CASES[name]
            trainer = trained(case, SingleDevice(), recorder := Recorder())
            trainer.fit(case.data[:-1])
            path = trainer.save(tmp_path_factory.mktemp("states") / "state")
            known[name] = path, _step(trainer, recorder, case.data[-1:])
        return known[name]

    return of


def _step(trainer, recorder, data):
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
        ours, our_grads = _step(trainer, recorder, case.data[-1:])
        assert trainer.global_step == len(case.data)
        np.testing.assert_allclose(ours, loss, rtol=1e-5, err_msg=repr(there))
        for one, other in zip(grads, our_grads, strict=True):
            assert np.abs(one - other).max() <= 1e-5 * norm, there


def by_hand(model, optimizer, data, devices):
    """The losses of a jitted loop, its batches split over devices."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    everywhere = NamedSharding(mesh, PartitionSpec())
    params, state = jax.device_put((params, optimizer.init(params)), everywhere)

    @jax.jit
    def step(params, state, x, y):
        def mean_loss(params):
            logits = jax.vmap(eqx.combine(params, static))(x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        loss, grads = jax.value_and_grad(mean_loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return eqx.apply_updates(params, updates), state, loss

    losses = []
    for batch in data:
        params, state, loss = step(params, state, *jax.device_put(batch, split))
        losses.append(float(loss))
    return np.array(losses)


def drift(losses, others):
    return np.max(np.abs(losses - others) / np.abs(others))


@slow
def test_a_run_drifts_from_one_device_no_more_than_a_loop_by_hand():
    ours, theirs = [], []
    for seed in range(2):
        model, data = wide(jax.random.key(seed)), noise(128, 5, seed=seed) * 10
        optimizer = optax.adam(1e-3)
        one = by_hand(model, optimizer, data, 1)
        reversed_rows = [(x[::-1].copy(), y[::-1].copy()) for x, y in data]
        theirs += [
            drift(by_hand(model, optimizer, data, 8), one),
            drift(by_hand(model, optimizer, reversed_rows, 1), one),
        ]
        losses = []
        for strategy in (SingleDevice(), Sharded()):
            recorder = Recorder()
            options = dict(loss="cross_entropy", callbacks=[recorder])
            quiet(model, optimizer, strategy=strategy, **options).fit(data)
            losses.append(np.array(recorder.losses))
        ours.append(drift(*losses))
    assert max(theirs) > 1e-5  # what is claimed of such models
    assert max(ours) < 10 * max(theirs)  # the same rounding, amplified at random
