"""FLOPs, bytes and collectives read from HLO, against programs whose costs are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.planner.compiler import compile as planner
from capibara.planner.compiler import hlo

# As libtpu writes it: a matmul as a convolution in a fusion, memory space 1 for what stays on the chip, a loop without
# known_trip_count, a kernel whose metadata goes over lines, one all-gather that two fusions share.
TPU_TEXT = """HloModule jit_step, is_scheduled=true

%fused_computation (param_0: bf16[8,64,256], param_1: bf16[256,512], param_2: bf16[16,512]) -> bf16[8,64,512] {
  %param_0 = bf16[8,64,256]{2,1,0:T(8,128)(2,1)} parameter(0)
  %param_1 = bf16[256,512]{1,0:T(8,128)(2,1)} parameter(1)
  %param_2 = bf16[16,512]{1,0:T(8,128)(2,1)} parameter(2)
  %all-gather.1 = bf16[256,512]{1,0:T(8,128)(2,1)S(1)} all-gather(%param_2), channel_id=7, dimensions={0}
  %bitcast.1 = bf16[256,512,1]{1,0,2:T(8,128)(2,1)} bitcast(%param_1)
  ROOT %convolution.1 = bf16[8,64,512]{2,1,0:T(8,128)(2,1)} convolution(%param_0, %bitcast.1), window={size=1}, dim_labels=0bf_io0->0bf
}

%fused_computation.1 (param_0.1: bf16[12,8,64], param_1.1: s32[]) -> bf16[1,8,64] {
  %param_0.1 = bf16[12,8,64]{2,1,0} parameter(0)
  %param_1.1 = s32[] parameter(1)
  %constant.9 = s32[] constant(0)
  ROOT %dynamic-slice.1 = bf16[1,8,64]{2,1,0} dynamic-slice(%param_0.1, %param_1.1, %constant.9, %constant.9), dynamic_slice_sizes={1,8,64}
}

%body (arg: (s32[], bf16[8,64,256], bf16[256,512])) -> (s32[], bf16[8,64,256], bf16[256,512]) {
  %arg = (s32[]{:T(128)}, bf16[8,64,256]{2,1,0}, /*index=2*/bf16[256,512]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%arg), index=0
  %x = bf16[8,64,256]{2,1,0} get-tuple-element(%arg), index=1
  %w = bf16[256,512]{1,0} get-tuple-element(%arg), index=2
  %s = bf16[16,512]{1,0:S(1)} slice(%w), slice={[0:16], [0:512]}
  %fusion.1 = bf16[8,64,512]{2,1,0} fusion(%x, %w, %s), kind=kOutput, calls=%fused_computation, backend_config={"window_config":{"estimated_cycles":"1000"}}
  %fusion.2 = bf16[8,64,512]{2,1,0:T(8,128)(2,1)S(1)} fusion(%x, %w, %s), kind=kOutput, calls=%fused_computation
  %splash_mha_fwd_segmented.3 = (bf16[4,128,64]{2,1,0}, f32[4,128,128]{2,1,0:T(8,128)S(1)}) custom-call(%q, %k), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="x"}
  %q = bf16[4,128,64]{2,1,0} parameter(1)
  %k = bf16[2,256,64]{2,1,0} parameter(2)
  ROOT %t = (s32[], bf16[8,64,256], bf16[256,512]) tuple(%i, %x, %w)
}

%offloaded (param_0.2: bf16[8,64], param_1.2: s32[4]) -> bf16[4,64] {
  %param_0.2 = bf16[8,64]{1,0} parameter(0)
  %param_1.2 = s32[4]{0} parameter(1)
  ROOT %gather.1 = bf16[4,64]{1,0} gather(%param_0.2, %param_1.2), offset_dims={1}, slice_sizes={1,64}
}, execution_thread="sparsecore"

%condition (arg.1: (s32[], bf16[8,64,256], bf16[256,512])) -> pred[] {
  %arg.1 = (s32[]{:T(128)}, bf16[8,64,256]{2,1,0}, bf16[256,512]{1,0}) parameter(0)
  %constant.5 = s32[]{:T(128)} constant(12)
  %i.1 = s32[]{:T(128)} get-tuple-element(%arg.1), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i.1, %constant.5), direction=LT
}

ENTRY %main (p: (s32[], bf16[8,64,256], bf16[256,512]), stack: bf16[12,8,64]) -> bf16[1,8,64] {
  %p = (s32[], bf16[8,64,256]{2,1,0}, bf16[256,512]{1,0}) parameter(0)
  %stack = bf16[12,8,64]{2,1,0} parameter(1)
  %while.1 = (s32[], bf16[8,64,256]{2,1,0}, bf16[256,512]{1,0}) while(%p), condition=%condition, body=%body
  %n = s32[] get-tuple-element(%while.1), index=0
  ROOT %slice_fusion = bf16[1,8,64]{2,1,0} fusion(%stack, %n), kind=kLoop, calls=%fused_computation.1
}
"""


def test_a_tpu_loop_counts_as_often_as_it_turns():
    costs = hlo.costs(hlo.parse(TPU_TEXT))
    assert costs.matmul_flops == 12 * 2 * (2 * 8 * 64 * 256 * 512)  # two fusions a turn
    assert costs.kernels == {"splash_mha_fwd_segmented": 12}
    assert costs.kernel_flops == 12 * 2 * 2 * 4 * 128 * 256 * 64
    assert costs.collective_counts == {"all-gather": 12}  # one channel in two fusions
    assert costs.collective_bytes == {"all-gather": 12 * 256 * 512 * 2}
    assert costs.cycles == 12 * 1000
    x, w, y = 8 * 64 * 256 * 2, 256 * 512 * 2, 8 * 64 * 512 * 2
    turn = (w) + (x + w + y) + (x + w) + 2 * (4 * 128 * 64 * 2) + 2 * 256 * 64 * 2
    condition = 1 + 4 + 4  # the comparison of the counter
    assert costs.hbm_bytes == 12 * (turn + condition) + 4 + 2 * (8 * 64 * 2)  # of the stack one slice is read


MOVES_TEXT = """HloModule moves

%scattered (p0: bf16[32,2,2048,128], p1: s32[32], p2: bf16[32,2,128]) -> bf16[32,2,2048,128] {
  %p0 = bf16[32,2,2048,128]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  %p1 = s32[32]{0:T(128)} parameter(1)
  %p2 = bf16[32,2,128]{2,1,0:T(8,128)(2,1)} parameter(2)
  ROOT %s = bf16[32,2,2048,128]{3,2,1,0:T(8,128)(2,1)} scatter(%p0, %p1, %p2), to_apply=%second
}

%dear (d: f32[8,128]) -> f32[8,128] {
  %d = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %twice = f32[8,128]{1,0:T(8,128)} add(%d, %d)
}

%cheap (c: f32[8,128]) -> f32[8,128] {
  ROOT %c = f32[8,128]{1,0:T(8,128)} parameter(0)
}

ENTRY %main (keys: bf16[32,2,2048,128], at: s32[32], new: bf16[32,2,128], w: bf16[1024,512], x: f32[8,128]) -> f32[8,128] {
  %keys = bf16[32,2,2048,128]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  %at = s32[32]{0:T(128)S(1)} parameter(1)
  %new = bf16[32,2,128]{2,1,0:T(8,128)(2,1)S(1)} parameter(2)
  %w = bf16[1024,512]{1,0:T(8,128)(2,1)} parameter(3)
  %x = f32[8,128]{1,0:T(8,128)} parameter(4)
  %written = bf16[32,2,2048,128]{3,2,1,0:T(8,128)(2,1)} fusion(%keys, %at, %new), kind=kCustom, calls=%scattered
  %whole = (bf16[1024,512]{1,0:T(8,128)(2,1)S(1)}, bf16[1024,512]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%w)
  %part = (bf16[1024,512]{1,0:T(8,128)(2,1)}, bf16[256,512]{1,0:T(8,128)(2,1)S(1)}, s32[]{:S(2)}) slice-start(%w), slice={[0:256], [0:512]}
  %narrow = f32[64,4,1,1]{3,2,1,0:T(1,128)} custom-call(%written), custom_call_target="tpu_custom_call"
  %which = s32[] constant(0)
  ROOT %r = f32[8,128]{1,0:T(8,128)} conditional(%which, %x, %x), branch_computations={%cheap, %dear}
}
"""


def test_what_is_moved_counts_once_and_as_it_lies():
    module = hlo.parse(MOVES_TEXT)
    whole, part = 1024 * 512 * 2, 256 * 512 * 2
    branch = 3 * 8 * 128 * 4
    keys, narrow = 32 * 2 * 2048 * 128 * 2, 64 * 4 * 128 * 4  # of [.., 1] the tile's lanes
    known = hlo.costs(module, kernel_bytes={"narrow": 1000.0}, dearest=False)
    assert known.hbm_bytes == 32 * 2 * 128 * 2 + whole + part + 1000
    assert hlo.costs(module, dearest=False).hbm_bytes - known.hbm_bytes == keys + narrow - 1000
    assert hlo.costs(module).hbm_bytes - hlo.costs(module, dearest=False).hbm_bytes == branch


@pytest.mark.parametrize(
    ("window", "labels", "lhs", "rhs", "out", "want"),
    [
        # heads as a spatial dimension of one operand, reversed and padded: each of 16 outputs meets one of 16
        (
            "size=1x16 pad=0_0x15_15 rhs_reversal=0x1",
            "0bf1_1oi0->0b1f",
            (12, 64, 32, 1),
            (16, 8, 32, 1),
            (12, 64, 16, 8),
            None,
        ),
        ("size=12 pad=11_11 rhs_reversal=1", "fb0_0oi->0fb", (32, 64, 1), (12, 8, 32), (12, 8, 64), None),
        ("size=3 pad=1_1", "b0f_0io->b0f", (2, 10, 4), (3, 4, 5), (2, 10, 5), 2 * 2 * 4 * 5 * (9 + 10 + 9)),
        ("size=3 stride=2", "b0f_0io->b0f", (2, 9, 4), (3, 4, 5), (2, 4, 5), 2 * 2 * 4 * 5 * 12),
        ("size=2 pad=1_1 lhs_dilate=2", "b0f_0io->b0f", (1, 4, 1), (2, 1, 1), (1, 8, 1), 2 * 8),
    ],
)
def test_convolutions_count_only_places_that_meet(window, labels, lhs, rhs, out, want):
    show = lambda shape: "f32[" + ",".join(map(str, shape)) + "]"  # noqa: E731
    text = (
        f"HloModule m\n\nENTRY %main (a: {show(lhs)}, b: {show(rhs)}) -> {show(out)} {{\n"
        f"  %a = {show(lhs)} parameter(0)\n  %b = {show(rhs)} parameter(1)\n"
        f"  ROOT %c = {show(out)} convolution(%a, %b), window={{{window}}}, dim_labels={labels}\n}}\n"
    )
    if want is None:  # a matmul in disguise: all its multiply-adds are outputs times what is contracted
        want = 2 * int(np.prod(out)) * 32
    assert hlo.costs(hlo.parse(text)).matmul_flops == want


def test_a_real_program_has_the_costs_of_its_formula():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, shards = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P(None, "fsdp"))

    def step(w, x):
        def layer(x, w):
            return jax.nn.relu(x @ w), None

        return jnp.sum(jax.lax.scan(layer, x, w)[0])

    w = jax.ShapeDtypeStruct((5, 64, 64), jnp.float32, sharding=shards)
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=rows)
    report = planner.compile_train_step(jax.jit(step).lower(w, x))
    assert report.fits and report.costs.matmul_flops == 5 * 2 * (16 // 8) * 64 * 64
    assert report.costs.collective_bytes["all-gather"] == 5 * 64 * 64 * 4
    assert report.argument_bytes == (5 * 64 * 64 + 16 * 64) * 4 // 8
    assert report.costs.hbm_bytes > report.argument_bytes


@pytest.mark.parametrize("call", ["call(%a, %b), to_apply=%product", "async-start(%a, %b), calls=%product"])
def test_what_is_called_counts(call):
    text = f"""HloModule m

%product (l: f32[8,16], r: f32[16,4]) -> f32[8,4] {{
  %l = f32[8,16]{{1,0}} parameter(0)
  %r = f32[16,4]{{1,0}} parameter(1)
  ROOT %dot = f32[8,4]{{1,0}} dot(%l, %r), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

ENTRY %main (a: f32[8,16], b: f32[16,4]) -> f32[8,4] {{
  %a = f32[8,16]{{1,0}} parameter(0)
  %b = f32[16,4]{{1,0}} parameter(1)
  %twice = f32[8,4]{{1,0}} {call}
  ROOT %again = f32[8,4]{{1,0}} {call}
}}
"""
    assert hlo.costs(hlo.parse(text)).matmul_flops == 2 * (2 * 8 * 16 * 4)


HOST = "bf16[4,1024]{1,0:T(8,128)(2,1)S(5)}"
ROW = "bf16[1,1024]{1,0:T(8,128)(2,1)}"
HOST_TEXT = f"""HloModule m, is_scheduled=true

ENTRY %main (x: bf16[1,1024], i: s32[]) -> bf16[1,1024] {{
  %x = {ROW} parameter(0)
  %i = s32[] parameter(1)
  %all = {HOST} custom-call(), custom_call_target="AllocateBuffer"
  %send = (({HOST}, {ROW}, s32[]), {HOST}, u32[]{{:S(2)}}) dynamic-update-slice-start(%all, %x, %i, %i)
  %wide = {ROW} fusion(%x), kind=kLoop, calls=%same, backend_config={{"estimated_cycles":"300"}}
  %sent = {HOST} dynamic-update-slice-done(%send)
  %fetch = (({HOST}, s32[]), {ROW}, u32[]{{:S(2)}}) dynamic-slice-start(%sent, %i, %i), dynamic_slice_sizes={{1,1024}}
  %narrow = {ROW} fusion(%wide), kind=kLoop, calls=%same, backend_config={{"estimated_cycles":"50"}}
  ROOT %fetched = {ROW} dynamic-slice-done(%fetch)
}}

%same (p: bf16[1,1024]) -> bf16[1,1024] {{
  ROOT %p = {ROW} parameter(0)
}}
"""


def test_copies_to_the_host_are_hidden_by_what_is_scheduled_beside_them():
    """A row of 2 KiB leaves beside 300 cycles and returns beside 50: at 16 bytes a cycle the way back takes 128."""
    found = hlo.costs(hlo.parse(HOST_TEXT), host_bytes_per_cycle=16.0)
    assert found.host_bytes == 2 * 2048 and found.host_exposed_cycles == 128 - 50
    assert hlo.costs(hlo.parse(HOST_TEXT)).host_exposed_cycles == 0


def test_text_that_is_no_hlo_is_said():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.parse("HloModule empty\n")


def test_out_of_memory_is_a_verdict_with_figures():
    message = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
        "Used 18.04G of 15.75G hbm. Exceeded hbm capacity by 2.29G."
    )
    assert planner.out_of_memory(message)
    used, limit = planner.hbm_need(message)
    assert used == int(18.04 * 2**30) and limit == int(15.75 * 2**30)
    assert not planner.out_of_memory("INTERNAL: something else")
    assert planner.hbm_need("CompileTimeHbmOom") == (None, None)
    other = "CompileTimeHbmOom: the total memory required for HLO temporaries (20.42G) exceeds available HBM (15.75G)."
    assert planner.hbm_need(other) == (int(20.42 * 2**30), int(15.75 * 2**30))
