"""How a model and a loss are called: with the axes they name, and with state."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxdp.step.model_call import as_plain_state, call_model
from jaxdp.step.objective import call_loss_fn
from jaxdp.step.row_keys import MaskAndKeys


def bound(loss_fn):
    """What gives the loss with its state filled in."""
    return lambda state: functools.partial(loss_fn, state)


X = np.arange(6, dtype=np.float32).reshape(3, 2)
KEY = jax.random.key(0)
KEYS = jax.random.split(KEY, 3)
ROWS = MaskAndKeys(jnp.ones(3, bool), KEYS, KEY, jnp.int32(0), True)


class Switch(eqx.Module):
    """Sets its state to a constant, through a part of the whole state."""

    was_called: eqx.nn.StateIndex
    unused: eqx.nn.StateIndex

    def __init__(self):
        self.was_called = eqx.nn.StateIndex(jnp.array(False))
        self.unused = eqx.nn.StateIndex(jnp.array(2.0))

    def __call__(self, x, state):
        own = state.substate(self.was_called)
        own = own.set(self.was_called, jnp.array(True))
        return x.sum(), state.update(own)


def on_two_devices(function):
    mesh = Mesh(jax.devices()[:2], ("data",), axis_types=(AxisType.Auto,))
    whole = PartitionSpec()
    return jax.shard_map(
        function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False
    )


@pytest.mark.parametrize("place", [lambda function: function, on_two_devices])
def test_a_state_may_be_set_to_a_constant_anywhere(place):
    model, state = eqx.nn.make_with_state(Switch)()

    def by_model(state):
        found, new = call_model(model, state, X, ROWS)
        assert type(new) is eqx.nn.State
        return found, new

    def by_loss(state):
        def loss_fn(state):
            return jax.vmap(model, (0, None), (0, None))(X, state)

        found, new = call_loss_fn(bound(loss_fn), model, state, ())
        return found, as_plain_state(new)

    for call in (by_model, by_loss):
        found, new = jax.jit(place(call))(state)
        np.testing.assert_array_equal(found, X.sum(axis=1))
        assert new.get(model.was_called)
        assert new.get(model.unused) == 2
    assert not state.get(model.was_called)


def test_another_type_of_state_is_still_an_error_of_equinox():
    class Other(Switch):
        def __call__(self, x, state):
            return x, state.set(self.was_called, jnp.array(1.0))

    model, state = eqx.nn.make_with_state(Other)()
    call = on_two_devices(lambda state: call_model(model, state, X, ROWS)[1])
    with pytest.raises(ValueError, match="different structures/shapes/dtypes"):
        jax.jit(call)(state)


def test_a_loss_may_reduce_over_data_where_there_is_no_such_axis():
    model, state = eqx.nn.make_with_state(Switch)()

    def loss_fn(state):
        found, state = jax.vmap(model, (0, None), (0, None))(X, state)
        return jax.lax.pmean(found, "data"), state

    found, new = call_loss_fn(bound(loss_fn), model, state, ())
    np.testing.assert_array_equal(found, X.sum(axis=1))
    assert new.get(model.was_called)


def test_a_name_that_is_not_defined_is_the_user_s_error():
    def loss_fn(state):
        return undefined_name  # noqa: F821  # pyright: ignore

    with pytest.raises(NameError, match="'undefined_name' is not defined") as raised:
        call_loss_fn(bound(loss_fn), None, None, ())
    assert raised.value.__context__ is None
    with pytest.raises(NameError, match="unbound axis name: other"):
        call_loss_fn(bound(lambda state: jax.lax.psum(1, "other")), None, None, ())
