"""The loop of Equinox's tutorials: `filter_jit`, a `DataLoader`, each loss read."""

from collections.abc import Callable

import equinox as eqx
import jax
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..models import build, mean_loss, weights_of
from ..works import Weights, Work


def train(work: Work, clock: Callable[[], None]) -> Weights:
    model, optimizer = build(work), optax.adam(work.rate)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    several = work.devices > 1
    if several:
        auto = (AxisType.Auto,)
        mesh = jax.make_mesh((work.devices,), ("data",), auto)
        whole = NamedSharding(mesh, PartitionSpec())
        rows = NamedSharding(mesh, PartitionSpec("data"))
        model, opt_state = eqx.filter_shard((model, opt_state), whole)

    @eqx.filter_jit(donate="all" if several else "none")
    def make_step(model, opt_state, x, y):
        if several:
            model, opt_state = eqx.filter_shard((model, opt_state), whole)
            x, y = eqx.filter_shard((x, y), rows)
        loss_and_grad = eqx.filter_value_and_grad(mean_loss)
        loss, grads = loss_and_grad(model, x, y, work.criterion)
        updates, opt_state = optimizer.update(grads, opt_state, model)
        model = eqx.apply_updates(model, updates)
        if several:
            model, opt_state = eqx.filter_shard((model, opt_state), whole)
        return model, opt_state, loss

    loader = work.loader()
    for _ in range(work.epochs):
        for x, y in loader:
            x, y = x.numpy(), y.numpy()
            if several:
                x, y = eqx.filter_shard((x, y), rows)
            model, opt_state, loss = make_step(model, opt_state, x, y)
            loss.item()
        jax.block_until_ready(eqx.filter(model, eqx.is_array))
        clock()
    return weights_of(model, work)
