"""Tests of the turns that loops run, by counters, in programs compiled here."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from planned import installed

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


def counted(start, goes_on, step):
    """A loop whose carry has a counter."""

    def loop(x):
        turn = lambda carry: (carry[0] + step, mixed(carry[1]))  # noqa: E731
        return lax.while_loop(lambda carry: goes_on(carry[0]), turn, (start, x))[1]

    return loop


def nested(x):
    inner = lambda _, x: lax.scan(lambda x, _: (mixed(x), None), x, None, 3)[0]  # noqa: E731
    return lax.fori_loop(0, 5, inner, x)


def carried(x):
    """The length of a loop is carried by another one."""

    def outer(_, carry):
        length, x = carry
        return length, lax.fori_loop(0, length, lambda _, x: mixed(x), x)

    return lax.fori_loop(0, 4, outer, (6, x))[1]


def one_after_another(x):
    """The second goes on from where the first has come to; compilers don't say it."""
    turn = lambda carry: (carry[0] + 1, mixed(carry[1]))  # noqa: E731
    carry = lax.while_loop(lambda carry: carry[0] < 3, turn, (0, x))
    turn = lambda carry: (carry[0] + 2, mixed(carry[1]))  # noqa: E731
    return lax.while_loop(lambda carry: carry[0] < 10, turn, carry)[1]


def triangular(x):
    """The length of the inner loop is another one in each turn."""
    return lax.fori_loop(
        0, 4, lambda i, x: lax.fori_loop(0, i, lambda _, x: mixed(x), x), x
    )


def gathered(x):
    """Gathers values made from the turn's number: GPUs take the first turn out."""
    parts = jnp.broadcast_to(x[: WIDTH // 2], (9, WIDTH // 2, WIDTH))
    turn = lambda x, w: (jnp.tanh(x @ lax.all_gather(w, "data", tiled=True)), None)  # noqa: E731
    return lax.scan(turn, x, parts * jnp.arange(9.0)[:, None, None])[0]


def of_data(x):
    return lax.fori_loop(0, x[0, 0].astype(int), lambda _, x: mixed(x), x)


LOOPS = {
    "upwards": (counted(2, lambda i: i < 9, 1), 7),
    "at most": (counted(2, lambda i: i <= 9, 1), 8),
    "in threes": (counted(2, lambda i: i < 9, 3), 3),
    "downwards": (counted(20, lambda i: i > 2, -3), 6),
    "at least": (counted(20, lambda i: i >= 2, -3), 7),
    "until": (counted(0, lambda i: i != 12, 3), 4),
    "mirrored": (counted(2, lambda i: 9 > i, 1), 7),
    "negated": (counted(2, lambda i: ~(i >= 9), 1), 7),
    "of a multiple": (counted(0, lambda i: 3 * i - 1 < 20, 1), 7),
    "nested": (nested, 15),
    "carried": (carried, 24),
    "one after another": (one_after_another, 7),
    "triangular": (triangular, None),
    "of data": (of_data, None),
    "gathered": (gathered, 9),
}


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


def unsaid(text):
    """The text without what the compiler says of its loops' lengths."""
    return re.sub(r'"known_trip_count":\{"n":"\d+"\},?', "", text)


@pytest.mark.parametrize("compiler", ["cpu", GPU])
@pytest.mark.parametrize("name", LOOPS)
def test_loops_are_counted_whether_the_compiler_says_their_length_or_not(
    name, compiler
):
    text, expected = text_of(name, compiler), LOOPS[name][1]
    assert " while(" in text
    assert times_in(text) == times_in(unsaid(text)) == expected


@pytest.mark.parametrize("compiler", [GPU])
@pytest.mark.parametrize("name", ["upwards", "carried", "one after another"])
def test_loops_of_which_two_turns_are_one_are_counted(name, compiler):
    text = text_of(name, compiler, {"optimization_level": 19})
    assert times_in(text) == times_in(unsaid(text)) == LOOPS[name][1]


# Of a step that accumulates four micro-batches, by the compiler for H100s at O1: the
# first and the last turn are before and behind the loop, whose length it does not say.
# Arrays, their arithmetic and metadata were cut out.
PEELED = """HloModule jit_train, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%fused_compare.6.clone (param_0.1026: s32[]) -> pred[] {
  %param_0.1026 = s32[] parameter(0)
  %constant_350_2 = s32[] constant(3)
  ROOT %compare.11.2 = pred[] compare(%param_0.1026, %constant_350_2), direction=LT
}

%region_9.10_spmd.clone.1.clone (cond_param.7: (s32[], f32[64])) -> pred[] {
  %cond_param.7 = (s32[], f32[64]{0}) parameter(0)
  %get-tuple-element.535 = s32[] get-tuple-element(%cond_param.7), index=0
  ROOT %loop_compare_fusion.7 = pred[] fusion(%get-tuple-element.535), kind=kLoop, calls=%fused_compare.6.clone
}

%fused_add.26.clone (param_0.1043: s32[]) -> s32[] {
  %param_0.1043 = s32[] parameter(0)
  %constant_149_clone_3_2 = s32[] constant(1)
  ROOT %add.184.2 = s32[] add(%param_0.1043, %constant_149_clone_3_2)
}

%region_1.9_spmd.clone.1.clone (param.3: (s32[], f32[64])) -> (s32[], f32[64]) {
  %param.3 = (s32[], f32[64]{0}) parameter(0)
  %get-tuple-element.723 = s32[] get-tuple-element(%param.3), index=0
  %copy.130 = s32[] copy(%get-tuple-element.723)
  %loop_add_fusion.42 = s32[] fusion(%copy.130), kind=kLoop, calls=%fused_add.26.clone
  %get-tuple-element.724 = f32[64]{0} get-tuple-element(%param.3), index=1
  %all-reduce.2 = f32[64]{0} all-reduce(%get-tuple-element.724), channel_id=2, replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %tuple.150 = (s32[], f32[64]{0}) tuple(%loop_add_fusion.42, %all-reduce.2)
}

ENTRY %main.13_spmd (param: f32[64]) -> f32[64] {
  %param = f32[64]{0} parameter(0)
  %all-reduce.1 = f32[64]{0} all-reduce(%param), channel_id=1, replica_groups=[1,8]<=[8], to_apply=%add
  %constant_166_clone_1 = s32[] constant(1)
  %copy.233 = s32[] copy(%constant_166_clone_1)
  %copy.120 = s32[] copy(%copy.233)
  %tuple.148 = (s32[], f32[64]{0}) tuple(%copy.120, %all-reduce.1)
  %while.65 = (s32[], f32[64]{0}) while(%tuple.148), condition=%region_9.10_spmd.clone.1.clone, body=%region_1.9_spmd.clone.1.clone, backend_config={"known_induction_variable":{"tuple_index":"0"},"dynamic_variables":[]}
  %get-tuple-element.9 = f32[64]{0} get-tuple-element(%while.65), index=1
  ROOT %all-reduce.3 = f32[64]{0} all-reduce(%get-tuple-element.9), channel_id=3, replica_groups=[1,8]<=[8], to_apply=%add
}
"""  # noqa: E501


def test_turns_that_are_taken_out_of_a_loop_are_counted_once_each():
    assert [each.times for each in hlo.read(PEELED).collectives] == [1, 2, 1]


@pytest.mark.parametrize("known, other", [
    ("350_2 = s32[] constant(3)", "350_2 = s32[] abs(%param_0.1026)"),
    ("clone_3_2 = s32[] constant(1)", "clone_3_2 = s32[] constant(0)"),
    ("add(%param_0.1043, %constant", "divide(%param_0.1043, %constant"),
    ("add(%param_0.1043, %constant", "multiply(%param_0.1043, %constant"),
    ("166_clone_1 = s32[] constant(1)", "166_clone_1 = s32[] replica-id()"),
])  # fmt: skip
def test_what_no_counter_tells_is_unknown(known, other):
    assert PEELED.count(known) == 1
    times = [each.times for each in hlo.read(PEELED.replace(known, other)).collectives]
    assert times == [1, None, 1]
