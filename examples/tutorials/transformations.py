"""From one example to eight devices: `vmap`, `jit` and `shard_map`, as jaxdp uses them.

    python examples/tutorials/transformations.py

The network is the smallest possible one, a convolution over a line of numbers. You
write the model for one example; jaxdp applies `vmap` to it, compiles the step once by
`jit`, and says where the arrays live.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
    """Slides a window over `x`; each output is the sum of its products with `w`."""
    count = len(x) - len(w) + 1
    return jnp.stack([jnp.dot(x[i : i + len(w)], w) for i in range(count)])


def convolve_rows(xs: jax.Array, w: jax.Array) -> jax.Array:
    """Convolves each row: `vmap` adds a batch axis; all rows share `w`."""
    print("tracing for shapes", xs.shape, w.shape)  # runs while JAX traces, no later
    return jax.vmap(convolve, in_axes=(0, None))(xs, w)


def main() -> tuple[jax.Array, jax.Array, jax.Array]:
    jax.config.update("jax_num_cpu_devices", 8)  # eight devices, faked on the CPU
    w = jnp.array([2.0, 3.0, 4.0])
    x = jnp.arange(5.0)
    print("one example:", convolve(x, w))

    # `jit` records the operations once, and compiles them into one program.
    xs = jnp.stack([x + i for i in range(8)])
    compiled = jax.jit(convolve_rows)
    batch = compiled(xs, w)
    batch = compiled(xs, w)  # traces nothing
    print("a batch of eight:", batch.shape)

    # One way to eight devices: `shard_map`. Each device sees its own rows, and sends
    # by collectives over a named axis: here a mean, as of gradients.
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    rows, replicated = PartitionSpec("data"), PartitionSpec()

    def convolve_shard(xs: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        ys = convolve_rows(xs, w)
        return ys, jax.lax.pmean(ys.mean(axis=0), "data")

    mapped = jax.shard_map(
        convolve_shard,
        mesh=mesh,
        in_specs=(rows, replicated),
        out_specs=(rows, replicated),
    )
    by_device, mean = jax.jit(mapped)(xs, w)
    print("on eight devices, by shard_map:", by_device.sharding)

    # The other way: say only where the arrays live, and let `jit` split the same
    # function, and find out what the devices have to send.
    sharded = compiled(jax.device_put(xs, NamedSharding(mesh, rows)), w)
    print("on eight devices, by jit:", sharded.sharding)

    np.testing.assert_allclose(by_device, batch)
    np.testing.assert_allclose(sharded, batch)
    np.testing.assert_allclose(mean, batch.mean(axis=0), rtol=1e-6)
    return batch, by_device, sharded


if __name__ == "__main__":
    main()
