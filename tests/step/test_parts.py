"""Several losses and optimizers in one step, beside a loop written by hand."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import NormNet, On, arrays, assert_close, batches, bits, quiet

from jaxdp import (
    FSDP,
    Callback,
    Part,
    PassMetric,
    Pmap,
    Sharded,
    SingleDevice,
    TensorParallel,
    ZeRO,
    per_example,
)
from jaxdp.callbacks import GradientMonitor, NanGuard, WeightAveraging

RNG = np.random.default_rng(0)
DATA = [(RNG.normal(2, 0.5, size=(16, 2)).astype(np.float32),) for _ in range(6)]
SPLIT = jax.sharding.PartitionSpec("model")
CRITIC, GENERATOR = optax.adam(2e-3), optax.adam(1e-3)


class Gan(eqx.Module):
    critic: eqx.nn.MLP
    generator: eqx.nn.MLP
    scale: jax.Array
    """In no part."""

    def __init__(self):
        keys = jax.random.split(jax.random.key(0))
        self.critic = eqx.nn.MLP(2, 1, 8, 1, key=keys[0])
        self.generator = eqx.nn.MLP(3, 2, 8, 1, key=keys[1])
        self.scale = jnp.ones(())


def faked(gan, keys):
    noise = jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys)
    return jax.vmap(gan.critic)(jax.vmap(gan.generator)(noise) * gan.scale)[:, 0]


def critic_loss(gan, x, keys):
    real = jax.vmap(gan.critic)(x)[:, 0]
    loss = jax.nn.softplus(-real) + jax.nn.softplus(faked(gan, keys))
    return loss, {"real": real}


@per_example
def critic_loss_of_one(gan, x, key):
    real = gan.critic(x)[0]
    fake = gan.critic(gan.generator(jax.random.normal(key, (3,))) * gan.scale)[0]
    return jax.nn.softplus(-real) + jax.nn.softplus(fake), {"real": real}


def generator_loss(gan, x, keys):
    return jax.nn.softplus(-faked(gan, keys)), {}


def parts(every=2, generator=GENERATOR, critic=critic_loss):
    return [
        Part("critic", critic, CRITIC),
        Part("generator", generator_loss, generator, every=every),
    ]


class Values(Callback):
    """Keeps every step's scalars."""

    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, metrics, batch_idx):
        self.steps.append({n: float(v) for n, v in metrics.items() if np.ndim(v) == 0})

    def of(self, name):
        return [step[name] for step in self.steps]


def fit(of_parts, *callbacks, epochs=2, data=DATA, model=None, **options):
    model = Gan() if model is None else model
    trainer = quiet(model, of_parts, callbacks=callbacks, **options)
    trainer.fit(data, max_epochs=epochs)
    return trainer


def by_hand(data, epochs, every):
    """The model, and the values of every step."""
    gan, steps = Gan(), []
    named = {
        "critic": (critic_loss, CRITIC, 1),
        "generator": (generator_loss, GENERATOR, every),
    }
    states = {
        name: optimizer.init(eqx.filter(getattr(gan, name), eqx.is_array))
        for name, (_, optimizer, _) in named.items()
    }

    @eqx.filter_jit
    def update(gan, state, x, keys, name):
        loss_fn, optimizer, _ = named[name]
        of_part = lambda gan: getattr(gan, name)  # noqa: E731

        def mean(own):
            loss, metrics = loss_fn(eqx.tree_at(of_part, gan, own), x, keys)
            return loss.mean(), metrics | {"loss": loss}

        (_, values), grads = eqx.filter_value_and_grad(mean, has_aux=True)(of_part(gan))
        updates, state = optimizer.update(grads, state)
        own = eqx.apply_updates(of_part(gan), updates)
        return eqx.tree_at(of_part, gan, own), state, jax.tree.map(jnp.mean, values)

    for step, (x,) in enumerate(data * epochs):
        key = jax.random.fold_in(jax.random.key(0), step)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(x)))
        values = {"loss": 0.0, "generator_loss": np.nan}
        for name, (_, _, due) in named.items():
            if (step + 1) % due == 0:
                gan, states[name], found = update(gan, states[name], x, keys, name)
                values |= {f"{name}_{k}": float(v) for k, v in found.items()}
                values["loss"] += float(found["loss"])
        steps.append(values)
    return gan, steps


@pytest.mark.slow_but("sharded", "example")
@pytest.mark.parametrize(
    "options",
    [
        {"strategy": SingleDevice()},
        {"strategy": Sharded(8), "steps_per_execution": 2},
        {"strategy": Sharded(8), "accumulate_grad_batches": 2},
        {"strategy": FSDP(8, min_size=1)},
        {"strategy": Pmap(8), "remat": "critic"},
        {"strategy": TensorParallel({"data": 4, "model": 2}, [("**[0].bias", SPLIT)])},
        {"strategy": ZeRO(), "precision": "16-mixed"},
        {"strategy": Sharded(8), "critic": critic_loss_of_one},
    ],
    ids=["one", "sharded", "accumulating", "fsdp", "pmap", "split", "zero", "example"],
)
def test_parts_have_the_numbers_of_a_loop_by_hand(options):
    data, seen = DATA, Values()
    if micro := options.get("accumulate_grad_batches"):
        data = [(part,) for (x,) in DATA for part in np.split(x, micro)]

    options = dict(options)
    critic = options.pop("critic", critic_loss)
    trainer = fit(parts(3, critic=critic), seen, data=data, **options)
    gan, steps = by_hand(DATA, 2, 3)

    rtol = 1e-2 if "precision" in options else 1e-5  # float16 has three digits
    for name in steps[0]:
        expected = [step[name] for step in steps]
        np.testing.assert_allclose(seen.of(name), expected, rtol=rtol, err_msg=name)
        means = [np.nanmean(expected[:6]), np.nanmean(expected[6:])]
        np.testing.assert_allclose(trainer.history[name], means, rtol=rtol)
    assert_close(trainer.model, gan, 20 * rtol)
    assert float(trainer.model.scale) == 1
    assert len(trainer.run.engine.compiled_steps["train"].programs) == 1

    # Validation runs every part; without draws only this value can be told by hand.
    ragged = [DATA[0], (DATA[1][0][:5],)]
    found = trainer.validate(ragged)
    real = jax.vmap(trainer.model.critic)(np.concatenate([x for (x,) in ragged]))
    np.testing.assert_allclose(found["val_critic_real"], real.mean(), rtol=10 * rtol)
    both = found["val_critic_loss"] + found["val_generator_loss"]
    np.testing.assert_allclose(found["val_loss"], both, rtol=1e-5)


def test_one_part_is_the_plain_trainer():
    def plain(gan, x, keys):
        return critic_loss(gan, x, keys)[0]

    together = fit([Part("*", plain, CRITIC, name="all")], strategy=Sharded(8))
    alone = fit(CRITIC, loss_fn=plain, strategy=Sharded(8))
    assert_close(together.model, alone.model, 0, 0)
    assert together.history["all_loss"] == alone.history["loss"]

    memory, usual = (
        trainer.compiled_train_step().memory_analysis() for trainer in (together, alone)
    )
    assert memory.temp_size_in_bytes <= 1.01 * usual.temp_size_in_bytes
    texts = [each.compiled_train_step().as_text() for each in (together, alone)]
    assert texts[0].count("all-reduce(") == texts[1].count("all-reduce(") > 0


def test_callbacks_inside_the_step_see_all_parts():
    averages, seen = [], Values()

    def follow(trainer, *_):
        weights = arrays(trainer.run.model_of(trainer.state))
        old = averages[-1] if averages else weights
        pairs = zip(old, weights, strict=True)
        averages.append([old + 0.5 * (new - old) for old, new in pairs])

    class Updates(Callback):
        def inside_step(self, grads, updates, state):
            leaves = jax.tree.leaves((grads.generator, updates.generator))
            return {"moved": jnp.stack([jnp.abs(leaf).max() for leaf in leaves]).max()}

    follower = On(on_train_batch_end=follow)
    callbacks = WeightAveraging(0.5), GradientMonitor(), Updates(), follower, seen
    assert_close(fit(parts(), *callbacks).model, averages[-1])
    assert [value > 0 for value in seen.of("moved")] == [False, True] * 6


def test_a_part_that_is_not_finite_leaves_the_whole_step_out():
    def at_fourth(gan, x, keys, step):
        loss, metrics = generator_loss(gan, x, keys)
        return jnp.where(step == 3, jnp.nan, loss), metrics

    after = []
    keep = On(on_train_batch_end=lambda trainer, *_: after.append(bits(trainer.model)))
    broken = [parts()[0], Part("generator", at_fourth, GENERATOR, every=2)]
    with pytest.warns(UserWarning, match="step 4 .* the loss was nan"):
        trainer = fit(broken, NanGuard("skip"), keep, epochs=1, strategy=Sharded(8))
    same = [one == other for one, other in zip(after, after[1:], strict=False)]
    assert same == [False, False, True, False, False]
    assert np.isfinite(trainer.history["generator_loss"]).all()


@pytest.mark.slow
def test_a_part_may_evaluate_its_loss():
    lowest = fit(parts(1, optax.lbfgs()), strategy=FSDP(8, min_size=1), epochs=1)
    usual = fit(parts(1), strategy=FSDP(8, min_size=1), epochs=1)
    assert lowest.history["generator_loss"][0] < usual.history["generator_loss"][0]


def test_a_state_goes_from_part_to_part():
    def loss(net, x, y, state):
        over_rows = jax.vmap(net, (0, None), (0, None), axis_name="batch")
        logits, state = over_rows(x, state)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y), state

    net, state = eqx.nn.make_with_state(NormNet)(jax.random.key(0))
    below = Part(["first", "norm*"], loss, optax.sgd(0.1), name="below")
    options, losses, states = {"model": net, "state": state}, [], []
    for strategy in (SingleDevice(), Sharded(8)):
        of_parts, data = [below, Part("last", loss, optax.sgd(0.1))], batches(16, 16)
        fit(of_parts, seen := Values(), strategy=strategy, data=data, **options)
        losses.append([seen.of("below_loss"), seen.of("last_loss")])
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert losses[0][1][0] < losses[0][0][0]  # the second sees what the first has done

    # A part whose turn it is not leaves the state as the first has made it.
    for others in [], [Part("last", loss, optax.sgd(0.1), every=2)]:
        trainer = fit([below, *others], data=batches(16), epochs=1, **options)
        states.append(arrays(trainer.model_state))
    assert_close(*states, 0, 0)
    assert bits(states[0]) != bits(arrays(state))


@pytest.mark.parametrize("params, name, num_leaves", [
    ("[0]", "0_loss", 4),
    ("[1].layers[0]", "1_layers_0_loss", 2),
    ("*.layers[*].bias", "layers_bias_loss", 4),
    (["[0]*", "[1].layers[1].bias"], None, 5),
    ((True, False), None, 4),
])  # fmt: skip
def test_patterns_and_bools_choose_leaves_and_a_name(params, name, num_leaves):
    keys = jax.random.split(jax.random.key(0))
    networks = tuple(eqx.nn.MLP(2, 2, 4, 1, key=key) for key in keys)

    def loss_fn(networks, x):
        first, second = networks
        return ((jax.vmap(second)(jax.vmap(first)(x)) - x) ** 2).mean(axis=1)

    part = Part(params, loss_fn, CRITIC, name=None if name else "some")
    trainer = quiet(networks, [part])
    assert len(jax.tree.leaves(trainer.state.params)) == num_leaves
    assert [*trainer.fit(DATA[:1])] == ["loss", name or "some_loss"]


def test_a_metric_over_a_pass_is_of_parts_that_return_predictions():
    def returning(gan, x, keys):
        loss, metrics = critic_loss(gan, x, keys)
        scores = jax.vmap(gan.critic)(x)[:, 0]
        return loss, metrics | {"predictions": scores, "targets": x}

    metrics = {"most": PassMetric(lambda scores, x: scores.max() + x.min())}
    options = {"strategy": Sharded(8), "metrics": metrics}
    trainer = fit(parts(critic=returning), **options)
    data = DATA[:3] + [(DATA[3][0][:5],)]
    found = trainer.validate(data)
    x = np.concatenate([each for (each,) in data])
    expected = jax.vmap(trainer.model.critic)(x).max() + x.min()
    assert found["val_critic_most"] == pytest.approx(float(expected), rel=1e-5)
    assert "val_generator_most" not in found and "val_critic_real" in found


def test_a_part_whose_turn_it_is_not_is_no_nan():
    with jax.debug_nans(True):
        trainer = fit(parts(every=2))
    assert trainer.global_step == 12
