"""Gemma 3n: its cache, its segments, narrow layers, and what it refuses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.models import api
from capibara.models.api import Gemma3nConfig, Lora, Rope
from capibara.models.architectures.shared_keys import parts
from capibara.sharding import Remat, RematPolicy

CONFIG = Gemma3nConfig(
    vocab_size=96,
    embed_dim=32,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_dim=48,
    layer_pattern=("local", "local", "local", "global"),
    window=6,
    logit_soft_cap=3.0,
    rope=Rope(theta=1e6, local_theta=10_000.0),
    streams=3,
    laurel_rank=6,
    per_layer_dim=8,
    per_layer_vocab_size=90,
    kv_shared_layers=4,
    activation_sparsity=(0.8,) * 2,
    dtype="float32",
)


def replaced(**fields):
    return dataclasses.replace(CONFIG, **fields)


@functools.cache
def model_and_params(config=CONFIG):
    """The same for all tests of a config. Parameters that all do something: scales of AltUp begin at zero, and a LoRA's `b`."""
    model = api.build(config)
    params = jax.jit(model.init)(jax.random.key(0))
    params["layers"]["altup"]["correct_scale"] += 0.5
    return model, params


@functools.cache
def jitted_logits(config):
    return jax.jit(api.build(config).logits)


def logits_of(model):
    return jitted_logits(model.config)


def batch_of(rows=2, length=24, seed=0):
    tokens = np.random.default_rng(seed).integers(0, 96, (rows, length)).astype(np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    return {"tokens": tokens, "positions": positions, "segment_ids": np.ones_like(tokens)}


@pytest.mark.parametrize(
    "sparse", [(0.5, 0.0, 0.8), *(pytest.param(x, marks=pytest.mark.heavy) for x in ((), (0.8,) * 2, (0.8,) * 3))]
)
def test_layers_run_one_by_one_or_by_a_scan_alike(sparse):
    model, params = model_and_params(replaced(activation_sparsity=sparse))
    unrolled = api.build(dataclasses.replace(model.config, layer_loop="unroll"))
    batch = batch_of()
    got, want = (logits_of(m)(params, batch) for m in (model, unrolled))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "pieces", [(9, 14, 1), *(pytest.param(x, marks=pytest.mark.heavy) for x in ((24,), (9, 8, 7), (5, *[1] * 19)))]
)
def test_the_cache_gives_what_whole_rows_give(pieces):
    model, params = model_and_params()
    batch = batch_of()
    want = logits_of(model)(params, batch)
    served, cache, at, got = model.serving(params), model.start_cache(2, 24), 0, []
    assert len(cache["layers"]) == CONFIG.kv_layers
    for size in pieces:
        piece = {"tokens": batch["tokens"][:, at : at + size], "counts": np.full(2, size, np.int32)}
        if at == 0:
            logits, cache = jax.jit(model.prefill)(served, piece, cache)
            got.append(logits[:, None])
        else:
            logits, _, cache = jax.jit(model.extend)(served, piece, cache)
            got.append(logits)
        at += size
    got = jnp.concatenate(got, axis=1)
    np.testing.assert_allclose(got, want[:, pieces[0] - 1 :], rtol=0, atol=2e-5)


def test_documents_do_not_see_each_other():
    model, params = model_and_params()
    batch = batch_of(rows=1)
    alone = {name: value[:, :12] for name, value in batch.items()}
    batch["segment_ids"] = np.where(np.arange(24) < 12, 1, 2)[None].astype(np.int32)
    batch["positions"] = (np.arange(24) % 12)[None].astype(np.int32)
    second = batch_of(rows=1)
    second = {"tokens": second["tokens"][:, 12:]} | {n: second[n][:, :12] for n in ("positions", "segment_ids")}
    got = logits_of(model)(params, batch)
    np.testing.assert_allclose(got[:, :12], logits_of(model)(params, alone), rtol=0, atol=1e-5)
    np.testing.assert_allclose(got[:, 12:], logits_of(model)(params, second), rtol=0, atol=1e-5)


@pytest.mark.heavy
def test_recomputation_changes_no_gradient():
    model, params = model_and_params()
    batch = batch_of()

    def loss(params, remat):
        hidden, _ = model.hidden(params, batch, remat, jnp.int32(0))
        return jnp.mean(jnp.square(model.logits_of(params, hidden)))

    plain = jax.jit(jax.grad(lambda p: loss(p, RematPolicy())))(params)
    again = jax.jit(jax.grad(lambda p: loss(p, RematPolicy(Remat.FULL))))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), plain, again)
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(plain)), "a parameter has no gradient"


@pytest.mark.heavy
def test_narrow_layers_are_those_of_their_width():
    """What fills the stack says nothing, gets no gradient, and counts as no units of the sparse layers."""
    widths = (48, 16, 48, 32, 32, 48, 16, 48)
    model, params = model_and_params(replaced(mlp_dims=widths))
    batch = batch_of(length=12)
    mlp = params["layers"]["mlp"]
    kept = (np.arange(48) < np.array(widths)[:, None]).astype(np.float32)
    of_units = {"up": kept[:, None], "gate": kept[:, None], "down": kept[..., None]}
    cut = params | {"layers": params["layers"] | {"mlp": {name: mlp[name] * of_units[name] for name in mlp}}}
    want = logits_of(model)(cut, batch)
    np.testing.assert_allclose(logits_of(model)(params, batch), want, rtol=0, atol=1e-6)
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(model.logits(p, batch) ** 2)))(params)["layers"]["mlp"]
    for name, there in of_units.items():
        assert np.any(gradient[name]) and not np.any(gradient[name] * (1 - there))
    gates = np.random.default_rng(0).normal(size=(2, 5, 16)).astype(np.float32)
    filled = jnp.pad(gates, [(0, 0), (0, 0), (0, 32)])
    np.testing.assert_allclose(parts.gate(0.8, 16, filled)[..., :16], parts.gate(0.8, None, gates), rtol=0, atol=1e-6)
    share = np.mean(
        np.asarray(parts.gate(0.8, None, np.asarray(jax.random.normal(jax.random.key(0), (1, 4, 4096))))) > 0
    )
    assert share == pytest.approx(0.2, abs=0.01)


def test_adapters_are_of_layers_that_have_the_weight():
    config = replaced(lora=Lora(rank=2, targets=("key", "query", "left", "input_gate")))
    model, params = model_and_params(config)
    attention = params["layers"]["attention"]
    assert attention["key_lora"]["a"].shape[0] == 4 and attention["query_lora"]["a"].shape[0] == 8
    logits = logits_of(model)(params, batch_of())
    np.testing.assert_allclose(logits, jax.jit(model.plain.logits)(model.base(params), batch_of()), rtol=0, atol=1e-6)
    for owner, name in (("attention", "key"), ("laurel", "left"), ("per_layer", "input_gate")):
        params["layers"][owner][f"{name}_lora"]["b"] += 0.3
    changed = logits_of(model)(params, batch_of())
    assert np.abs(changed - logits).max() > 1e-3
    merged = jax.jit(model.plain.logits)(model.merge(params), batch_of())
    np.testing.assert_allclose(merged, changed, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(kv_shared_layers=8), "kv_shared_layers (8) must be at least 0 and below num_layers (8)"),
        (dict(kv_shared_layers=5), "leaves no global layer"),
        (dict(dropout_rate=0.1), "dropout_rate is '0.1'"),
        (dict(norm_placement="pre"), "norm_placement is 'pre'"),
        (dict(mlp_dims=(48,) * 7), "mlp_dims has 7 widths"),
        (dict(mlp_dims=(32,) * 8), "the largest mlp_dim (48)"),
        (dict(activation_sparsity=(1.0,)), "activation_sparsity has 1.0"),
        (dict(streams=0), "streams is 0"),
        (dict(coefficient_clip=0.0), "coefficient_clip is 0.0"),
    ],
)
def test_what_it_does_not_have_is_refused_by_name(fields, said):
    with pytest.raises(UserError) as caught:
        replaced(**fields)
    assert said in str(caught.value)
