"""What a pipeline holds on each device; that its numbers are those of one device is tests/training/test_parallelism.py."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from capibara import sharding
from capibara.models import api
from capibara.planner.hardware import topology
from capibara.sharding import Plan

PARTS, LENGTH, EMBED = 8, 128, 128


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.heavy
def test_the_tpu_compiler_gathers_no_rows():
    rows, fsdp = 32, 2
    plan = Plan(batch_size=rows, stage=2, fsdp=fsdp, pipeline_microbatches=PARTS)
    mesh = sharding.make_mesh(plan, topology.slice_devices("v5e-4"))
    model = api.build(
        api.DecoderConfig(vocab_size=128, embed_dim=EMBED, num_layers=4, num_heads=1, mlp_dim=128, dtype="bfloat16")
    )
    shardings = sharding.shardings(mesh, plan.rules, model.axes, model.abstract_params)
    shape = lambda p, s: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=s)  # noqa: E731
    params = jax.tree.map(shape, model.abstract_params, shardings)
    tokens = jax.ShapeDtypeStruct((rows, LENGTH), jnp.int32, sharding=sharding.batch_sharding(mesh, plan.rules))

    def loss(params, batch):
        with sharding.activate(mesh, plan.rules, plan.pipeline(mesh)):
            return jnp.sum(model.hidden(params, batch, plan.remat_policy)[0].astype(jnp.float32))

    batch = dict.fromkeys(("tokens", "segment_ids", "positions"), tokens)
    text = jax.jit(jax.grad(loss), out_shardings=shardings).lower(params, batch).compile().as_text()
    own, of_all = (f"bf16[{PARTS},{rows // PARTS // devices},{LENGTH},{EMBED}]" for devices in (fsdp, 1))
    assert own in text
    assert of_all not in text, "the rows of all devices are gathered on each"
