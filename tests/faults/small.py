"""A small trainer, and all that it has learnt."""

import jax
import numpy as np
import optax
from toys import Mlp

from jaxdp import SingleDevice, Trainer


def make(*callbacks):
    return Trainer(
        Mlp(jax.random.key(0)),
        optax.adam(1e-2),
        loss="cross_entropy",
        strategy=SingleDevice(),
        callbacks=callbacks,
        enable_progress_bar=False,
    )


def leaves(trainer):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(trainer.state)]
