"""DeepSeek-V4: entries of documents, states of the engine, streams, tables of experts, and what is refused."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.core import tree
from capibara.core.types import UserError
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.sampling.sampling import BeamSearch, Sampling
from capibara.models import api
from capibara.models.api import DecoderConfig, DeepseekV4Config, Indexer, Lora, Moe, Rope
from capibara.models.architectures.deepseek_v4 import attention as entry_attention
from capibara.models.architectures.deepseek_v4 import streams
from capibara.sharding import Plan

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from mesh_gradients import on_mesh, random_params  # noqa: E402

CONFIG = DeepseekV4Config(
    vocab_size=384,
    embed_dim=32,
    num_layers=3,
    num_heads=4,
    head_dim=16,
    mlp_dim=24,
    dtype="float32",
    first_kinds=("local",),
    layer_pattern=("compressed", "compressed_sparse"),
    window=7,
    rate=8,
    sparse_rate=2,
    # As many heads as leave no two entries with the score 0.
    indexer=Indexer(heads=16, head_dim=12, top=3, pairs="adjacent"),
    query_rank=12,
    out_groups=2,
    out_rank=6,
    streams=3,
    rope=Rope(theta=500.0, local_theta=100.0, fraction=0.5, pairs="adjacent"),
    moe=Moe(
        num_experts=8, top_k=2, hash_layers=1, score="sqrt_softplus", correction="expert", shared_experts=1, scale=1.5
    ),
)
UNTRAINED = ("expert_table", "/indexer/")
GREEDY = Sampling(temperature=0.0, max_new_tokens=8)


def drawn(model):
    """Random parameters, whose tables have numbers of experts."""
    params = random_params(model)

    def of(name, x):
        if not name.endswith("expert_table"):
            return x
        return jnp.asarray(np.random.default_rng(0).integers(0, 8, x.shape), jnp.float32)

    return tree.map_with_names(of, params)


def row(tokens, segments):
    segments = np.asarray(segments, np.int32)
    positions = np.concatenate([np.arange(np.sum(segments == s)) for s in dict.fromkeys(segments.tolist())])
    return {"tokens": tokens[None], "segment_ids": segments[None], "positions": positions[None].astype(np.int32)}


def tokens_of(count):
    return np.random.default_rng(0).integers(3, 300, count).astype(np.int32)


def whole(model, params, tokens):
    return np.asarray(jax.jit(model.logits)(params, row(tokens, np.ones(len(tokens)))))[0]


@pytest.mark.parametrize("chunks", [(1,) * 40, (5, 1, 30, 4), (24, 16)], ids=["tokens", "parts", "halves"])
def test_a_state_gives_what_the_whole_row_gives(chunks):
    model = api.build(CONFIG)
    params, tokens = drawn(model), tokens_of(40)
    cache, at, got = model.start_cache(1, 48), 0, []
    read = jax.jit(model.read, static_argnums=3)
    serving = model.serving(params)
    for number, count in enumerate(chunks):
        # Padding behind the tokens changes nothing.
        padded = np.pad(tokens[None, at : at + count], ((0, 0), (0, 0 if count == 1 else 3)))
        batch = {"tokens": padded, "counts": np.array([count], np.int32)}
        hidden, cache = read(serving, batch, cache, number == 0)
        got.append(np.asarray(model.logits_of(params, hidden))[0, :count])
        at += count
    want = whole(model, params, tokens)
    np.testing.assert_allclose(np.concatenate(got), want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("loop", ["scan", pytest.param("unroll", marks=pytest.mark.heavy)])
def test_documents_of_a_row_see_no_entries_of_each_other(loop, monkeypatch):
    monkeypatch.setattr(entry_attention, "_LEAST_BLOCK", 16)  # so that blocks end within documents
    model = api.build(dataclasses.replace(CONFIG, layer_loop=loop))
    params, tokens = drawn(model), tokens_of(90)
    parts = [slice(0, 21), slice(21, 22), slice(22, 81)]  # the rest is padding
    segments = np.concatenate([np.full(part.stop - part.start, i + 1) for i, part in enumerate(parts)] + [np.zeros(9)])
    weights = jax.random.normal(jax.random.key(1), (90, CONFIG.vocab_size))

    def loss(trained, tokens, segments, weights):
        logits = model.logits(tree.joined(trained, model.frozen(params)), row(tokens, segments))[0]
        return jnp.sum(logits * weights), logits

    grad = jax.jit(jax.value_and_grad(loss, has_aux=True))
    trained = model.trained(params)
    (_, packed), of_packed = grad(trained, tokens, segments, jnp.where((segments > 0)[:, None], weights, 0.0))
    total = jax.tree.map(jnp.zeros_like, of_packed)
    for part in parts:
        (_, alone), of_alone = grad(trained, tokens[part], np.ones(part.stop - part.start), weights[part])
        np.testing.assert_allclose(packed[part], alone, rtol=0, atol=1e-5 * np.abs(alone).max())
        total = jax.tree.map(jnp.add, total, of_alone)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(total))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * largest), of_packed, total)
