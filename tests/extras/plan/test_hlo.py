"""The reader of compiled programs, on programs whose collectives are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from planned import PROGRAM

from jaxdp.extras.plan import hlo

MESH_SHAPE = {"data": 4, "model": 2}


def read(function, *arguments, donate=()):
    """The program of `function`, which every device runs on whole arguments."""
    devices = np.array(jax.devices()).reshape(4, 2)
    mesh = Mesh(devices, tuple(MESH_SHAPE), axis_types=(AxisType.Auto,) * 2)
    specs = {"in_specs": (P(),) * len(arguments), "out_specs": P()}
    mapped = jax.shard_map(function, mesh=mesh, **specs, check_vma=False)
    whole = NamedSharding(mesh, P())
    placed = jax.device_put(arguments, whole)
    program = jax.jit(mapped, donate_argnums=donate, out_shardings=whole)
    return hlo.read(program.lower(*placed).compile().as_text())


def f32(*shape):
    return np.zeros(shape, np.float32)


RING = [(place, (place + 1) % 4) for place in range(4)]
BOTH = "data", "model"
tiled = {"tiled": True}
FOUND = {
    "all-reduce data": (lambda x: lax.psum(x, "data"), 280, 1.5 * 280),
    "all-reduce model": (lambda x: lax.psum(x, "model"), 280, 280),
    "all-reduce data model": (lambda x: lax.psum(x, BOTH), 280, 7 / 4 * 280),
    "all-gather data": (lambda x: lax.all_gather(x, "data", **tiled), 1120, 840),
    "reduce-scatter model": (lambda x: lax.psum_scatter(x, "model", **tiled), 140, 140),
    "all-to-all model": (lambda x: lax.all_to_all(x, "model", 0, 0, **tiled), 280, 140),
    "collective-permute data": (lambda x: lax.ppermute(x, "data", RING), 280, 280),
}
"""By kind and axes: what each device runs on 280 bytes, and the bytes got and sent."""


@pytest.mark.parametrize("name", FOUND)
def test_a_collective_is_found_with_its_axes_and_bytes(name):
    function, received, sent = FOUND[name]
    (found,) = read(function, f32(10, 7)).collectives
    kind, *axes = name.split()
    assert (found.kind, found.dtype) == (kind, "float32")
    assert (found.operand_bytes, found.result_bytes) == (280, received)
    assert found.axes(MESH_SHAPE) == tuple(axes)
    assert (found.times, found.optional, found.wire_bytes) == (1, False, sent)
    assert kind != "all-gather" or found.path.endswith("/all_gather")


def test_operands_branches_and_donated_inputs_are_found():
    def combined(x, y):
        return lax.psum((x * 2, y.astype(jnp.int32)), "data")

    def in_a_branch(x):
        return lax.cond(
            x[0] > 0, lambda x: lax.psum(x, "data"), lambda x: x * 2, lax.sin(x)
        )

    found = read(combined, f32(10), np.zeros(3, np.int8)).collectives
    assert sum(each.operand_bytes for each in found) == 40 + 12
    operands = [operand.array for each in found for operand in each.operands]
    assert sorted((array.dtype, array.shape) for array in operands) == [
        ("float32", (10,)),
        ("int32", (3,)),
    ]
    (found,) = read(in_a_branch, f32(6)).collectives
    assert (found.optional, found.times) == (True, 1)

    donated = lambda x, y, z: (y + 1, x * 2, z.sum())  # noqa: E731
    program = read(donated, f32(3), f32(4, 4), f32(7), donate=(0, 1))
    assert program.aliased == {0: "1", 1: "0"}


GROUPS = {
    "{{0,1},{2,3}}, more={{7}}": ((0, 1), (2, 3)),
    "{}": (tuple(range(8)),),
    "[2,4]<=[8]": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "[4,2]<=[2,4]T(1,0)": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "[1,8]<=[8], dimensions={0}": (tuple(range(8)),),
    "mesh['a'=4,'b'=2] {'a'}, x": ((0, 2, 4, 6), (1, 3, 5, 7)),
    "mesh['a'=4,'b'=1,'c'=2] {'c'}": ((0, 1), (2, 3), (4, 5), (6, 7)),
    "mesh['a'=8] {'a'}": (tuple(range(8)),),
    "mesh['a'=4,'b'=2] {'b','a'}": ((0, 2, 4, 6, 1, 3, 5, 7),),
    "mesh['a'=8] {'a':(1)2}": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "mesh['a'=8] {'a':(2)4}": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "mesh['a'=8] {'a':(2)2}": ((0, 2), (1, 3), (4, 6), (5, 7)),
    "mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}": ((3, 2), (1, 0)),
    "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b'}": ((0, 4, 1, 5), (2, 6, 3, 7)),
}


@pytest.mark.parametrize("text", GROUPS)
def test_groups_are_read_in_every_spelling(text):
    entry = f"""ENTRY %main (p: f32[]) -> f32[] {{
  %p = f32[] parameter(0)
  ROOT %all = f32[] all-reduce(%p), replica_groups={text}
}}
"""
    (found,) = hlo.read(PROGRAM + entry).collectives
    assert found.groups == GROUPS[text]


WORDS = {
    "PAIR": "replica_groups={{0,1}}, to_apply=%add",
    "EIGHT": "replica_groups={{0,1,2,3,4,5,6,7}}",
    "PRODUCT": "lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    "TILED": "{1,0:T(8,128)(2,1)S(1)}",
    "GATHERS": "channel_id=3, replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions"
    '={0}, frontend_attributes={chain_id="0"}',
}


def collectives(text):
    """Returns a program's collectives. In its text, words stand for longer ones."""
    for word, meaning in WORDS.items():
        text = text.replace(word, meaning)
    return hlo.read(PROGRAM + text).collectives


@pytest.mark.parametrize("groups, axes", [
    ("{{0,1,2,3},{4,5,6,7}}", None), ("{{0},{1}}", ()), ("{{0,8}}", None),
])  # fmt: skip
def test_groups_may_lie_along_no_axes(groups, axes):
    (found,) = collectives(f"""ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8] parameter(0)
  ROOT %all = f32[8] all-reduce(%p), replica_groups={groups}, to_apply=%add
}}
""")
    assert found.axes(MESH_SHAPE) == axes


def test_starts_and_ends_are_one_collective():
    # As the GPU compiler writes them: the tuple of a start has the operands in it.
    scatter, gather, reduce = collectives(
        """ENTRY %main (p: f32[16,4], q: f32[8]) -> (f32[2,4], f32[64], f32[8]) {
  %p = f32[16,4]{1,0} parameter(0), metadata={op_name="x"}
  %q = f32[8]{0} parameter(1), metadata={op_name="w"}
  %rs = ((f32[16,4]{1,0}), f32[2,4]{1,0}) reduce-scatter-start(%p), channel_id=1,"""
        """ EIGHT, dimensions={0}, to_apply=%add,"""
        """ backend_config={"collective_backend_config":{"is_sync":true}}
  %rsd = f32[2,4]{1,0} reduce-scatter-done(%rs)
  %ag = (f32[8]{0}, f32[64]{0}) all-gather-start(%q), channel_id=2,"""
        """ replica_groups=[1,8]<=[8], dimensions={0}, use_global_device_ids=true
  %agd = f32[64]{0} all-gather-done(%ag)
  %ar = f32[8]{0} all-reduce-start(%q), channel_id=3,"""
        """ replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_1'}, to_apply=%add
  %ard = f32[8]{0} all-reduce-done(%ar)
  ROOT %t = (f32[2,4]{1,0}, f32[64]{0}, f32[8]{0}) tuple(%rsd, %agd, /*index=2*/%ard)
}
"""
    )
    assert (scatter.operand_bytes, scatter.result_bytes) == (256, 32)
    assert (gather.operand_bytes, gather.result_bytes) == (32, 256)
    assert (reduce.operand_bytes, reduce.group_size) == (32, 2)
    overlapped = [each.overlapped for each in (scatter, gather, reduce)]
    assert overlapped == [False, True, True]
    assert gather.operands[0].paths == ("w",)


def test_what_matrix_products_hide_is_told_from_what_they_could():
    found = collectives("""%gemm (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  ROOT %dot = f32[8,8]{1,0} dot(%a, %a), PRODUCT
}

%plain (b: f32[8,8]) -> f32[8,8] {
  %b = f32[8,8]{1,0} parameter(0)
  ROOT %sum = f32[8,8]{1,0} add(%b, %b)
}

ENTRY %main (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  %one = f32[8,8]{1,0} all-reduce-start(%p), channel_id=1, PAIR
  %x = f32[8,8]{1,0} fusion(%p), kind=kCustom, calls=%gemm
  %one.done = f32[8,8]{1,0} all-reduce-done(%one)
  %two = f32[8,8]{1,0} all-reduce-start(%x), channel_id=2, PAIR
  %y = f32[8,8]{1,0} fusion(%p), kind=kLoop, calls=%plain
  %two.done = f32[8,8]{1,0} all-reduce-done(%two)
  %three = f32[8,8]{1,0} all-reduce-start(%y), channel_id=3, PAIR
  %z = f32[8,8]{1,0} custom-call(%p, %p), custom_call_target="__cublas$gemm"
  %three.done = f32[8,8]{1,0} all-reduce-done(%three)
  %four = f32[8,8]{1,0} all-reduce(%z), channel_id=4, PAIR
  ROOT %last = f32[8,8]{1,0} dot(%four, %two.done), PRODUCT
}
""")
    assert [each.overlapped for each in found] == [True, True, True, False]
    assert [each.hidden for each in found] == [True, False, True, False]


def test_async_computations_are_looked_into():
    found = collectives("""%wrapped (p: f32[16]) -> f32[16] {
  %p.1 = f32[16]{0} parameter(0)
  ROOT %all = f32[16]{0} all-reduce(%p.1), channel_id=1, PAIR
}

ENTRY %main (p: f32[16]) -> f32[16] {
  %p = f32[16]{0} parameter(0)
  %start = ((f32[16]{0}), f32[16]{0}, u32[]) async-start(%p), calls=%wrapped
  %update = ((f32[16]{0}), f32[16]{0}, u32[]) async-update(%start), calls=%wrapped
  ROOT %done = f32[16]{0} async-done(%update), calls=%wrapped
}
""")
    assert len(found) == 1


def test_tpu_fusions_are_what_they_do():
    # A reduce-scatter is a fusion around an all-reduce; an all-gather that runs beside
    # computation is printed in each of the fusions it runs through.
    scatter, gathered = collectives(
        """%all-reduce-scatter.3 (i: f32[16,4]) -> f32[2,4] {
  %i = f32[16,4]TILED parameter(0)
  %ar = f32[16,4]TILED all-reduce(%i), channel_id=1, EIGHT, to_apply=%add
  %zero = u32[] constant(0)
  ROOT %ds = f32[2,4]TILED dynamic-slice(%ar, %zero, %zero)
}

%fused_computation.1 (a: bf16[2,4]) -> (bf16[2,4], bf16[16,4]) {
  %a = bf16[2,4]TILED parameter(0)
  %ag.1 = bf16[16,4]TILED all-gather(%a), GATHERS
  ROOT %cc = (bf16[2,4]TILED, bf16[16,4]TILED) custom-call(%ag.1),"""
        """ custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.2 (b: bf16[2,4], c: bf16[16,4]) -> bf16[16,4] {
  %b = bf16[2,4]TILED parameter(0)
  %c = bf16[16,4]TILED parameter(1)
  ROOT %ag.2 = bf16[16,4]TILED all-gather(%b), GATHERS
}

%fused_computation.3 (d: bf16[2,4], e: bf16[16,4]) -> bf16[16,4] {
  %d = bf16[2,4]TILED parameter(0)
  %e = bf16[16,4]TILED parameter(1)
  %ag.3 = bf16[16,4]TILED all-gather(%d), GATHERS
  ROOT %dd = bf16[16,4]TILED custom-call(%d, %e, %ag.3),"""
        """ custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (p: f32[16,4], q: bf16[2,4]) -> (f32[2,4], bf16[16,4]) {
  %p = f32[16,4]TILED parameter(0)
  %q = bf16[2,4]TILED parameter(1)
  %rs = f32[2,4]TILED fusion(%p), kind=kCustom, calls=%all-reduce-scatter.3,"""
        """ metadata={op_name="jit(step)/transpose(jvp())/dot_general"}
  %s = (bf16[2,4]TILED, bf16[16,4]TILED) fusion(%q), calls=%fused_computation.1
  %s0 = bf16[2,4]TILED get-tuple-element(%s), index=0
  %s1 = bf16[16,4]TILED get-tuple-element(%s), index=1
  %m = bf16[16,4]TILED fusion(%s0, %s1), calls=%async_collective_fusion.2
  %f = bf16[16,4]TILED fusion(%s0, %m), calls=%fused_computation.3
  ROOT %t = (f32[2,4]TILED, bf16[16,4]TILED) tuple(%rs, %f)
}
"""
    )
    assert scatter.kind == "reduce-scatter"
    assert (scatter.operand_bytes, scatter.result_bytes) == (256, 32)
    assert scatter.path == "jit(step)/transpose(jvp())/dot_general"
    assert gathered.kind == "all-gather"
    assert (gathered.dtype, gathered.result_bytes) == ("bfloat16", 128)
    assert gathered.overlapped


def test_a_collective_of_a_tpu_by_itself_is_not_hidden():
    """It has the name of an asynchronous one, and no fusion that it is a link of."""
    (found,) = collectives(
        """ENTRY %main (a: f32[8]) -> f32[64] {
  %a = f32[8] parameter(0)
  ROOT %g = f32[64] all-gather(%a), channel_id=1, EIGHT, dimensions={0}, """
        """frontend_attributes={async_collective_name="all-gather-start.1"}
}
"""
    )
    assert found.kind == "all-gather" and not found.hidden
