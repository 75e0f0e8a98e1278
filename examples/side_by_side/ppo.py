"""PPO learns to balance a pole on a cart: the physics is in JAX, too.

Schulman et al., "Proximal Policy Optimization Algorithms" (2017): 32 games are played
for 128 moves by the present policy, which then learns from them, four times over, in
minibatches.
"""

from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import Trainer

GAMES, MOVES, PASSES, MINIBATCH = 32, 128, 4, 512


class Policy(eqx.Module):
    actor: eqx.nn.MLP
    critic: eqx.nn.MLP

    def __init__(self, key: jax.Array):
        for_actor, for_critic = jax.random.split(key)
        self.actor = eqx.nn.MLP(4, 2, 64, 2, jnp.tanh, key=for_actor)
        self.critic = eqx.nn.MLP(4, "scalar", 64, 2, jnp.tanh, key=for_critic)


def physics(state: jax.Array, right: jax.Array) -> jax.Array:
    """A cart and its pole 0.02 s later."""
    _, speed, angle, turning = state
    force = jnp.where(right, 10.0, -10.0)
    swing = (force + 0.05 * turning**2 * jnp.sin(angle)) / 1.1
    bend = 4 / 3 - 0.1 * jnp.cos(angle) ** 2 / 1.1
    turn = (9.8 * jnp.sin(angle) - jnp.cos(angle) * swing) / bend / 0.5
    push = swing - 0.05 * turn * jnp.cos(angle) / 1.1
    return state + 0.02 * jnp.stack([speed, push, turning, turn])


@eqx.filter_jit
def play(policy: Policy, states: jax.Array, key: jax.Array) -> Any:
    """Moves all games; where they then are, what was seen, and how often one fell."""

    def move(states, key):
        for_action, for_start = jax.random.split(key)
        logits = jax.vmap(policy.actor)(states)
        action = jax.random.categorical(for_action, logits)
        log_prob = jax.nn.log_softmax(logits)[jnp.arange(GAMES), action]
        after = jax.vmap(physics)(states, action)
        fell = (abs(after[:, 0]) > 2.4) | (abs(after[:, 2]) > 0.2)
        afresh = 0.05 * jax.random.normal(for_start, states.shape)
        seen = states, action, log_prob, jax.vmap(policy.critic)(states), fell
        return jnp.where(fell[:, None], afresh, after), seen

    states, seen = jax.lax.scan(move, states, jax.random.split(key, MOVES))
    *seen, values, fell = seen
    following = jnp.append(values[1:], jax.vmap(policy.critic)(states)[None], axis=0)

    def advantage(later, row):
        value, following, fell = row
        error = 1 + 0.99 * following * ~fell - value
        later = error + 0.99 * 0.95 * later * ~fell
        return later, later

    rows = values, following, fell
    _, advantages = jax.lax.scan(advantage, jnp.zeros(GAMES), rows, reverse=True)
    seen += [advantages, advantages + values]
    return states, [leaf.reshape(-1, *leaf.shape[2:]) for leaf in seen], fell.sum()


def minibatches(seen: list[Any], seed: int) -> Iterator[tuple[np.ndarray, ...]]:
    draw = np.random.default_rng(seed)
    seen = [np.asarray(leaf) for leaf in seen]
    for _ in range(PASSES):
        for rows in draw.permutation(GAMES * MOVES).reshape(-1, MINIBATCH):
            yield tuple(leaf[rows] for leaf in seen)


def losses_of(policy, states, action, log_prob, advantage, returns):  # of each row
    new = jax.nn.log_softmax(jax.vmap(policy.actor)(states))
    ratio = jnp.exp(new[jnp.arange(len(new)), action] - log_prob)
    clipped = jnp.clip(ratio, 0.8, 1.2)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    gain = jnp.minimum(ratio * advantage, clipped * advantage)
    errors = (jax.vmap(policy.critic)(states) - returns) ** 2
    entropy = -(jnp.exp(new) * new).sum(axis=1)
    return 0.5 * errors - gain - 0.01 * entropy


def make_optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3))


def by_hand(rounds: int = 30) -> dict[str, list[float]]:
    policy, optimizer = Policy(jax.random.key(0)), make_optimizer()
    opt_state = optimizer.init(eqx.filter(policy, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(policy, opt_state, batch):
        @eqx.filter_value_and_grad
        def loss_of(policy):
            return losses_of(policy, *batch).mean()

        loss, grads = loss_of(policy)
        params = eqx.filter(policy, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return eqx.apply_updates(policy, updates), opt_state, loss

    history, states = {"loss": [], "moves": []}, jnp.zeros((GAMES, 4))
    for number, key in enumerate(jax.random.split(jax.random.key(1), rounds)):
        states, seen, falls = play(policy, states, key)
        losses = []
        for batch in minibatches(seen, number):
            policy, opt_state, loss = step(policy, opt_state, batch)
            losses.append(loss)
        history["loss"].append(float(np.mean(losses)))
        history["moves"].append(GAMES * MOVES / max(1, int(falls)))
    return history


def with_jaxdp(rounds: int = 30) -> dict[str, list[float]]:
    def loss_fn(policy, *batch):
        return losses_of(policy, *batch).mean()  # advantages are scaled by all rows

    policy = Policy(jax.random.key(0))
    trainer = Trainer(policy, make_optimizer(), loss_fn=loss_fn)
    moves, states = [], jnp.zeros((GAMES, 4))
    for number, key in enumerate(jax.random.split(jax.random.key(1), rounds)):
        states, seen, falls = play(trainer.model, states, key)
        trainer.fit(minibatches(seen, number), max_epochs=number + 1)
        moves.append(GAMES * MOVES / max(1, int(falls)))
    return {**trainer.history, "moves": moves}
