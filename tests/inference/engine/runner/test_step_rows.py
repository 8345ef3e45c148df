"""Decode programs of few rows give the texts of programs of all slots, whatever the cache and the sampling."""

from __future__ import annotations

import dataclasses
import functools
import types

import jax
import numpy as np
import pytest

from capibara import sharding
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.engine.runner import decode, step_rows
from capibara.inference.sampling.grammar import Grammar
from capibara.inference.sampling.sampling import Sampling
from capibara.models import api
from capibara.models.api import (
    DecoderConfig,
    EncoderDecoderConfig,
    GatedDelta,
    Indexer,
    LatentAttention,
    Lora,
    Mamba2,
    StreamingHeads,
)
from capibara.sharding import Plan

VOCABULARY, SLOTS, LENGTH = ByteVocabulary(), 8, 512
SIZES = dict(vocab_size=384, embed_dim=32, num_heads=4, mlp_dim=64, dtype="float32")
LATENT = LatentAttention(
    kv_rank=12, query_rank=20, rotary_dim=8, value_dim=10, indexer=Indexer(heads=16, head_dim=12, top=5)
)
STREAMING = StreamingHeads(heads=((0, 2), (0, 1, 2, 3)), sink_tokens=2, recent_window=6)
MIXER = GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=8)
SCAN = Mamba2(heads=4, head_dim=8, state_dim=8, groups=2, norm="none")
# Rows of 512 positions are read in blocks, those of 64 and those of a window are not.
CASES = {
    "rows": (DecoderConfig(**SIZES, num_layers=2), {}, LENGTH),
    "short": (DecoderConfig(**SIZES, num_layers=2, num_kv_heads=2), {}, 64),
    "int8": (DecoderConfig(**SIZES, num_layers=2), dict(cache_dtype="int8"), LENGTH),
    "pages": (DecoderConfig(**SIZES, num_layers=2), dict(page_size=16, pages=80), LENGTH),
    "window": (DecoderConfig(**SIZES, num_layers=2, layer_pattern=("local", "global"), window=8), {}, 64),
    "recurrent": (DecoderConfig(**SIZES, num_layers=2, layer_pattern=("recurrent", "global"), mixer=MIXER), {}, 64),
    # A layer with keys in pages and a state.
    "hybrid in pages": (
        DecoderConfig(**SIZES, num_layers=2, layer_pattern=("hybrid",), mixer=SCAN),
        dict(page_size=16),
        64,
    ),
    "streaming": (DecoderConfig(**SIZES, num_layers=2, streaming=STREAMING), {}, LENGTH),
    "streaming in pages": (DecoderConfig(**SIZES, num_layers=2, streaming=STREAMING), dict(page_size=16), LENGTH),
    "guesses in rings": (DecoderConfig(**SIZES, num_layers=2, streaming=STREAMING), dict(draft_tokens=3), 64),
    "latent": (DecoderConfig(**SIZES, num_layers=1, head_dim=14, latent=LATENT), {}, 64),
    "guesses": (DecoderConfig(**SIZES, num_layers=2), dict(draft_tokens=3), 64),
    "guesses in pages": (DecoderConfig(**SIZES, num_layers=2), dict(draft_tokens=3, page_size=16), 64),
    "encoder": (EncoderDecoderConfig(**SIZES, num_layers=2), {}, 64),
}
DRAWN = Sampling(temperature=1.1, max_new_tokens=12, seed=2)
REQUESTS = [
    ("def f", dataclasses.replace(DRAWN, seed=3, max_new_tokens=24)),
    ("ab ab ab ab ab", Sampling(temperature=0.0, max_new_tokens=17)),
    ("x", dataclasses.replace(DRAWN, top_k=9, seed=4, max_new_tokens=3)),
    ("q", dataclasses.replace(DRAWN, grammar=Grammar(regex=r"[a-f]{3}-\d{4}x"), seed=8)),
    ("a longer prompt, of many words", dataclasses.replace(DRAWN, repetition_penalty=1.5, seed=5)),
    ("import numpy", dataclasses.replace(DRAWN, logit_bias={97: 4.0, 98: 3.0}, presence_penalty=1.0, seed=6)),
    ("class A", dataclasses.replace(DRAWN, min_new_tokens=9, seed=7)),
]


@functools.cache
def params(config):
    model = api.build(config)
    # Large weights, so that one token is far likelier than the others and texts do not agree by chance.
    return jax.tree.map(lambda x: x * 3, jax.jit(model.init)(jax.random.key(1)))


def engine(case, prefix_cache_mib=0, **options):
    config, batching, length = CASES[case]
    model = api.build(config)
    batching = EngineConfig(slots=SLOTS, prefix_cache_mib=prefix_cache_mib, **batching)
    encoder_length = 32 if case == "encoder" else None
    return Engine(model, params(model.config), VOCABULARY, length, batching, encoder_length, **options)


@pytest.fixture
def two_sizes(monkeypatch):
    """Programs of 1 and of 4 rows, since each takes time to compile."""
    monkeypatch.setattr(step_rows, "sizes_of", lambda slots: [1, 4])


def compile_few(one):
    for size in step_rows.sizes_of(SLOTS):
        decode.compile_step(one.core.runner, one.core.params.current, size, 0)


@pytest.mark.parametrize("case", CASES)
def test_texts_are_those_of_all_slots(case, two_sizes, monkeypatch):
    few, every, counts = engine(case), engine(case), []
    compile_few(few)

    def recorded(*args):
        rows = step_rows.rows_of(*args)
        counts.append(rows.size)
        return rows

    monkeypatch.setattr(decode, "rows_of", recorded)
    for first, then in ((REQUESTS[0], REQUESTS[1:4]), (REQUESTS[1], REQUESTS[2:])):
        texts = []
        for one in (few, every):
            streams = [one.submit(*first)]
            for _ in range(3):  # alone, and then with others in the slots after it
                one.step()
            streams += [one.submit(*request) for request in then]
            texts.append([stream.result() for stream in streams])
        for got, want in zip(*texts, strict=True):
            assert (got.text, got.tokens, got.finish) == (want.text, want.tokens, want.finish)
            each = ([piece.log_probability for piece in one.pieces] for one in (got, want))
            np.testing.assert_allclose(*each, rtol=1e-4, atol=1e-4)
    assert set(counts) >= {1, 4} and max(counts) <= SLOTS
    assert len({want.text for want in texts[1]}) == len(texts[1])


@pytest.mark.parametrize("case", ["rows", "pages"])
def test_rows_with_a_cached_prefix_are_those_of_all_slots(case, two_sizes):
    """A later prompt takes the slot's keys and values that a step of few rows has written; the last engine reads all of it."""
    prefix, texts = [65 + i % 23 for i in range(70)], []
    for few, cached in ((True, 16), (False, 16), (False, 0)):
        one = engine(case, prefix_cache_mib=cached)
        if few:
            compile_few(one)
        first = one.submit(prefix, DRAWN).result()
        again = [one.submit([*prefix, *first.tokens, end], DRAWN) for end in (66, 67)]
        completions = [stream.result() for stream in again]
        least = len(prefix) + DRAWN.max_new_tokens - 1 if cached else 0
        assert all(completion.cached_tokens >= least for completion in completions)
        texts.append([completion.tokens for completion in (first, *completions)])
    assert texts[0] == texts[1] == texts[2] and texts[0][1] != texts[0][2]


def test_adapters_are_those_of_the_slots(two_sizes):
    model = api.build(CASES["rows"][0])
    lora = Lora(rank=2, alpha=64.0)
    adapted = jax.jit(api.build(dataclasses.replace(model.config, lora=lora)).adapt)(
        params(model.config), jax.random.key(2)
    )
    adapted = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(jax.random.key(3), x.shape), adapted)
    trained = api.build(dataclasses.replace(model.config, lora=lora)).trained(adapted)
    adapters = [api.Adapter("poet", lora, trained)]
    few, every = engine("rows", adapters=adapters), engine("rows", adapters=adapters)
    compile_few(few)
    texts = []
    for one in (few, every):
        streams = [one.submit(*REQUESTS[1], adapter=name) for name in (None, "poet")]
        texts.append([stream.result().tokens for stream in streams])
    assert texts[0] == texts[1] and texts[0][0] != texts[0][1]


def test_the_fewest_compiled_rows_that_hold_the_active_slots():
    one, listed = types.SimpleNamespace(likeliest=0), types.SimpleNamespace(likeliest=3)
    active = [(5, one), (2, one), (7, one)]
    rows = step_rows.rows_of(active, 8, [1, 2, 4])
    assert rows.slots.tolist() == [5, 2, 7, 0] and rows.active == [(0, one), (1, one), (2, one)]
    np.testing.assert_array_equal(rows.of(np.arange(8) * 10), [50, 20, 70, 0])
    for sizes, count in (([1, 2], 8), ([], 8), ([1, 2, 4], 4)):
        whole = step_rows.rows_of(active, count, sizes)
        assert whole.slots is None and whole.active is active
    assert step_rows.rows_of([(5, listed)], 8, [1, 2, 4]).slots is None


@pytest.mark.parametrize("platform, sizes", [("cpu", [1, 2, 4]), ("tpu", []), ("gpu", [])])
def test_an_accelerator_computes_all_slots(platform, sizes, monkeypatch):
    monkeypatch.setattr(sharding, "platform", lambda: platform)
    assert step_rows.sizes_of(8) == sizes and step_rows.sizes_of(1) == []


def test_a_mesh_computes_all_slots():
    model = api.build(CASES["short"][0])
    mesh = sharding.make_mesh(Plan(batch_size=2, data=2), jax.devices()[:2])
    placed = jax.device_put(
        params(model.config), sharding.shardings(mesh, sharding.Rules(), model.axes, model.abstract_params)
    )
    one = Engine(model, placed, VOCABULARY, 64, EngineConfig(slots=4, prefix_cache_mib=0))
    one.warm_up()
    assert not one.core.runner.sizes
