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
from capibara.training.callbacks import Callback
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


def test_a_real_error_becomes_one_line_with_what_to_change():
    kept = jnp.ones((333, 777))
    with pytest.raises(UserError) as caught, out_of_memory_explained(Plan(batch_size=8), "the run"):
        jax.jit(lambda: jnp.ones((1 << 20, 1 << 17)))().block_until_ready()
    text = str(caught.value)
    assert (
        "\n" not in text
        and "549755813888" in text
        and 'Plan.remat = "full"' in text
        and "Plan.accumulation = 2" in text
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


@pytest.mark.parametrize("text", ["INTERNAL: out of memory", "RESOURCE_EXHAUSTED: quota of requests"])
def test_other_errors_stay_as_they_are(text):
    with pytest.raises(jax.errors.JaxRuntimeError), out_of_memory_explained(Plan(batch_size=8), "the run"):
        raise jax.errors.JaxRuntimeError(text)
