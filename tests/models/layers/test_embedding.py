"""An embedding lookup on a mesh returns the table's rows, and passes gradients only to them."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import sharding
from capibara.models import api
from capibara.models.api import DecoderConfig
from capibara.models.layers import embedding
from capibara.sharding import Plan

ROWS, LENGTH, VOCAB, EMBED = 16, 8, 32, 16
MESHES = [
    dict(fsdp=8),
    dict(data=2, fsdp=4),
    dict(fsdp=2, tensor=4),
    dict(fsdp=2, context=2, tensor=2),
    dict(data=2, expert=2, fsdp=1, tensor=2),
]


@pytest.mark.parametrize("most", [64 * 2**20, 64], ids=["whole", "blocks"])
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "_".join(mesh))
def test_as_on_one_device(mesh, most, monkeypatch):
    monkeypatch.setattr(embedding, "EXCHANGED_BYTES", most)
    plan = Plan(batch_size=ROWS, **mesh)
    mesh = sharding.make_mesh(plan, jax.devices()[:8])
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(VOCAB, EMBED)), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, VOCAB, (ROWS, LENGTH)), jnp.int32)
    weights = jnp.asarray(rng.normal(size=(ROWS, LENGTH, EMBED)), jnp.float32)

    def on_mesh(table, tokens):
        with sharding.activate(mesh, plan.rules):
            x = embedding.lookup(table, tokens, jnp.float32)
            x = sharding.constrain(x, ("batch", "act_residual", "act_embed"))
            return jnp.sum(x * weights), x

    shardings = sharding.shardings(mesh, plan.rules, ("vocab", "embed"), jax.eval_shape(lambda: table))
    (_, x), gradient = jax.jit(jax.value_and_grad(on_mesh, has_aux=True))(jax.device_put(table, shardings), tokens)
    np.testing.assert_array_equal(x, table[tokens])
    want = jax.grad(lambda table: jnp.sum(table[tokens] * weights))(table)
    np.testing.assert_allclose(gradient, want, rtol=1e-6, atol=1e-6)


def test_nothing_as_large_as_the_result_is_kept_for_the_backward_pass():
    plan = Plan(batch_size=ROWS, fsdp=4, tensor=2)
    mesh = sharding.make_mesh(plan, jax.devices()[:8])

    def looked_up(table, tokens):
        with sharding.activate(mesh, plan.rules):
            return embedding.lookup(table, tokens, jnp.float32)

    tokens = jnp.zeros((ROWS, LENGTH), jnp.int32)
    back = jax.eval_shape(lambda table: jax.vjp(lambda t: looked_up(t, tokens), table)[1], jnp.zeros((VOCAB, EMBED)))
    assert max(leaf.size for leaf in jax.tree.leaves(back)) < ROWS * LENGTH * EMBED


@pytest.mark.parametrize("mesh", [None, dict(fsdp=2, tensor=2)], ids=["one device", "mesh"])
@pytest.mark.parametrize("head", ["tied", "separate"])
def test_further_columns_of_a_served_table_change_no_logits(head, mesh, monkeypatch):
    """As on TPU, where rows of a multiple of 128 are stored one after the other."""
    config = DecoderConfig(vocab_size=64, embed_dim=48, num_layers=1, num_heads=2, mlp_dim=32, head=head)
    model, plan = api.build(config), Plan(batch_size=2, **mesh or {})
    params = model.init(jax.random.key(0))
    batch = {"tokens": jnp.arange(8, dtype=jnp.int32).reshape(2, 4), "counts": jnp.full(2, 4, jnp.int32)}
    active = sharding.make_mesh(plan, jax.devices()[:4]) if mesh else None

    def logits(params, batch):
        with sharding.activate(active, plan.rules) if mesh else contextlib.nullcontext():
            with monkeypatch.context() as patch:
                patch.setattr(sharding, "platform", lambda: platform)
                served = model.serving(params)
            assert served["embedding"].shape[1] == columns
            return model.prefill(served, batch, model.start_cache(2, 4, dtype=jnp.float32))[0]

    platform, columns = "cpu", 48
    want = jax.jit(lambda *args: logits(*args))(params, batch)
    platform, columns = "tpu", 256 if mesh else 128
    np.testing.assert_allclose(jax.jit(lambda *args: logits(*args))(params, batch), want, rtol=1e-5, atol=1e-5)
