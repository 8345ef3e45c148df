"""Guessed tokens do not change a text."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.engine.programs.speculative import Drafter
from capibara.inference.sampling.sampling import Sampling
from capibara.models import api
from capibara.models.api import DecoderConfig

CONFIG = DecoderConfig(vocab_size=384, embed_dim=32, num_layers=2, num_heads=2, mlp_dim=64, dtype="float32")
VOCABULARY = ByteVocabulary()
GREEDY = Sampling(temperature=0.0, max_new_tokens=24)
COLD = dataclasses.replace(GREEDY, temperature=0.3)
PROMPT = "one two one two one two one "
REQUESTS = [
    (PROMPT, GREEDY),
    (PROMPT, dataclasses.replace(COLD, seed=1, max_new_tokens=17)),
    ("no word twice", dataclasses.replace(COLD, seed=2)),
    (PROMPT, dataclasses.replace(COLD, seed=3, repetition_penalty=1.1)),
    ("abababababababababab<", dataclasses.replace(GREEDY, thinking_tokens=3, thinking_tags=("<", "?>"))),
    ("x", dataclasses.replace(GREEDY, max_new_tokens=64)),  # longer than its slot
]


@pytest.fixture(scope="module")
def copies():
    """A model that repeats itself: its embedding and head are large, its layers add little."""
    model = api.build(CONFIG)
    params = jax.jit(model.init)(jax.random.key(1))
    return params | {"layers": jax.tree.map(lambda x: x * 0.7, params["layers"])}


def texts(params, drafts, requests=REQUESTS, config=CONFIG, **engine):
    settings = EngineConfig(slots=3, prefix_cache_mib=0, draft_tokens=drafts, **engine)
    one = Engine(api.build(config), params, VOCABULARY, 64, settings)
    streams = [one.submit(*request) for request in requests]
    return [stream.result() for stream in streams], one.statistics


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param({}, id="plain", marks=pytest.mark.heavy),
        pytest.param(dict(layer_pattern=("local", "global"), window=8), id="window"),
        pytest.param(dict(norm="layer", positions="learned", max_length=64), id="learned", marks=pytest.mark.heavy),
    ],
)
def test_texts_are_the_same(copies, variant):
    config = dataclasses.replace(CONFIG, **variant)
    params = copies if not variant else jax.jit(api.build(config).init)(jax.random.key(2))
    plain, alone = texts(params, 0, config=config, decode_steps=1)
    guessed, found = texts(params, 5, config=config)
    assert [r.tokens for r in guessed] == [r.tokens for r in plain]
    assert [r.text for r in guessed] == [r.text for r in plain]
    for one, other in zip(guessed, plain):
        want = [piece.log_probability for piece in other.pieces]
        np.testing.assert_allclose([piece.log_probability for piece in one.pieces], want, atol=1e-4)
    # Some guesses were right and some wrong: both cases occurred.
    assert 0 < found.accepted < found.drafted and alone.drafted == 0
    assert found.steps < alone.steps or (
        variant and found.steps == alone.steps
    )  # the longest row may have repeated nothing
    assert found.acceptance == found.accepted / found.drafted


def test_a_full_row_moves_on(copies):
    requests = [("abcabcabcabc" * 5, dataclasses.replace(GREEDY, max_new_tokens=12))]
    plain, _ = texts(copies, 0, requests, when_full="slide")
    guessed, _ = texts(copies, 4, requests, when_full="slide")
    assert guessed[0].tokens == plain[0].tokens and len(plain[0].tokens) == 12


def test_an_end_among_the_guesses_ends_the_text(copies):
    [whole], _ = texts(copies, 5, REQUESTS[:1])
    end = whole.tokens[-1]
    one = Engine(api.build(CONFIG), copies, VOCABULARY, 64, EngineConfig(slots=1, draft_tokens=5))
    cut = one.submit(PROMPT, GREEDY, ends=[end]).result()
    assert cut.tokens == whole.tokens[: whole.tokens.index(end)] and cut.finish == "stop"
    # What it read beyond the end does not count as part of the text.
    again = one.submit([VOCABULARY.bos_id, *VOCABULARY.encode(PROMPT), *cut.tokens, 70], GREEDY).result()
    fresh = Engine(api.build(CONFIG), copies, VOCABULARY, 64, EngineConfig(slots=1, prefix_cache_mib=0))
    assert again.cached_tokens > 16
    prompt = [VOCABULARY.bos_id, *VOCABULARY.encode(PROMPT), *cut.tokens, 70]
    assert again.tokens == fresh.submit(prompt, GREEDY).result().tokens


def test_those_who_wait_go_on_after_an_end_that_nobody_foresaw(copies):
    prompt, asked = REQUESTS[2]
    [whole], _ = texts(copies, 5, REQUESTS[2:3])
    end = next(token for index, token in enumerate(whole.tokens) if index > 3 and token not in whole.tokens[:index])
    one = Engine(api.build(CONFIG), copies, VOCABULARY, 64, EngineConfig(slots=1, draft_tokens=5))
    streams = [one.submit(prompt, asked, ends=[end]) for _ in range(3)]
    one.run()
    assert one.load == (0, 0)
    assert all(stream.result().tokens == whole.tokens[: whole.tokens.index(end)] for stream in streams)


def test_guesses_go_on_as_the_text_did():
    tokens = [1, 2, 3, 4, 5, 1, 2]
    drafter = Drafter(tokens)
    assert drafter.guess(3) == [3, 4, 5]
    tokens += [9]
    assert drafter.guess(3) == []
    tokens += [1, 2, 9]
    assert drafter.guess(2) == [1, 2]  # the longest run that was there, (1, 2, 9), not (5, 1, 2) before it
    tokens += [7, 7, 7]
    assert drafter.guess(4) == [7, 7, 7, 7]
    assert Drafter([1]).guess(4) == []


def test_wrong_guesses_make_it_rest():
    drafter, rests = Drafter([1, 2, 3, 1, 2]), []
    for _ in range(6):
        assert drafter.guess(1) == [3]
        drafter.record(0)
        rests.append(0)
        while drafter._rests:
            assert drafter.guess(1) == []
            rests[-1] += 1
    assert rests == [2, 4, 8, 16, 16, 16]
    drafter.record(1)
    assert drafter.guess(1) == [3]
