"""Options of XLA for equal bits on devices that are not here."""

import jax

from jaxdp.extras.bitwise import _add_options


def test_gpus_are_told_to_be_deterministic():
    own, cpus = (_add_options({}, name) for name in ("gpu", "cpu"))
    assert own == cpus | {"xla_gpu_deterministic_ops": True}
    jax.jit(lambda: 0).lower().compile(own)  # a name that this XLA knows
