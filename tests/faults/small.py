"""A small trainer, and all that it has learnt."""

import jax
import numpy as np
from toys import on_one_device as make

__all__ = ["leaves", "make"]


def leaves(trainer):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(trainer.state)]
