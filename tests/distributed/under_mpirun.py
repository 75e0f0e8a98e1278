"""A script as a user would write it, for mpirun."""

import os

import jax

import jaxdp

rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
jaxdp.distributed.initialize("127.0.0.1:61234", size, rank)
print(f"process {jax.process_index()} of {jax.process_count()}", flush=True)
