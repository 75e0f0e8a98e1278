"""A small model, trainers for it and what their plans have in common."""

import functools
import importlib.util
import types

import equinox as eqx
import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from jaxdp import Sharded, Trainer
from jaxdp.extras.plan import hardware_of

PROGRAM = """HloModule jit_step, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

"""
"""The first lines of a compiled program."""

WIDTHS = [16, 32, 32, 8]
PARAMS = sum(4 * (i + 1) * o for i, o in zip(WIDTHS, WIDTHS[1:], strict=False))
"""Bytes of the model."""

HALVES = [("layers[1].weight", P("model", None))]


class Split(Sharded):
    """Every leaf split along the first axis that divides."""

    def param_spec(self, path, leaf):
        for axis, size in enumerate(leaf.shape):
            if size % self.mesh.size == 0:
                return P(*[None] * axis, "data")
        return P()


def card(kind):
    """The profile of a device of a kind."""
    stats = {"platform": "", "process_index": 0, "memory_stats": lambda: None}
    return hardware_of(types.SimpleNamespace(device_kind=kind, **stats))


def mlp():
    return eqx.nn.MLP(16, 8, 32, 2, key=jax.random.key(0))


def batch(rows=64):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, 16)).astype(np.float32)
    return x, generator.integers(0, 8, rows).astype(np.int32)


def trainer(strategy=None, model=None, **options):
    options = {"loss": "cross_entropy", "enable_progress_bar": False} | options
    return Trainer(
        mlp() if model is None else model,
        optax.adam(1e-3),
        strategy=strategy or Sharded(),
        **options,
    )


def plan(strategy=None, loader=None, **options):
    """The plan of a trainer; options are those of `Trainer.plan` and of `trainer`."""
    names = "devices", "hosts", "topology", "hardware"
    chosen = {name: options.pop(name) for name in names if name in options}
    return trainer(strategy, **options).plan(loader or [batch()], **chosen)


@functools.cache
def whole_plan():
    """The plan of the model whole on each of 8 devices."""
    return plan(Sharded(8))


def comparable(plan):
    """Without what may differ: times, and the words for what is not here."""
    left_out = ("device", "compile_seconds", "notes")
    found = {key: value for key, value in plan.items() if key not in left_out}
    # A program from JAX's cache has the names that it had when it was compiled.
    for each in found["traffic"]:
        each.pop("part", None)
    return found


def installed(*modules):
    return all(importlib.util.find_spec(module) is not None for module in modules)
