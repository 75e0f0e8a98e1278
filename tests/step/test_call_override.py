"""A module that is called otherwise is in all else what it was."""

import equinox as eqx
import jax
import jax.numpy as jnp

from jaxdp.step.call_override import override_call


def doubled(module, x, *, by=2):
    return by * module(x)


def test_a_call_is_another_and_all_else_stays():
    linear = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    other = override_call(linear, doubled)
    x = jnp.ones(2)
    assert (other(x) == 2 * linear(x)).all()
    assert (other(x, by=3) == 3 * linear(x)).all()
    assert isinstance(other, eqx.nn.Linear)
    assert type(other).__name__ == "Linear"
    assert other.weight is linear.weight
    assert type(linear) is eqx.nn.Linear


def test_what_is_called_so_already_stays():
    once = override_call(eqx.nn.Linear(2, 3, key=jax.random.key(0)), doubled)
    assert type(override_call(once, doubled)) is type(once)
    through_jax = jax.tree.map(lambda leaf: leaf, once)
    assert (through_jax(jnp.ones(2)) == once(jnp.ones(2))).all()
