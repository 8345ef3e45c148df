"""Attention to entries for windows of tokens, one layer of it: documents, blocks of queries, and steps of slots."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from capibara.models import api
from capibara.models.api import DeepseekV4Config, Indexer, Moe, Rope
from capibara.models.architectures.deepseek_v4 import attention as entry_attention
from capibara.models.architectures.deepseek_v4.attention import EntryAttention
from capibara.models.cache.dense import PrefillInputs
from capibara.models.layers import rope
from capibara.models.parts.kinds import LayerKind
from capibara.models.parts.router import Score

KINDS = (LayerKind.COMPRESSED, LayerKind.COMPRESSED_SPARSE)
CONFIG = DeepseekV4Config(
    vocab_size=16,
    embed_dim=8,
    num_layers=2,
    num_heads=2,
    head_dim=8,
    mlp_dim=8,
    dtype="float32",
    layer_pattern=KINDS,
    window=5,
    rate=6,
    sparse_rate=3,
    # As many heads as leave no two entries with the score 0.
    indexer=Indexer(heads=16, head_dim=4, top=3, pairs="adjacent"),
    query_rank=6,
    out_groups=2,
    out_rank=4,
    streams=2,
    rope=Rope(theta=500.0, fraction=0.5, pairs="adjacent"),
    moe=Moe(num_experts=4, score="sqrt_softplus"),
)
LENGTH = 48
X = jax.random.normal(jax.random.key(1), (2, LENGTH, 8))


@pytest.fixture(scope="module", params=KINDS, ids=str)
def layer(request):
    module = EntryAttention(CONFIG, request.param, nnx.Rngs(0))
    graph, params = nnx.split(module)
    draw = np.random.default_rng(0)
    return nnx.merge(graph, jax.tree.map(lambda x: x + 0.5 * draw.standard_normal(x.shape, np.float32), params))


def angles(positions):
    return rope.angles(positions, CONFIG.rope, CONFIG.head_size)


def rows(layer, x, segments):
    positions = np.stack(
        [np.concatenate([np.arange(np.sum(row == s)) for s in dict.fromkeys(row)]) for row in segments]
    )
    return np.asarray(jax.jit(lambda x, s, p: layer(x, s, angles(p)))(x, segments, positions.astype(np.int32)))


def close(result, expected):
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_documents_and_blocks_change_nothing(layer, monkeypatch):
    monkeypatch.setattr(entry_attention, "_LEAST_BLOCK", 16)  # so that blocks end within documents
    parts = [slice(0, 7), slice(7, 8), slice(8, 43)]  # the rest is padding
    packed, alone = np.zeros((1, LENGTH), np.int32), np.zeros((3, LENGTH), np.int32)
    x_alone = jnp.zeros((3, LENGTH, 8))
    for i, part in enumerate(parts):
        packed[0, part], alone[i, : part.stop - part.start] = i + 1, 1
        x_alone = x_alone.at[i, : part.stop - part.start].set(X[0, part])
    result = rows(layer, X[:1], packed)[0]
    monkeypatch.setattr(entry_attention, "_LEAST_BLOCK", 128)
    expected = rows(layer, x_alone, alone)
    for i, part in enumerate(parts):
        close(result[part], expected[i, : part.stop - part.start])


def test_slots_of_other_lengths_give_what_whole_rows_give(layer):
    """The second row waits in every other step, as a slot does whose request was cancelled or is being read."""

    def step(carry, number):
        state, lengths = carry
        now = PrefillInputs(lengths, jnp.array([1, 0]) + jnp.array([0, 1]) * (number % 2), lengths[:, None], False)
        x = jnp.take_along_axis(X, jnp.minimum(lengths, LENGTH - 1)[:, None, None], axis=1)
        y, state = layer.cached(x, state, now, angles(now.positions))
        return (state, lengths + now.counts), y[:, 0]

    start = (layer.empty_state(2, LENGTH, jnp.float32), jnp.zeros(2, jnp.int32))
    (_, lengths), y = jax.jit(lambda start: jax.lax.scan(step, start, jnp.arange(LENGTH)))(start)
    assert lengths.tolist() == [LENGTH, LENGTH // 2]
    expected = rows(layer, X, np.ones((2, LENGTH), np.int32))
    close(y[:, 0], expected[0])
    close(y[1::2, 1], expected[1, : LENGTH // 2])


def test_slots_of_8_bits_have_states_of_the_compute_dtype():
    model = api.build(CONFIG)
    for dtype in (jnp.int8, jnp.bfloat16):
        cache = jax.eval_shape(lambda dtype=dtype: model.start_cache(2, LENGTH, dtype))
        kinds = {leaf.dtype for leaf in jax.tree.leaves(cache["layers"])}
        assert kinds == {jnp.dtype(jnp.float32 if dtype == jnp.int8 else dtype)}


def test_scores_of_any_logit_have_logarithms_and_gradients():
    logits = np.array([-300.0, -60.0, -20.5, -19.5, -3.0, 0.0, 4.0, 90.0], np.float32)
    logs = Score.SQRT_SOFTPLUS.logs(jnp.asarray(logits))
    exact = logits.astype(np.float64)
    softplus = np.log1p(np.exp(exact))  # in float64 above 0 for all of them
    np.testing.assert_allclose(logs, 0.5 * np.log(softplus), rtol=1e-6)
    slopes = jax.vmap(jax.grad(Score.SQRT_SOFTPLUS.logs))(jnp.asarray(logits))
    np.testing.assert_allclose(slopes, 0.5 / (1 + np.exp(-exact)) / softplus, rtol=1e-5)
