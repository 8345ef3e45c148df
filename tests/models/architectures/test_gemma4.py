"""Gemma 4: its cache, packed rows, adapters, smaller copies, and what it refuses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.models import api
from capibara.models.api import Gemma4Config, Lora, Moe, Rope

CONFIG = Gemma4Config(
    vocab_size=96,
    embed_dim=32,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    global_head_dim=16,
    mlp_dim=48,
    mlp_dims=(24, 24, 24, 48, 48),
    layer_pattern=("local", "global", "local", "local", "global"),
    window=6,
    rope=Rope(theta=500.0, local_theta=100.0, fraction=0.5, scaling="proportional"),
    per_layer_dim=8,
    per_layer_vocab_size=90,
    kv_shared_layers=2,
    dtype="float32",
)
KEYS = dataclasses.replace(
    CONFIG, global_values="keys", global_kv_heads=1, kv_shared_layers=0, per_layer_dim=0, mlp_dims=None
)
EXPERTS = dataclasses.replace(
    CONFIG, mlp_dims=None, moe=Moe(num_experts=4, top_k=2, expert_dim=24, shared_experts=1, shared_dim=40)
)
CONFIGS = [CONFIG, KEYS, EXPERTS]


@functools.cache
def model_and_params(config):
    model = api.build(config)
    return model, jax.jit(model.init)(jax.random.key(0))


@functools.cache
def logits_of(config):
    return jax.jit(api.build(config).logits)


def batch_of(rows=2, length=24, seed=0):
    tokens = np.random.default_rng(seed).integers(0, 96, (rows, length)).astype(np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    return {"tokens": tokens, "positions": positions, "segment_ids": np.ones_like(tokens)}


@pytest.mark.parametrize("config", CONFIGS)
def test_layers_run_one_by_one_or_by_a_scan_alike(config):
    _, params = model_and_params(config)
    unrolled = dataclasses.replace(config, layer_loop="unroll")
    got, want = (logits_of(of)(params, batch_of()) for of in (config, unrolled))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("config", CONFIGS)
def test_the_cache_gives_what_whole_rows_give(config):
    model, params = model_and_params(config)
    batch = batch_of()
    want = logits_of(config)(params, batch)
    served, cache, at, got = model.serving(params), model.start_cache(2, 24), 9, []
    assert len(cache["layers"]) == config.kv_layers
    piece = {"tokens": batch["tokens"][:, :9], "counts": np.full(2, 9, np.int32)}
    logits, cache = jax.jit(model.prefill)(served, piece, cache)
    got.append(logits[:, None])
    for size in (14, 1):
        piece = {"tokens": batch["tokens"][:, at : at + size], "counts": np.full(2, size, np.int32)}
        logits, _, cache = jax.jit(model.extend)(served, piece, cache)
        got.append(logits)
        at += size
    np.testing.assert_allclose(jnp.concatenate(got, axis=1), want[:, 8:], rtol=0, atol=2e-5)


@pytest.mark.parametrize("config", CONFIGS)
def test_documents_do_not_see_each_other(config):
    _, params = model_and_params(config)
    both, second = batch_of(rows=1), batch_of(rows=1)
    alone = {name: value[:, :12] for name, value in both.items()}
    second = {"tokens": second["tokens"][:, 12:]} | {n: second[n][:, :12] for n in ("positions", "segment_ids")}
    both["segment_ids"] = np.where(np.arange(24) < 12, 1, 2)[None].astype(np.int32)
    both["positions"] = (np.arange(24) % 12)[None].astype(np.int32)
    got = logits_of(config)(params, both)
    np.testing.assert_allclose(got[:, :12], logits_of(config)(params, alone), rtol=0, atol=1e-5)
    np.testing.assert_allclose(got[:, 12:], logits_of(config)(params, second), rtol=0, atol=1e-5)


def test_prompts_that_are_read_together_do_not_see_each_other():
    config = dataclasses.replace(CONFIG, window=24)  # all layers have pages
    model, params = model_and_params(config)
    batch, size = batch_of(rows=1), api.paged.Sizes(pages=3, page_size=8)
    cache = api.paged.empty(jax.eval_shape(lambda: model.start_cache(1, 24)), 24, size)
    table = np.where(np.arange(20)[:, None] < 8, [[1, 0]], [[2, 3]]).astype(np.int32)
    documents = np.repeat([1, 2], [8, 12]).astype(np.int32)
    packed = api.Packed(documents, np.array([7, 19], np.int32), np.zeros(1, np.int32), table[:1])
    read = {"tokens": batch["tokens"][0, :20, None], "counts": np.ones(20, np.int32), "packed": packed}
    positions = np.concatenate([np.arange(8), np.arange(12)]).astype(np.int32)
    rows = api.paged.with_table(cache | {"lengths": jnp.asarray(positions)}, table)
    got, _ = jax.jit(model.resume)(model.serving(params), read, rows)
    segments, after = np.repeat([1, 2, 0], [8, 12, 4])[None].astype(np.int32), np.arange(4, dtype=np.int32)
    batch |= {"segment_ids": segments, "positions": np.concatenate([positions, after])[None]}
    want = logits_of(config)(params, batch)
    np.testing.assert_allclose(got, want[0, packed.ends], rtol=0, atol=2e-5)


def test_adapters_are_of_both_kinds_of_attention():
    config = dataclasses.replace(CONFIG, lora=Lora(rank=2, targets=("key", "query", "input_gate")))
    model, params = model_and_params(config)
    layers = params["layers"]
    assert [layers[name]["key_lora"]["a"].shape[0] for name in ("attention", "global_attention")] == [2, 1]
    before = logits_of(config)(params, batch_of())
    for owner, name in (("global_attention", "key"), ("attention", "query"), ("per_layer", "input_gate")):
        layers[owner][f"{name}_lora"]["b"] += 0.02
    changed = logits_of(config)(params, batch_of())
    assert np.abs(changed - before).max() > 1e-3
    merged = jax.jit(model.plain.logits)(model.merge(params), batch_of())
    np.testing.assert_allclose(merged, changed, rtol=0, atol=2e-5)


def test_layers_count_flops_by_their_heads():
    wider = dataclasses.replace(KEYS, global_head_dim=None, global_kv_heads=2)
    assert set(KEYS.attended_sizes) == {96, 128} and set(wider.attended_sizes) == {96}
    assert KEYS.cached_head_counts == (2, 1)


def test_adapters_are_of_experts_and_of_the_mlp_beside_them():
    config = dataclasses.replace(EXPERTS, lora=Lora(rank=2, targets=("up", "shared_down")))
    model, params = model_and_params(config)
    before = logits_of(config)(params, batch_of())
    for name in config.lora.targets:
        params["layers"]["mlp"][f"{name}_lora"]["b"] += 0.05
    changed = logits_of(config)(params, batch_of())
    assert np.abs(changed - before).max() > 1e-4
    merged = jax.jit(model.plain.logits)(model.merge(params), batch_of())
    np.testing.assert_allclose(merged, changed, rtol=0, atol=2e-5)


def test_all_layers_say_how_evenly_their_experts_are_used():
    model, params = model_and_params(EXPERTS)
    _, stats = jax.jit(model.hidden)(params, batch_of())
    assert stats["load"].shape == (5, 4) and np.all(np.sum(stats["load"], axis=1) == 2 * 2 * 24)


def test_a_smaller_copy_keeps_shared_keys_where_layers_remain():
    values = {"num_layers": 5, "embed_dim": 16}
    small = dataclasses.replace(CONFIG, **values | CONFIG.emulated(values, 0.5))
    assert (small.kv_shared_layers, small.global_head_dim, small.mlp_dims) == (0, 8, None)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(global_head_dim=0), "Gemma4Config.global_head_dim is 0"),
        (dict(global_kv_heads=3), "num_kv_heads (3) must divide num_heads (4)"),
        (dict(per_layer_dim=-1), "per_layer_dim is -1"),
        (dict(kv_shared_layers=4), "leaves no global layer"),
        (dict(moe=Moe(num_experts=4), mlp_dims=None), "Moe.shared_experts is 0, Gemma 4 has 1 alone"),
        (dict(moe=Moe(num_experts=4, shared_experts=1, scale=2.0), mlp_dims=None), "Moe.scale is 2.0"),
        (dict(moe=Moe(num_experts=4, shared_experts=1)), "Gemma4Config.mlp_dims is set"),
        (dict(norm_placement="pre"), "norm_placement is 'pre', Gemma 4 has 'sandwich' alone"),
    ],
)
def test_what_it_does_not_have_is_refused_by_name(fields, said):
    with pytest.raises(UserError) as caught:
        dataclasses.replace(CONFIG, **fields)
    assert said in str(caught.value)
