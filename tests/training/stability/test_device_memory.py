"""Out of memory: one line with the figures, the largest buffers and what to change; other errors stay as they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from capibara import sharding
from capibara.core.types import UserError
from capibara.sharding import Plan, Remat
from capibara.training import loop, setup
from capibara.training.base.callbacks import Callback
from capibara.training.stability.device_memory import explained, out_of_memory_explained

# What libtpu's compiler says, of a program for a v5e.
TEMPORARIES = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (19.42G) exceeds available "
    "HBM (15.75G)."
)
LISTED = """RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.04G of 15.75G hbm. Exceeded hbm capacity by 2.29G.

Total hbm usage >= 18.54G:
    program          18.04G

  Largest program allocations in hbm:

  1. Size: 4.00G
     Operator: op_name="jit(step)/logits"
     Shape: f32[16,2048,32768]{2,1,0}
     ==========================

  2. Size: 2.00G
     Shape: bf16[8,64]{1,0}
     ==========================
"""

# What JAX 0.11.2 said on an H200: of a step that ran, of steps whose products and kernels its compiler could not try.
OF_GPU = (
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 26.06GiB with allocator GPU_0_bfc on device 0. "
    "[executable_name='jit_step'] [tf-allocator-allocation-error='']"
)
_TRIED = (
    "Out of memory while trying to allocate 4.02GiB with allocator GPU_0_bfc on device 0. "
    "[tf-allocator-allocation-error='']"
)
OF_GPU_COMPILERS = (
    "NOT_FOUND: All configs failed during profiling or were excluded from selection.\nFailures (2):\n"
    + 2 * f"EXECUTION FAILED: RESOURCE_EXHAUSTED: {_TRIED}\n",
    "RESOURCE_EXHAUSTED: Failed to get configs for: 9 out of 174 instructions. See logs for all failures. Example failure: "
    f"\n{_TRIED}",
)
# As earlier JAX lists them.
LISTED_OF_GPU = """RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2110783616 bytes.
BufferAssignment OOM Debugging.
BufferAssignment stats:
             parameter allocation:    1.02GiB
    preallocated temp allocation:    1.97GiB
Peak buffers:
\tBuffer 1:
\t\tSize: 4.89GiB
\t\tOperator: op_name="jit(step)/logits" source_file="/a/b.py" source_line=175
\t\tXLA Label: custom-call
\t\tShape: f32[5104,257152]
\t\t==========================

\tBuffer 2:
\t\tSize: 1.96GiB
\t\tEntry Parameter Subshape: f32[2048,257152]
\t\t==========================

"""


def test_a_real_error_becomes_one_line_with_what_to_change():
    kept = jnp.ones((333, 777))
    with pytest.raises(UserError) as caught, out_of_memory_explained(Plan(batch_size=8), "the run"):
        jax.jit(lambda: jnp.ones((1 << 20, 1 << 17)))().block_until_ready()
    text = str(caught.value)
    assert (
        "\n" not in text
        and "549755813888" in text
        and 'Plan.remat = "full"' in text
        and "Plan.accumulation" not in text  # a device has one row
    )
    assert kept.nbytes > 0 and "the largest buffers" in text


def test_the_largest_buffers_are_those_that_the_compiler_names_or_those_of_the_state():
    plan = Plan(batch_size=8, accumulation=8, remat=Remat.FULL)
    listed = explained(LISTED, plan, "the train step")
    assert "Used 18.04G of 15.75G" in listed and "4.00G f32[16,2048,32768]{2,1,0} of jit(step)/logits" in listed
    assert "2.00G bf16[8,64]" in listed and "Plan.remat" not in listed and "Plan.accumulation" not in listed
    mesh = sharding.make_mesh(Plan(batch_size=8, fsdp=8))
    placed = NamedSharding(mesh, PartitionSpec("fsdp"))
    state = {
        "small": jax.ShapeDtypeStruct((8,), np.float32, sharding=placed),
        "table": jax.ShapeDtypeStruct((1 << 20, 8), np.float32, sharding=placed),
    }
    of_state = explained(TEMPORARIES, plan, "the train step", state)
    assert "(19.42G) exceeds available HBM (15.75G)" in of_state and "4.0 MiB table, 0.0 MiB small" in of_state


def test_a_step_that_does_not_fit_ends_the_run_before_it_starts(make_trainer, monkeypatch):
    def fails(*args, **options):
        raise jax.errors.JaxRuntimeError(TEMPORARIES)

    monkeypatch.setattr(setup, "compile_step", fails)
    with pytest.raises(UserError, match=r"the train step does not fit .*exceeds available HBM.* MiB .*shard more"):
        loop.train(make_trainer(), Callback())


@pytest.mark.parametrize(("batch", "accumulation", "wanted"), [(48, 1, 2), (48, 2, 3), (24, 1, 3), (24, 3, None)])
def test_accumulation_that_is_proposed_divides_the_rows_of_a_device(batch, accumulation, wanted):
    plan = Plan(batch_size=batch, accumulation=accumulation)
    text = explained(TEMPORARIES, plan, "the train step", {})
    assert (f"Plan.accumulation = {wanted}" in text) == (wanted is not None)
    if wanted is not None:
        sharding.make_mesh(Plan(batch_size=batch, accumulation=wanted))


@pytest.mark.parametrize(
    "message", ["", "\n", "RESOURCE_EXHAUSTED", "Largest program allocations\n 1. Size:\n", "\x00" * 9]
)
def test_messages_of_odd_forms_are_explained(message):
    state = {"host": np.ones((2, 2)), "key": jax.eval_shape(lambda: jax.random.key(0))}
    text = explained(message, Plan(batch_size=8), "the train step", state)
    assert text.startswith("the train step does not fit") and "\n" not in text and "host" in text


@pytest.mark.parametrize("text", ["INTERNAL: out of memory", "RESOURCE_EXHAUSTED: quota of requests"])
def test_other_errors_stay_as_they_are(text):
    with pytest.raises(jax.errors.JaxRuntimeError), out_of_memory_explained(Plan(batch_size=8), "the run"):
        raise jax.errors.JaxRuntimeError(text)


def step(rows):
    return rows @ rows.T


def test_a_gpu_says_how_much_and_its_step_names_the_arrays():
    """Without a state at hand, and only if it is the step that fails."""
    plan = Plan(batch_size=8)
    program = jax.jit(step).lower(jax.ShapeDtypeStruct((512, 256), jnp.float32)).compile()
    line = "the run does not fit into the memory of a device (RESOURCE_EXHAUSTED: Out of memory while trying to allocate 26.06GiB "
    line += "with allocator GPU_0_bfc on device 0. [executable_name='jit_step']); the largest buffers: "
    text = explained(OF_GPU, plan, "the run", program=program)
    assert text.startswith(f"{line}1.0 MiB f32[512,512] of jit(step)/") and "\n" not in text
    other = explained(OF_GPU.replace("jit_step", "jit_eval"), plan, "the run", {"table": np.ones((2, 2))}, program)
    assert "512,512" not in other and "0.0 MiB table" in other
    assert "0.0 MiB table" in explained(OF_GPU, plan, "the run", {"table": np.ones((2, 2))}, lambda: None)


@pytest.mark.parametrize("message", OF_GPU_COMPILERS)
def test_a_gpus_compiler_says_how_much_it_could_not_have(message):
    with pytest.raises(UserError) as caught, out_of_memory_explained(Plan(batch_size=8), "the train step", {}):
        raise jax.errors.JaxRuntimeError(message)
    figures = "Out of memory while trying to allocate 4.02GiB with allocator GPU_0_bfc on device 0"
    assert str(caught.value).startswith(
        f"the train step does not fit into the memory of a device (RESOURCE_EXHAUSTED: {figures}): set Plan.remat"
    )


def test_buffers_that_a_gpu_lists_are_named():
    text = explained(LISTED_OF_GPU, Plan(batch_size=8), "the run", {})
    assert "allocate 2110783616 bytes)" in text
    assert ": 4.89GiB f32[5104,257152] of jit(step)/logits, 1.96GiB f32[2048,257152] of an argument: set" in text
