"""The buffers alive at the peak, against a schedule counted by hand and against a compiler's own figure."""

import jax
import jax.numpy as jnp
import pytest

from capibara.planner.compiler import hbm_peak, hlo

KIB = 1024
# A loop of four turns that reads one slice of a stack a turn and writes another stack in place. Arrays are 1, 2 or 4 KiB.
TEXT = """HloModule jit_step, is_scheduled=true

%update (param_0: f32[4,256], param_1: f32[256], param_2: s32[]) -> f32[4,256] {
  %param_0 = f32[4,256]{1,0} parameter(0)
  %param_1 = f32[256]{0} parameter(1)
  %param_2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %row = f32[1,256]{1,0} bitcast(%param_1)
  ROOT %dus = f32[4,256]{1,0} dynamic-update-slice(%param_0, %row, %param_2, %zero)
}

%body (arg: (s32[], f32[4,256], f32[256])) -> (s32[], f32[4,256], f32[256]) {
  %arg = (s32[], f32[4,256]{1,0}, f32[256]{0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %stack = f32[4,256]{1,0} get-tuple-element(%arg), index=1
  %x = f32[256]{0} get-tuple-element(%arg), index=2
  %wide = f32[512]{0} custom-call(%x), custom_call_target="w", metadata={op_name="jit(step)/transpose(jvp())/while/body/rematted_computation/mlp/dot_general"}
  %on_chip = f32[4096]{0:S(1)} custom-call(%x), custom_call_target="c"
  %narrow = f32[256]{0} custom-call(%wide, %on_chip), custom_call_target="n"
  %new_stack = f32[4,256]{1,0} fusion(%stack, %narrow, %i), kind=kLoop, calls=%update
  %next = f32[256]{0} custom-call(%narrow), custom_call_target="m"
  ROOT %out = (s32[], f32[4,256]{1,0}, f32[256]{0}) tuple(%i, %new_stack, %next)
}

%condition (arg.1: (s32[], f32[4,256], f32[256])) -> pred[] {
  %arg.1 = (s32[], f32[4,256]{1,0}, f32[256]{0}) parameter(0)
  %limit = s32[] constant(4)
  %i.1 = s32[] get-tuple-element(%arg.1), index=0
  ROOT %lt = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (p: f32[256], n: s32[]) -> f32[256] {
  %p = f32[256]{0} parameter(0)
  %n = s32[] parameter(1)
  %early = f32[1024]{0} custom-call(%p), custom_call_target="e"
  %start = f32[256]{0} custom-call(%early), custom_call_target="s"
  %empty = f32[4,256]{1,0} custom-call(), custom_call_target="AllocateBuffer", metadata={op_name="jit(step)/jvp()/attention/broadcast"}
  %tuple = (s32[], f32[4,256]{1,0}, f32[256]{0}) tuple(%n, %empty, %start)
  %while = (s32[], f32[4,256]{1,0}, f32[256]{0}) while(%tuple), condition=%condition, body=%body
  %last = f32[256]{0} get-tuple-element(%while), index=2
  ROOT %result = f32[256]{0} custom-call(%last), custom_call_target="r"
}
"""


def test_the_peak_is_that_of_the_schedule():
    peak = hbm_peak.at_peak(hlo.parse(TEXT))
    # The argument, 1 KiB; the stack and the carried array, 4 + 1; in the loop `wide` and `narrow`, 2 + 1. Not `early`, which
    # is dead by then, nor the updated stack, which is the old one, nor what stays on the chip, nor the loop's results.
    assert peak.argument_bytes == KIB + 4
    assert peak.bytes == (1 + 4 + 1 + 2 + 1) * KIB + 4
    found = {buffer.array: (buffer.bytes, buffer.count, buffer.source) for buffer in peak.buffers}
    assert found["f32[4,256]"] == (4 * KIB, 1, "attention, forward pass")
    assert found["f32[512]"] == (2 * KIB, 1, "mlp, made again")
    assert found["f32[256]"] == (2 * KIB, 2, "buffers of loops and copies")


def test_equal_arrays_of_one_source_are_counted_together():
    text = TEXT.replace("custom-call(%wide, %on_chip)", "custom-call(%wide, %wider, %on_chip)").replace(
        "  %on_chip", "  %wider = f32[512]{0} custom-call(%x), custom_call_target=\"w\", "
        'metadata={op_name="jit(step)/transpose(jvp())/while/body/rematted_computation/mlp/dot_general"}\n  %on_chip', 1
    )  # fmt: skip
    assert hbm_peak.Buffer(4 * KIB, 2, "f32[512]", "mlp, made again") in hbm_peak.at_peak(hlo.parse(text)).buffers


def test_a_result_that_lies_in_an_operand_takes_no_memory_and_those_beside_it_do():
    """As in a fusion that runs beside a collective: it passes the collective's buffers on, and has a result of its own."""
    text = TEXT.replace(
        '  %narrow = f32[256]{0} custom-call(%wide, %on_chip), custom_call_target="n"',
        '  %both = (f32[512]{0}, f32[768]{0}) custom-call(%wide, %on_chip), custom_call_target="b", '
        "output_to_operand_aliasing={{0}: (0, {})}\n"
        "  %passed = f32[512]{0} get-tuple-element(%both), index=0\n"
        "  %other = f32[768]{0} get-tuple-element(%both), index=1\n"
        '  %narrow = f32[256]{0} custom-call(%passed, %other), custom_call_target="n"',
    )
    assert text != TEXT
    # `wide` until `narrow`, by its second name, and the 3 KiB beside it.
    assert hbm_peak.at_peak(hlo.parse(text)).bytes == (1 + 4 + 1 + 2 + 3 + 1) * KIB + 4
    whole = text.replace("{{0}: (0, {})}", "{{0}: (0, {}), {1}: (1, {})}")  # the second lies in what stays on the chip
    assert hbm_peak.at_peak(hlo.parse(whole)).bytes == (1 + 4 + 1 + 2 + 1) * KIB + 4


def test_a_single_result_that_lies_in_an_operand():
    text = TEXT.replace('custom_call_target="n"', 'custom_call_target="n", output_to_operand_aliasing={{}: (0, {})}')
    assert hbm_peak.at_peak(hlo.parse(text)).bytes == (1 + 4 + 1 + 2) * KIB + 4  # `narrow` lies in `wide'


def test_a_compiled_chain_needs_what_its_compiler_says():
    """Two products of 256 KiB each alive at once, on the CPU."""
    f = jax.jit(lambda x: jnp.sum(jnp.sin(x @ x) @ jnp.cos(x.T @ x)))
    compiled = f.lower(jax.ShapeDtypeStruct((256, 256), jnp.float32)).compile()
    memory = compiled.memory_analysis()
    peak = hbm_peak.at_peak(hlo.parse(compiled.as_text()))
    assert peak.argument_bytes == memory.argument_size_in_bytes
    assert peak.bytes - peak.argument_bytes == pytest.approx(memory.temp_size_in_bytes, rel=0.5)
