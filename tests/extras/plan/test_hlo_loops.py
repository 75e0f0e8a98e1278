"""Tests of the turns that loops run, by counters, in programs compiled here."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from planned import PROGRAM, installed

from jaxdp.extras.plan import hlo
from jaxdp.extras.plan.planner import make_topology_devices

WIDTH = 64

# A compiler without its devices can't take up what it compiled before.
pytestmark = pytest.mark.filterwarnings("ignore:Error reading persistent compilation")
GPU = pytest.param(
    "h100",
    marks=pytest.mark.skipif(
        not installed("jax_cuda12_plugin"), reason="no GPU compiler"
    ),
)


def mixed(x):
    return lax.psum(x @ x, "data")


def count_up(carry, goes_on, step):
    """The carry after a loop, a counter and an array."""
    turn = lambda carry: (carry[0] + step, mixed(carry[1]))  # noqa: E731
    return lax.while_loop(lambda carry: goes_on(carry[0]), turn, carry)


def counted(start, goes_on, step):
    return lambda x: count_up((start, x), goes_on, step)[1]


def repeat(times, x):
    return lax.fori_loop(0, times, lambda _, x: mixed(x), x)


def carried(x):
    """The length of a loop is carried by another one."""

    def outer(_, carry):
        length, x = carry
        return length, repeat(length, x)

    return lax.fori_loop(0, 4, outer, (6, x))[1]


def one_after_another(x):
    """The second goes on from where the first has come to; compilers don't say it."""
    return count_up(count_up((0, x), lambda i: i < 3, 1), lambda i: i < 10, 2)[1]


def gathered(x):
    """Gathers values made from the turn's number: GPUs take the first turn out."""
    parts = jnp.broadcast_to(x[: WIDTH // 2], (9, WIDTH // 2, WIDTH))
    turn = lambda x, w: (jnp.tanh(x @ lax.all_gather(w, "data", tiled=True)), None)  # noqa: E731
    return lax.scan(turn, x, parts * jnp.arange(9.0)[:, None, None])[0]


LOOPS = {
    "upwards": (counted(2, lambda i: i < 9, 1), 7),
    "at most": (counted(0, lambda i: i <= 9, 3), 4),
    "downwards": (counted(20, lambda i: i > 2, -3), 6),
    "at least": (counted(20, lambda i: i >= 2, -3), 7),
    "until": (counted(0, lambda i: i != 12, 3), 4),
    "negated": (counted(2, lambda i: ~(i >= 9), 1), 7),
    "of a multiple": (counted(0, lambda i: 3 * i - 1 < 20, 1), 7),
    "nested": (lambda x: lax.fori_loop(0, 5, lambda _, x: repeat(3, x), x), 15),
    "carried": (carried, 24),
    "one after another": (one_after_another, 7),
    "triangular": (lambda x: lax.fori_loop(0, 4, repeat, x), None),
    "of data": (lambda x: repeat(x[0, 0].astype(int), x), None),
    "gathered": (gathered, 9),
}
"""By kind: a loop, and the times that it runs if they are known."""


def text_of(name, compiler, options=None):
    devices = (
        jax.devices()[:2]
        if compiler == "cpu"
        else make_topology_devices("h100x2").devices
    )
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    apart = jax.shard_map(
        LOOPS[name][0], mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    whole = NamedSharding(mesh, P())
    x = jax.ShapeDtypeStruct((WIDTH, WIDTH), np.float32, sharding=whole)
    program = jax.jit(apart, out_shardings=whole).trace(x).lower()
    return program.compile(compiler_options=options).as_text()


def times_in(text):
    """Returns the number of times that collectives run, or None if it is unknown."""
    times = [each.times for each in hlo.read(text).collectives]
    return None if None in times else sum(times)


@pytest.mark.parametrize("compiler", ["cpu", GPU])
@pytest.mark.parametrize("name", LOOPS)
def test_loops_are_counted_whether_the_compiler_says_their_length_or_not(
    name, compiler
):
    # At its highest level a GPU's compiler makes one turn of two.
    for options in [{}] if compiler == "cpu" else [{}, {"optimization_level": 19}]:
        text, expected = text_of(name, compiler, options), LOOPS[name][1]
        unsaid = re.sub(r'"known_trip_count":\{"n":"\d+"\},?', "", text)
        assert " while(" in text
        assert times_in(text) == times_in(unsaid) == expected


# The loop over micro-batches of a step, as the compiler for H100s writes it at O1: the
# first and the last turn are before and behind the loop, whose length it does not say.
PEELED = """%fused_compare (p: s32[]) -> pred[] {
  %p = s32[] parameter(0)
  %stop = s32[] constant(3)
  ROOT %compare = pred[] compare(%p, %stop), direction=LT
}

%condition (p: (s32[], f32[64])) -> pred[] {
  %p = (s32[], f32[64]{0}) parameter(0)
  %turn = s32[] get-tuple-element(%p), index=0
  ROOT %goes_on = pred[] fusion(%turn), kind=kLoop, calls=%fused_compare
}

%fused_add (p: s32[]) -> s32[] {
  %p = s32[] parameter(0)
  %step = s32[] constant(1)
  ROOT %next = s32[] add(%p, %step)
}

%body (p: (s32[], f32[64])) -> (s32[], f32[64]) {
  %p = (s32[], f32[64]{0}) parameter(0)
  %turn = s32[] get-tuple-element(%p), index=0
  %copy = s32[] copy(%turn)
  %next = s32[] fusion(%copy), kind=kLoop, calls=%fused_add
  %value = f32[64]{0} get-tuple-element(%p), index=1
  %inside = f32[64]{0} all-reduce(%value), channel_id=2, to_apply=%add
  ROOT %tuple = (s32[], f32[64]{0}) tuple(%next, %inside)
}

ENTRY %main (p: f32[64]) -> f32[64] {
  %p = f32[64]{0} parameter(0)
  %before = f32[64]{0} all-reduce(%p), channel_id=1, to_apply=%add
  %start = s32[] constant(1)
  %copy = s32[] copy(%start)
  %tuple = (s32[], f32[64]{0}) tuple(%copy, %before)
  %loop = (s32[], f32[64]{0}) while(%tuple), condition=%condition, body=%body
  %value = f32[64]{0} get-tuple-element(%loop), index=1
  ROOT %behind = f32[64]{0} all-reduce(%value), channel_id=3, to_apply=%add
}
"""


@pytest.mark.parametrize("known, other, times", [
    ("", "", 2),
    ("stop = s32[] constant(3)", "stop = s32[] abs(%p)", None),
    ("step = s32[] constant(1)", "step = s32[] constant(0)", None),  # it never ends
    ("add(%p, %step", "divide(%p, %step", None),
    ("start = s32[] constant(1)", "start = s32[] replica-id()", None),
])  # fmt: skip
def test_turns_outside_of_a_loop_count_once_and_what_no_counter_tells_is_unknown(
    known, other, times
):
    assert known in PEELED
    text = PROGRAM + (PEELED.replace(known, other) if known else PEELED)
    assert [each.times for each in hlo.read(text).collectives] == [1, times, 1]
