"""`Trainer(after_update=...)` beside loops by hand, under every strategy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import (
    RAGGED,
    Mlp,
    Recorder,
    assert_close,
    batches,
    cross_entropy,
    hand_written,
    quiet,
)

from jaxdp import (
    FSDP,
    Bitwise,
    Members,
    Part,
    Pmap,
    Sharded,
    SingleDevice,
    TensorParallel,
    ZeRO,
)
from jaxdp.callbacks import NanGuard

DATA = batches(*RAGGED)
KEY = jax.random.key(0)
ADAM = optax.adam(3e-2)


class Pair(eqx.Module):
    """A trained network, a slow copy of it, and a count of updates."""

    online: eqx.nn.MLP
    target: eqx.nn.MLP
    count: jax.Array

    def __init__(self, key):
        self.online = eqx.nn.MLP(4, 3, 8, 1, key=key)
        self.target, self.count = jax.tree.map(lambda x: x, self.online), jnp.int32(0)

    def __call__(self, x):
        return self.online(x) + 0.3 * self.target(x)


def pair(key):
    """With copies of the arrays in the target, and the filter that freezes it."""
    model = Pair(key)
    copied = jax.tree.map(lambda x: x + 0 if eqx.is_array(x) else x, model.target)
    model = eqx.tree_at(lambda m: m.target, model, copied)
    trained = jax.tree.map(eqx.is_inexact_array, model)
    frozen = jax.tree.map(lambda _: False, trained.target)
    return model, eqx.tree_at(lambda m: m.target, trained, frozen)


def follow(model, step):
    """Clips a weight, moves the slow copy in even steps, counts."""

    def slow(old, new):
        return jnp.where(step % 2 == 0, 0.8 * old + 0.2 * new, old)

    arrays, rest = eqx.partition(model.target, eqx.is_array)
    online = eqx.filter(model.online, eqx.is_array)
    target = eqx.combine(jax.tree.map(slow, arrays, online), rest)
    clipped = jnp.clip(model.online.layers[0].weight, -0.3, 0.3)
    return eqx.tree_at(
        lambda m: (m.online.layers[0].weight, m.target, m.count),
        model,
        (clipped, target, model.count + 1),
    )


def by_hand(model, trained, windows):
    """Plain JAX: the model, and the loss of every step."""
    return hand_written(model, ADAM, windows, 1, cross_entropy, trained, follow)


def fit(model, strategy=None, after=follow, data=DATA, epochs=2, **options):
    options = {"loss": None if "loss_fn" in options else "cross_entropy"} | options
    options |= {"strategy": strategy or SingleDevice(), "after_update": after}
    trainer = quiet(model, ADAM, **options)
    trainer.fit(data, max_epochs=epochs)
    return trainer


RULES = [(r"online.layers[0].weight", jax.sharding.PartitionSpec("model", None))]
STRATEGIES = {
    "single": lambda: SingleDevice(),
    "sharded": lambda: Sharded(8),
    "pmap": lambda: Pmap(8),
    "fsdp": lambda: FSDP(8),
    "zero": lambda: ZeRO(devices=8),
    "tensor": lambda: TensorParallel({"data": 4, "model": 2}, RULES),
    "bitwise": lambda: Bitwise(Sharded(4)),
}


QUICK = (
    "single- sharded-accumulated pmap-several fsdp-interacting tensor- bitwise-".split()
)
OPTIONS = {
    "": {},
    "accumulated": {"accumulate_grad_batches": 2},
    "several": {"steps_per_execution": 2, "remat": "online"},
    "interacting": {"loss_fn": cross_entropy},  # a scalar: rows interact
}


@pytest.mark.slow_but(*QUICK)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_fit_is_the_loop_by_hand(strategy, options):
    if strategy == "bitwise" and ("remat" in options or "loss_fn" in options):
        pytest.skip("refused")
    model, trained = pair(KEY)
    size = options.get("accumulate_grad_batches", 1)
    windows = [
        [np.concatenate(each) for each in zip(*DATA[start : start + size], strict=True)]
        for start in range(0, len(DATA), size)
    ]
    expected, losses = by_hand(model, trained, windows * 2)
    seen = Recorder()
    trainer = fit(
        model, STRATEGIES[strategy](), filter_spec=trained, callbacks=[seen], **options
    )
    np.testing.assert_allclose(seen.losses, losses, rtol=2e-4)
    assert_close(trainer.model, expected, 2e-4, 2e-5)
    assert trainer.model.count == len(losses)
    assert abs(trainer.model.online.layers[0].weight).max() <= np.float32(0.3)


@pytest.mark.parametrize("strategy", [SingleDevice(), Members(2)], ids=repr)
def test_the_function_sees_one_member_of_an_ensemble(strategy):
    keys = jax.random.split(jax.random.key(3), 2)
    models = [pair(key) for key in keys]
    stacked = jax.tree.map(
        lambda *each: jnp.stack(each) if eqx.is_array(each[0]) else each[0],
        *(model for model, _ in models),
    )
    trainer = fit(stacked, strategy, filter_spec=models[0][1], ensemble=2)
    for index, (model, trained) in enumerate(models):
        expected, _ = by_hand(model, trained, DATA * 2)
        assert_close(trainer.member(index), expected, 2e-4, 2e-5)


def noise(model, key):
    def noisy(w):
        return w + 0.1 * jax.random.normal(key, w.shape)

    return eqx.tree_at(lambda m: m.first.weight, model, noisy(model.first.weight))


@pytest.mark.slow_but("sharded", "fsdp")
@pytest.mark.parametrize("strategy", ["sharded", "pmap", "fsdp", "bitwise"])
def test_noise_is_the_same_anywhere_and_new_in_each_step(strategy):
    def changes(strategy, seed=0):
        model, options = Mlp(KEY), {"loss": "cross_entropy", "after_update": noise}
        trainer = quiet(model, optax.sgd(0.0), strategy=strategy, seed=seed, **options)
        found = [model.first.weight]
        found += [trainer.model.first.weight for _ in trainer.steps(batches(16, 16))]
        return np.diff(np.asarray(found), axis=0)

    found = changes(STRATEGIES[strategy]())
    np.testing.assert_allclose(found, changes(SingleDevice()), atol=1e-6)
    assert abs(found[0] - found[1]).max() > 0.01 and 0.05 < found.std() < 0.2
    assert abs(found - changes(SingleDevice(), seed=1)).max() > 0.01


def count_only(model):
    return eqx.tree_at(lambda m: m.count, model, model.count + 1)


def test_skipped_steps_change_nothing():
    model, trained = pair(KEY)
    options = {"after": count_only, "filter_spec": trained}
    data = batches(8, 8, 8)
    data[1] = data[1][0] * np.nan, data[1][1]
    with pytest.warns(UserWarning, match="skipped this update"):
        guard = NanGuard("skip")
        trainer = fit(model, data=data, epochs=1, callbacks=[guard], **options)
    assert trainer.model.count == 2 and trainer.global_step == 3
    # Gradients that overflow in float16 at the first scales, 2**16 and less.
    options |= {"loss_fn": lambda m, x, y: 50 * cross_entropy(m, x, y)}
    trainer = fit(model, data=batches(8), epochs=6, precision="16-mixed", **options)
    skipped = np.log2(2**16 / float(trainer.state.loss_scale.scale))
    assert 0 < skipped < 6 and trainer.model.count == 6 - skipped


def test_it_comes_once_after_all_parts():
    parts = [
        Part("online", cross_entropy, optax.sgd(0.5)),
        Part("target", cross_entropy, optax.sgd(0.5), every=2),
    ]

    def clip(leaf):
        return jnp.clip(leaf, -0.1, 0.1) if eqx.is_inexact_array(leaf) else leaf

    change = lambda model: count_only(jax.tree.map(clip, model))  # noqa: E731
    trainer = quiet(pair(KEY)[0], parts, after_update=change, strategy=Sharded(4))
    for number, _ in enumerate(trainer.steps(DATA), 1):
        assert trainer.model.count == number
        weights = jax.tree.leaves(eqx.filter(trainer.model, eqx.is_inexact_array))
        assert max(jnp.abs(weight).max() for weight in weights) <= np.float32(0.1)


def test_a_field_that_is_nan_is_the_same_as_before():
    model = Mlp(KEY, rate=float("nan"))
    quiet(model, loss="cross_entropy", after_update=lambda model: model)
