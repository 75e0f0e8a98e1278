"""A script as a user would write it, for mpirun."""

import jax

import jaxdp

jaxdp.distributed.initialize()
print(f"process {jax.process_index()} of {jax.process_count()}", flush=True)
