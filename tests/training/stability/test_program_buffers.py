"""The largest arrays of a program, from its text: those that have memory of their own, on one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from capibara.training.stability import program_buffers

# In the form of a GPU's compiler, whose fusions may make several arrays.
GPU = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(bf16[8,16]{1,0})->f32[]}

%fused_computation.1 (param_0.1: bf16[8,16]) -> f32[4096,4096] {
  %param_0.1 = bf16[8,16]{1,0} parameter(0)
  ROOT %broadcast.1 = f32[4096,4096]{1,0} broadcast(%param_0.1), dimensions={0,1}
}

%region_0.2 (a.1: f32[], b.1: f32[]) -> f32[] {
  %a.1 = f32[] parameter(0)
  %b.1 = f32[] parameter(1)
  ROOT %add.9 = f32[1024,1024]{1,0} add(%a.1, %b.1)
}

%while_body.3 (tuple.1: (s32[], f32[64,1024])) -> (s32[], f32[64,1024]) {
  %tuple.1 = (s32[], f32[2048,2048]{1,0}) parameter(0)
  %cublas-gemm.1 = (f32[256,1024]{1,0}, s8[4194304]{0}) custom-call(%a, %b), metadata={op_name="jit(step)/while/body/dot_general" stack_frame_id=3}
  %copy.4 = f32[256,1024]{0,1} copy(%x)
  ROOT %tuple.2 = (s32[], f32[2048,2048]{1,0}) tuple(%i, %y)
}

ENTRY %main.9 (x.1: bf16[8,16]) -> f32[] {
  %x.1 = bf16[9000,9000]{1,0} parameter(0)
  %loop_fusion.1 = (f32[128,1024]{1,0}, pred[512,1024]{1,0}) fusion(%x.1), kind=kLoop, calls=%fused_computation.1, metadata={op_name="jit(step)/tanh"}
  %while.1 = (s32[], f32[2048,2048]{1,0}) while(%t), condition=%cond, body=%while_body.3
  ROOT %reduce.1 = f32[] reduce(%loop_fusion.1, %zero), dimensions={0,1}, to_apply=%region_0.2
}
"""


def test_what_has_memory_of_its_own_is_found():
    assert program_buffers.name_of(GPU) == "jit_step" and program_buffers.name_of("module @jit_step") is None
    assert program_buffers.largest(GPU, 4) == [
        "4.0 MiB s8[4194304] of jit(step)/while/body/dot_general",
        "1.0 MiB f32[256,1024] of jit(step)/while/body/dot_general and 1 more",
        "0.5 MiB f32[128,1024] of jit(step)/tanh",
        "0.5 MiB pred[512,1024] of jit(step)/tanh",
    ]
    assert program_buffers.largest("", 3) == []


@pytest.mark.parametrize(("dtype", "named", "mib"), [(jnp.float32, "f32", 0.5), (jnp.bool_, "pred", 0.1)])
def test_of_a_compiled_program_the_parts_on_one_device_count(dtype, named, mib):
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))
    rows = jax.ShapeDtypeStruct((4096, 256), dtype, sharding=NamedSharding(mesh, PartitionSpec("rows")))
    text = jax.jit(lambda x: x[::-1]).lower(rows).compile().as_text()
    assert any(line.startswith(f"{mib} MiB {named}[512,256] of ") for line in program_buffers.largest(text, 3))
