"""Prompts that are read beside the next tokens of texts: each text is that of its request alone."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.engine.cache.batching import buckets, mixed_shapes
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.sampling.grammar import Grammar
from capibara.inference.sampling.sampler import settings_of
from capibara.inference.sampling.sampling import Sampling
from capibara.models import api
from capibara.models.api import Adapter, DecoderConfig, Lora

CONFIG = DecoderConfig(
    vocab_size=384, embed_dim=32, num_layers=2, num_heads=2, num_kv_heads=1, mlp_dim=64, dtype="float32"
)
MODEL, VOCABULARY, LENGTH = api.build(CONFIG), ByteVocabulary(), 96
GREEDY = Sampling(temperature=0.0, max_new_tokens=12)
PROMPTS = ["a", "a prompt of another size", "short one", "and one that begins otherwise" * 2, "b" * 40]


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda x: x * 3, jax.jit(MODEL.init)(jax.random.key(1)))


def engine(params, adapters=(), **config):
    config = EngineConfig(**{"prefix_cache_mib": 0, "slots": 4, "page_size": 16, "prefill_tokens": 32} | config)
    return Engine(MODEL, params, VOCABULARY, LENGTH, config, adapters=adapters)


def alone(params, prompt, sampling, **options):
    """The text of a request in an engine that reads no prompt beside a text."""
    config = {"slots": 1, "page_size": 0} | {
        name: options.pop(name) for name in ("adapters", "cache_dtype") if name in options
    }
    return engine(params, **config).submit(prompt, sampling, **options).result()


class Beside:
    """Counts the steps of an engine that read prompts, and the most prompts and texts in one."""

    def __init__(self, one):
        self.steps = self.prompts = self.texts = 0
        programs = one.core.runner.programs

        def mix(params, state, tokens, *rest):
            documents = tokens.packed.documents
            self.steps, self.prompts = self.steps + 1, max(self.prompts, int(documents.max()))
            self.texts = max(self.texts, int(((documents == 0) & (tokens.counts > 0)).sum()))
            return programs.mix(params, state, tokens, *rest)

        one.core.runner.programs = programs._replace(mix=mix)


def assert_equal(result, expected, atol=1e-4):
    assert result.tokens == expected.tokens and result.finish == expected.finish
    each = ([piece.log_probability for piece in item.pieces if piece.token is not None] for item in (result, expected))
    np.testing.assert_allclose(*each, atol=atol)


def staggered(one, requests):
    """The results of requests that come while the first text is made."""
    first, *rest = requests
    streams = [one.submit(first[0], first[1], **first[2])]
    for _ in range(3):
        one.step()
    streams += [one.submit(prompt, sampling, **options) for prompt, sampling, options in rest]
    return [stream.result() for stream in streams]


SAMPLINGS = {
    "drawn": [Sampling(temperature=1.0, seed=seed, max_new_tokens=12) for seed in (2**31 + 5, 2, 3, 4, 5)],
    "penalties": [
        GREEDY,
        dataclasses.replace(GREEDY, repetition_penalty=1.6),
        dataclasses.replace(GREEDY, presence_penalty=2.0, frequency_penalty=1.0),
        dataclasses.replace(GREEDY, logit_bias={70: 50.0}, max_new_tokens=3),
        dataclasses.replace(GREEDY, min_new_tokens=8),
    ],
    "grammars": [
        dataclasses.replace(GREEDY, grammar=Grammar(choice=["yes", "no", "perhaps"])),
        GREEDY,
        dataclasses.replace(GREEDY, grammar=Grammar(regex=r"[a-f]{3}-\d{4}")),
        dataclasses.replace(GREEDY, grammar=Grammar(choice=["no", "never"])),
        dataclasses.replace(GREEDY, bad_words=("a", "e")),
    ],
}


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_texts_with_options_are_those_of_each_request_alone(params, kind):
    if kind == "grammars":
        pytest.importorskip("llguidance")
    requests = [(prompt, sampling, {}) for prompt, sampling in zip(PROMPTS, SAMPLINGS[kind])]
    one = engine(params)
    beside = Beside(one)
    results = staggered(one, requests)
    assert beside.steps and beside.prompts > 1 and beside.texts
    for result, (prompt, sampling, _) in zip(results, requests):
        assert_equal(result, alone(params, prompt, sampling))
    # A slot whose text had a bias is used by others.
    again = staggered(one, [(prompt, GREEDY, {}) for prompt in PROMPTS])
    for result, prompt in zip(again, PROMPTS):
        assert_equal(result, alone(params, prompt, GREEDY))


@pytest.mark.parametrize("dtype", ["compute", "bfloat16"])
@pytest.mark.parametrize("reading", ["whole", "in parts"])
def test_a_rounded_cache_gives_the_text_of_the_request_alone(params, dtype, reading):
    one = engine(params, cache_dtype=dtype, prefill_tokens=16 if reading == "in parts" else 64)
    beside = Beside(one)
    results = staggered(one, [(prompt, GREEDY, {}) for prompt in PROMPTS])
    assert beside.steps > (3 if reading == "in parts" else 0)
    for result, prompt in zip(results, PROMPTS):
        assert_equal(result, alone(params, prompt, GREEDY, cache_dtype=dtype))


def test_preempted_requests_are_read_again_beside_texts(params):
    sampling = dataclasses.replace(GREEDY, max_new_tokens=40, min_new_tokens=40)
    one = engine(params, pages=9)
    beside = Beside(one)
    results = staggered(one, [(prompt, sampling, {}) for prompt in PROMPTS])
    assert one.statistics.preempted and beside.steps and beside.texts
    for result, prompt in zip(results, PROMPTS):
        assert_equal(result, alone(params, prompt, sampling))
    assert one.pages[1] == 0


def test_a_prompt_that_is_cancelled_between_its_parts_leaves_nothing_behind(params):
    one = engine(params, slots=2)
    first = one.submit("x", dataclasses.replace(GREEDY, max_new_tokens=40, min_new_tokens=40))
    for _ in range(2):
        one.step()
    dropped = one.submit(list(range(10, 90)), GREEDY)
    one.step()
    assert one.core.prefill.waiting  # a part of it was read
    dropped.cancel()
    after = one.submit(list(range(90, 10, -1)), GREEDY)
    assert_equal(after.result(), alone(params, list(range(90, 10, -1)), GREEDY))
    assert dropped.result().finish == "cancelled" and len(first.result().tokens) == 40
    assert one.pages[1] == 0


@pytest.mark.parametrize("prefixes", [0, 16])
def test_several_texts_of_one_prompt_beside_others(params, prefixes):
    drawn = Sampling(temperature=1.0, seed=7, max_new_tokens=8)
    one = engine(params, slots=8, prefix_cache_mib=prefixes)
    beside = Beside(one)
    requests = [(PROMPTS[0], GREEDY, {})]
    for prompt in PROMPTS[1:3]:
        requests += [(prompt, dataclasses.replace(drawn, seed=seed), {}) for seed in range(3)]
    results = staggered(one, [*requests, (PROMPTS[3], GREEDY, {}), (PROMPTS[3] + "c", GREEDY, {})])
    assert beside.steps
    for result, (prompt, sampling, _) in zip(results, requests):
        assert_equal(result, alone(params, prompt, sampling))
    assert_equal(results[-1], alone(params, PROMPTS[3] + "c", GREEDY))
    if prefixes:
        assert results[-1].cached_tokens >= len(PROMPTS[3])


def test_each_token_has_the_adapter_of_its_request(params):
    adapted = api.build(dataclasses.replace(CONFIG, lora=Lora(rank=2, targets=("query", "down"))))
    values = adapted.trained(adapted.adapt(params, jax.random.key(3)))
    shift = lambda x: x + 0.3 * jax.random.normal(jax.random.key(4), x.shape)  # noqa: E731
    adapters = [Adapter("poet", adapted.config.lora, jax.tree.map(shift, values))]
    requests = [
        (prompt, GREEDY, {"adapter": name}) for prompt, name in zip(PROMPTS, (None, "poet", None, "poet", None))
    ]
    one = engine(params, adapters=adapters)
    beside = Beside(one)
    results = staggered(one, requests)
    assert beside.prompts > 1 and results[1].tokens != alone(params, PROMPTS[1], GREEDY).tokens
    for result, (prompt, sampling, options) in zip(results, requests):
        assert_equal(result, alone(params, prompt, sampling, adapters=adapters, **options))


@pytest.mark.parametrize("slots, tokens", [(1, 128), (2, 16), (8, 128), (32, 128), (256, 128)])
def test_programs_hold_all_texts_and_a_part_of_a_prompt(slots, tokens):
    shapes = mixed_shapes(slots, tokens)
    assert len(shapes) <= 13 and max(count for _, count in shapes) == slots
    assert all(
        size >= count and size in buckets(max(size for size, _ in shapes)) for size, count in shapes if slots > 1
    )
    assert max(size for size, count in shapes if count == slots) >= slots + 32


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**32 - 1, 2**33 + 5, -(2**63), 2**63 - 1])
def test_the_key_of_a_seed_is_that_of_jax(seed):
    words = settings_of([Sampling(seed=seed)]).key
    np.testing.assert_array_equal(words[0], jax.random.key_data(jax.random.key(seed)))
