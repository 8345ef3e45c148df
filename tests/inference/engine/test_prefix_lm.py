"""A prefix LM reads a prompt in both directions and generates what forward passes over the whole text predict."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.evaluation.scoring import Pair, Scorer
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.sampling.sampling import BeamSearch, Sampling
from capibara.models import api
from capibara.models.api import DecoderConfig

SIZES = dict(vocab_size=384, embed_dim=32, num_layers=2, num_heads=2, mlp_dim=64, dtype="float32")
BOTH_WAYS = dict(SIZES, inputs_attention="bidirectional")
MODELS = {
    "rope": api.build(DecoderConfig(**BOTH_WAYS)),
    "relative": api.build(DecoderConfig(**BOTH_WAYS, positions="relative")),
    "windows": api.build(DecoderConfig(**BOTH_WAYS, layer_pattern=("local", "global"), window=12)),
}
VOCABULARY, LENGTH = ByteVocabulary(), 96
GREEDY = Sampling(temperature=0.0, max_new_tokens=8)
SHARED = "a beginning that two prompts share, "
PROMPTS = [SHARED + "one", "short", SHARED + "and another, which is much longer"]


def params_of(model):
    return jax.tree.map(lambda x: x * 3, jax.jit(model.init)(jax.random.key(1)))


def written(model, params, prompt, count):
    """The likeliest tokens one by one, each from a forward pass over all previous ones, with the inputs marked."""
    ids, logits = [0, *VOCABULARY.encode(prompt)], jax.jit(model.logits)
    read, found = len(ids), []
    while len(found) < count:
        row = np.zeros((1, LENGTH), np.int32)
        row[0, : len(ids)] = ids
        positions = np.arange(LENGTH)[None]
        batch = {"tokens": row, "segment_ids": (positions < len(ids)) * 1, "positions": positions}
        batch["prefix"] = (positions < read) * 1
        of_next = logits(params, batch)[0, len(ids) - 1, : VOCABULARY.size]
        token = int(jnp.argmax(of_next))
        if token in VOCABULARY.end_ids:
            break
        found.append(token)
        ids.append(token)
    return found


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.heavy) if x != "windows" else x for x in MODELS])
def test_texts_are_those_of_a_pass_over_the_whole(name):
    """For every engine option: pages, 8 bits, guesses, chunked prompts, and earlier prompts' prefixes (not used)."""
    model = MODELS[name]
    params = params_of(model)
    want = [written(model, params, prompt, GREEDY.max_new_tokens) for prompt in PROMPTS]
    pages = {"page_size": 16, "pages": 8}
    guesses = {"draft_tokens": 2}
    settings = {"rope": [guesses, pages, {}], "relative": [guesses | pages, {}], "windows": [guesses, {}]}
    for config in settings[name]:
        engine = Engine(model, params, VOCABULARY, LENGTH, EngineConfig(slots=2, prefill_tokens=16, **config))
        streams = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
        assert [stream.result().tokens for stream in streams] == want, config
        again = [engine.submit(prompt, GREEDY).result() for prompt in PROMPTS]
        assert [one.tokens for one in again] == want and not any(one.cached_tokens for one in again)
    one = Sampling(max_new_tokens=8, beams=BeamSearch(num_decodes=1))
    found = [engine.submit(prompt, one).result() for prompt in PROMPTS]
    assert [of.tokens for of in found] == want


def test_a_prompt_that_is_read_again_has_its_text_after_it():
    """With too few pages the last request is preempted: its generated tokens are not inputs."""
    model = MODELS["rope"]
    params, long = params_of(model), Sampling(temperature=0.0, max_new_tokens=40)
    alone = Engine(model, params, VOCABULARY, LENGTH, EngineConfig(slots=1))
    engine = Engine(model, params, VOCABULARY, LENGTH, EngineConfig(slots=2, page_size=8, pages=12, decode_steps=1))
    streams = [engine.submit(prompt, long) for prompt in PROMPTS[:2]]
    assert [s.result().tokens for s in streams] == [alone.submit(p, long).result().tokens for p in PROMPTS[:2]]
    assert engine.statistics.preempted


def test_prompts_in_8_bits_are_read_both_ways():
    model = api.build(DecoderConfig(**{**BOTH_WAYS, "dtype": "bfloat16"}))
    causal = api.build(DecoderConfig(**{**SIZES, "dtype": "bfloat16"}))
    params, tokens = params_of(model), np.arange(3, 23, dtype=np.int32)[None]
    batch = {"tokens": tokens, "counts": np.array([20], np.int32)}

    def first(model, dtype, **more):
        cache = model.start_cache(1, 32, dtype)
        return np.asarray(jax.jit(model.prefill)(params, batch | more, cache)[0])

    exact, found = first(model, None), first(model, jnp.int8)
    apart = np.abs(first(causal, jnp.int8) - exact).max()
    assert np.abs(found - exact).max() < apart / 4
    as_text = first(model, jnp.int8, inputs=np.array([1], np.int32))
    np.testing.assert_allclose(as_text, first(causal, jnp.int8), rtol=1e-2, atol=1e-2)


def test_choices_are_scored_after_inputs_that_see_each_other():
    model = MODELS["relative"]
    params = params_of(model)
    pairs = [Pair([0, *VOCABULARY.encode(prompt)], VOCABULARY.encode(" yes")) for prompt in PROMPTS]
    scores = Scorer(model, params, LENGTH)(pairs)
    logits, positions = jax.jit(model.logits), np.arange(LENGTH)[None]
    for (context, continuation, _), score in zip(pairs, scores):
        ids = np.zeros((1, LENGTH), np.int32)
        ids[0, : len(context) + len(continuation)] = [*context, *continuation]
        real = (positions < len(context) + len(continuation)).astype(np.int32)
        batch = {"tokens": ids, "segment_ids": real, "positions": positions}
        batch["prefix"] = (positions < len(context)).astype(np.int32)
        log_p = jax.nn.log_softmax(logits(params, batch))[0]
        want = sum(log_p[len(context) + i - 1, token] for i, token in enumerate(continuation))
        np.testing.assert_allclose(score.log_probability, want, rtol=1e-5)
