"""DeepSeek sparse attention: documents of a row, cached keys, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.models import api
from capibara.models.api import DecoderConfig, Indexer, LatentAttention

LATENT = LatentAttention(
    kv_rank=12, query_rank=20, rotary_dim=8, value_dim=10, indexer=Indexer(heads=16, head_dim=12, top=5)
)
CONFIG = DecoderConfig(
    vocab_size=96, embed_dim=32, num_layers=2, num_heads=4, head_dim=14, mlp_dim=48, latent=LATENT, dtype="float32"
)


@functools.cache
def model_and_params(top):
    indexer = dataclasses.replace(LATENT.indexer, top=top)
    model = api.build(dataclasses.replace(CONFIG, latent=dataclasses.replace(LATENT, indexer=indexer)))
    keys = iter(jax.random.split(jax.random.key(0), 100))
    return model, jax.tree.map(lambda s: jax.random.normal(next(keys), s.shape) * 0.3, model.abstract_params)


def row(tokens, segments):
    positions = np.concatenate([np.arange(np.sum(segments == s)) for s in dict.fromkeys(segments.tolist())])
    batch = {"tokens": tokens, "segment_ids": segments, "positions": positions}
    return {name: x[None].astype(np.int32) for name, x in batch.items()}


def test_each_document_has_keys_of_its_own():
    model, params = model_and_params(5)
    tokens, segments = np.random.default_rng(0).integers(3, 96, 30), np.repeat([1, 2, 3], [14, 3, 13])
    logits = jax.jit(model.logits)
    packed = np.asarray(logits(params, row(tokens, segments)))[0]
    for part in (slice(0, 14), slice(14, 17), slice(17, 30)):
        alone = np.asarray(logits(params, row(tokens[part], np.ones_like(tokens[part]))))[0]
        np.testing.assert_allclose(packed[part], alone, rtol=0, atol=1e-5 * np.abs(alone).max())


def test_short_rows_are_dense_and_long_ones_are_not():
    batch = row(np.random.default_rng(0).integers(3, 96, 24), np.ones(24, int))
    few, many, all_keys = (np.asarray(jax.jit(m.logits)(p, batch))[0] for m, p in map(model_and_params, (5, 24, 99)))
    np.testing.assert_allclose(many, all_keys, rtol=0, atol=1e-6)
    np.testing.assert_allclose(few[:5], all_keys[:5], rtol=0, atol=1e-5)
    assert np.abs(few[5:] - all_keys[5:]).max() > 0.1


def test_the_cache_gives_what_whole_rows_give():
    model, params = model_and_params(5)
    batch = row(np.random.default_rng(0).integers(3, 96, 24), np.ones(24, int))
    want = np.asarray(jax.jit(model.logits)(params, batch))
    served, cache, at, got = model.serving(params), model.start_cache(1, 24, jnp.float32), 9, []
    piece = {"tokens": batch["tokens"][:, :9], "counts": np.full(1, 9, np.int32)}
    logits, cache = jax.jit(model.prefill)(served, piece, cache)
    got.append(logits[:, None])
    for size in (13, 1, 1):
        piece = {"tokens": batch["tokens"][:, at : at + size], "counts": np.full(1, size, np.int32)}
        logits, _, cache = jax.jit(model.extend)(served, piece, cache)
        got.append(logits)
        at += size
    np.testing.assert_allclose(jnp.concatenate(got, axis=1), want[:, 8:], rtol=0, atol=1e-5 * np.abs(want).max())


def test_nothing_trains_the_indexer():
    model, params = model_and_params(5)
    batch = row(np.random.default_rng(0).integers(3, 96, 12), np.ones(12, int))
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(model.logits(p, batch) ** 2)))(params)["layers"]["attention"]
    assert not any(np.any(x) for x in jax.tree.leaves(gradient["indexer"])) and np.any(gradient["query_up"])
    assert {f"layers/attention/indexer/{name}" for name in ("index_query", "norm/bias")} <= model.config.untrained


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Indexer(top=0), "Indexer.top is 0"),
        (lambda: dataclasses.replace(LATENT, query_rank=None), "query_rank is None"),
        (lambda: dataclasses.replace(LATENT, rotary_dim=14), "at least rotary_dim .14."),
        (lambda: dataclasses.replace(CONFIG, inputs_attention="bidirectional"), "indexer is for causal layers"),
        (lambda: dataclasses.replace(CONFIG, layer_pattern=("local",), window=4), "indexer is for causal layers"),
    ],
)
def test_what_does_not_fit_is_refused(make, said):
    with pytest.raises(UserError, match=said):
        make()
