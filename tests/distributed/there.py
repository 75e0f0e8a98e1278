"""What the processes of a test do with batches that are on their devices already."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from together import rows, tell, trainer


def train(local=False):
    """On NumPy's arrays, on JAX's, and put there ahead; then on one that spans all."""
    index, count = jax.process_index(), jax.process_count()
    x, y = rows(22)  # the last batch is short
    data = [(x[start : start + 8], y[start : start + 8]) for start in range(0, 22, 8)]
    if local:
        data = [(x[index::count], y[index::count]) for x, y in data]
    there = jax.tree.map(jnp.asarray, data)
    weights, predictions = [], []
    for batches, ahead in (data, False), (there, False), (data, True), (there, True):
        run = trainer(data="local" if local else "global")
        run.run.engine.prefetches = ahead
        run.fit(batches, batches, max_epochs=2)
        weights.append([np.asarray(w).tolist() for w in jax.tree.leaves(run.model)[:2]])
        predictions.append(run.predict(batches).tolist())

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    of_all = jax.make_array_from_callback((8, 4), sharding, x[:8].__getitem__)
    wrong = ""
    try:
        run.fit([(of_all, y[:8])], max_epochs=3)
    except ValueError as error:
        wrong = str(error)
    tell(weights=weights, predictions=predictions, wrong=wrong)
