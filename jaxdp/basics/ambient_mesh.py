"""A mesh that the user has set for the whole process, left for a while."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh


def no_ambient_mesh() -> AbstractContextManager[Any]:
    """Leaves a mesh that the user has set with `jax.set_mesh` for the time being.

    Programs compiled under it would have to be for that very mesh.
    """
    if jax.sharding.get_abstract_mesh().empty:  # setting one takes 10 us
        return nullcontext()
    return jax.set_mesh(Mesh(np.empty((), dtype=object), ()))
