"""Sampling: choices stay within their limits, limits that are greedy, the window, the end token."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.engine.cache.batching import EngineConfig, WhenFull
from capibara.inference.engine.engine import Engine
from capibara.inference.sample import Generator, SampleText, Sampling, beyond_length, sampler
from capibara.inference.sampling.sampler import History, Settings, choose, settings_of
from capibara.models import api
from capibara.models.api import DecoderConfig, EncoderDecoderConfig

MODEL = api.build(DecoderConfig(vocab_size=384, embed_dim=32, num_layers=2, num_heads=2, mlp_dim=64, dtype="float32"))
LENGTH = 24


@functools.cache
def params():
    # Large weights, so that one token is far likelier than the others and texts do not agree by chance.
    return jax.tree.map(lambda x: x * 3, jax.jit(MODEL.init)(jax.random.key(1)))


def text_of(prompt="def ", length=LENGTH, **sampling):
    sampling = Sampling(**{"max_new_tokens": 12, **sampling})
    return Generator(MODEL, ByteVocabulary(), length, sampling)(params(), prompt)


def test_a_text_is_made_by_the_engine_that_is_asked_for():
    config = EngineConfig(page_size=4, pages=2)  # a capacity of eight tokens, five of them the prompt's
    asked = Sampling(temperature=0.0, max_new_tokens=12)
    short = Generator(MODEL, ByteVocabulary(), LENGTH, asked, config=config)(params(), "def ")
    assert short == text_of(temperature=0.0, max_new_tokens=4) != text_of(temperature=0.0)


def draws(logits, **sampling):
    rows = Settings(*(np.repeat(x, 5000, axis=0) for x in settings_of([Sampling(**sampling)])))
    return np.asarray(jax.jit(choose)(jnp.tile(logits, (5000, 1)), rows, np.arange(5000, dtype=np.int32))[0])


LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.25, 0.15, 0.05], np.float32))


def test_without_limits_the_draws_follow_the_probabilities():
    counts = np.bincount(draws(LOGITS, temperature=1.0), minlength=6) / 5000
    np.testing.assert_allclose(counts, np.exp(LOGITS), atol=0.03)


def test_temperature_sharpens():
    counts = np.bincount(draws(LOGITS, temperature=0.5), minlength=6) / 5000
    np.testing.assert_allclose(counts, np.exp(2 * LOGITS) / np.exp(2 * LOGITS).sum(), atol=0.03)


@pytest.mark.parametrize(
    "limits, allowed",
    [
        (dict(top_k=1), {1}),
        (dict(top_k=3), {1, 3, 4}),
        (dict(top_k=6), {0, 1, 2, 3, 4, 5}),
        (dict(top_k=99), {0, 1, 2, 3, 4, 5}),
        (dict(top_p=1e-6), {1}),
        (dict(top_p=0.39), {1}),
        (dict(top_p=0.5), {1, 3}),
        (dict(top_p=0.75), {1, 3, 4}),
        (dict(top_p=1.0), {0, 1, 2, 3, 4, 5}),
        (dict(top_k=3, top_p=0.75), {1, 3}),  # of what top_k left, 0.5 and 0.31: they reach 0.75
        (dict(min_p=0.3), {1, 3, 4}),
        (dict(min_p=1.0), {1}),
        (dict(min_p=0.0), {0, 1, 2, 3, 4, 5}),
        (dict(temperature=0), {1}),
    ],
    ids=str,
)
def test_draws_fill_the_allowed_set_and_never_leave_it(limits, allowed):
    assert set(draws(LOGITS, **{"temperature": 1.0, **limits}).tolist()) == allowed


@pytest.mark.parametrize("limits", [dict(), dict(top_k=3), dict(top_p=0.75), dict(min_p=0.3), dict(temperature=0.5)])
def test_what_is_drawn_has_the_log_probability_that_it_was_drawn_with(limits):
    rows = Settings(*(np.repeat(x, 5000, axis=0) for x in settings_of([Sampling(**{"temperature": 1.0, **limits})])))
    tokens, log_p = jax.jit(choose)(jnp.tile(LOGITS, (5000, 1)), rows, np.arange(5000, dtype=np.int32))
    counts = np.bincount(np.asarray(tokens), minlength=6)
    told = {int(token): float(np.exp(one)) for token, one in zip(tokens, log_p)}
    assert sum(told.values()) == pytest.approx(1.0, abs=1e-5)  # of all that can be drawn
    for token, probability in told.items():
        assert counts[token] / 5000 == pytest.approx(probability, abs=0.03)
    greedy = settings_of([Sampling(temperature=0)])
    assert float(choose(LOGITS[None], greedy, np.zeros(1, np.int32))[1][0]) == 0


def test_impossible_tokens_are_never_drawn():
    masked = np.where(np.arange(6) < 2, LOGITS, -np.inf)
    for limits in (dict(), dict(top_k=4), dict(top_p=0.999999), dict(temperature=0)):
        assert set(draws(masked, **{"temperature": 1.0, **limits}).tolist()) <= {0, 1}


@pytest.mark.parametrize("distinct", [1, 2, 4, 12])
def test_top_p_keeps_the_smallest_set_that_reaches_it(distinct):
    """Of equal probabilities too: a sort in float64 says how many, and top_p lies between two of its sums."""
    rng = np.random.default_rng(distinct)
    for _ in range(12):
        logits = rng.choice(rng.normal(size=distinct), size=12).astype(np.float32)
        p = np.exp(logits.astype(np.float64))
        order = np.argsort(-p, kind="stable")
        sums = np.concatenate([[0], np.cumsum(p[order] / p.sum())])
        count = int(rng.integers(1, 8))
        allowed = set(order[:count].tolist())
        top_p = float((sums[count - 1] + sums[count]) / 2)
        assert set(draws(logits, temperature=1.0, top_p=top_p).tolist()) == allowed, (logits, top_p)


def test_every_row_has_its_own_settings():
    each = [dict(temperature=0), dict(top_k=3), dict(top_p=0.5, seed=5), dict(min_p=0.3), dict(seed=7), dict(seed=8)]
    each = [Sampling(**{"temperature": 1.0, **one}) for one in each]
    logits = np.random.default_rng(0).normal(size=(len(each), 50)).astype(np.float32)
    index = np.array([0, 3, 4, 5, 3, 3], np.int32)
    together = np.asarray(jax.jit(choose)(logits, settings_of(each), index)[0])
    for row, one in enumerate(each):
        alone = jax.jit(choose)(logits[row : row + 1], settings_of([one]), index[row : row + 1])
        assert together[row] == int(alone[0][0])


def test_a_repeated_token_loses_by_its_sign():
    logits = jnp.asarray([[2.0, 1.5, -1.0], [-1.0, -1.5, -3.0]])
    rows = settings_of([Sampling(temperature=0, repetition_penalty=2.0)] * 2)
    seen = jnp.asarray([[True, False, True], [True, False, False]])
    history = History(seen, jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 3)))
    assert choose(logits, rows, jnp.zeros(2, jnp.int32), history)[0].tolist() == [1, 1]
    assert choose(logits, rows, jnp.zeros(2, jnp.int32), history._replace(seen=~seen))[0].tolist() == [0, 0]


def test_limits_of_one_token_are_greedy():
    greedy = text_of(temperature=0)
    assert greedy == text_of(temperature=0, seed=9)
    assert greedy == text_of(top_k=1) == text_of(top_p=1e-9) == text_of(top_k=1, seed=5)
    assert len(ByteVocabulary().encode(greedy)) > 3


def test_seeds_decide_the_text():
    assert text_of(temperature=1.5, seed=1) == text_of(temperature=1.5, seed=1)
    assert len({text_of(temperature=1.5, seed=seed) for seed in range(4)}) > 1


def greedy_by_hand(prompt, length, count):
    """Greedy tokens from whole forward passes over the last `length` tokens."""
    vocabulary = ByteVocabulary()
    ids, new = [vocabulary.bos_id, *vocabulary.encode(prompt)], []
    logits = jax.jit(MODEL.logits)
    for _ in range(count):
        window = ids[-length:]
        row = np.full((1, length), vocabulary.pad_id, np.int32)
        row[0, : len(window)] = window
        batch = {"tokens": row, "positions": np.arange(length, dtype=np.int32)[None], "segment_ids": np.ones_like(row)}
        token = int(np.argmax(np.asarray(logits(params(), batch))[0, len(window) - 1, : vocabulary.size]))
        if token == vocabulary.eos_id:
            break
        ids.append(token)
        new.append(token)
    return vocabulary.decode(new)


@pytest.mark.parametrize("prompt", ["", "def f", "x" * (LENGTH - 2), "a long prompt, longer than the window is"])
def test_the_window_moves_when_the_row_is_full(prompt):
    assert text_of(prompt, temperature=0, max_new_tokens=30) == greedy_by_hand(prompt, LENGTH, 30)


def test_a_long_prompt_counts_with_its_last_tokens():
    end = "x" * 5 + "import numpy as np\n" + "y" * 5
    assert text_of("one " * 20 + end, temperature=0) == text_of("two! " * 16 + end, temperature=0)


@pytest.mark.parametrize(
    ("prompt_tokens", "new", "when_full", "note"),
    [
        (LENGTH, 1, WhenFull.SLIDE, ""),
        (LENGTH - 4, 5, WhenFull.SLIDE, ""),
        (LENGTH - 4, 6, WhenFull.SLIDE, f"prompt and text have {LENGTH + 2} tokens: those beyond Dataset.length"),
        (LENGTH + 3, 1, WhenFull.SLIDE, f"the model read the last {LENGTH} of {LENGTH + 3} tokens of the prompt"),
        (LENGTH - 4, 5, WhenFull.STOP, ""),
        (LENGTH - 4, 6, WhenFull.STOP, "the text ends after 5 tokens: prompt and text fill Dataset.length"),
    ],
)
def test_what_goes_beyond_the_length_is_told(prompt_tokens, new, when_full, note):
    sampling = Sampling(temperature=0, max_new_tokens=new)
    vocabulary = ByteVocabulary()
    endless = Engine(
        MODEL, params(), vocabulary, LENGTH, EngineConfig(slots=1, when_full=when_full, prefix_cache_mib=0)
    )
    result = endless.submit([50] * prompt_tokens, sampling).result()
    assert len(result.tokens) == new or when_full is WhenFull.STOP
    found = beyond_length(result, sampling, LENGTH)
    assert found.startswith(f"note: {note}" if note else "") and bool(found) == bool(note)


def test_an_encoder_reads_the_first_tokens_or_refuses(made_pairs):
    model, encdec = made_pairs
    for when_full in (WhenFull.SLIDE, WhenFull.STOP):
        config = EngineConfig(slots=1, when_full=when_full, prefix_cache_mib=0)
        engine = Engine(model, encdec, ByteVocabulary(), 16, config, encoder_length=12)
        assert engine.submit([50] * 12, Sampling(max_new_tokens=1)).result().unread == 0
        if when_full is WhenFull.STOP:
            with pytest.raises(UserError, match="the prompt has 15 tokens, must have at most 12: shorten it"):
                engine.submit([50] * 15, Sampling(max_new_tokens=1))
        else:
            result = engine.submit([50] * 15, sampling := Sampling(max_new_tokens=1)).result()
            note = "note: the model read the first 12 of 15 tokens of the prompt (Dataset.encoder_length = 12)\n"
            assert beyond_length(result, sampling, 16, 12) == note


@pytest.fixture(scope="module")
def made_pairs():
    """An encoder-decoder and its parameters."""
    sizes = dict(vocab_size=384, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, dtype="float32")
    model = api.build(EncoderDecoderConfig(**sizes))
    return model, jax.jit(model.init)(jax.random.key(1))


def test_the_end_token_ends_the_text():
    vocabulary = ByteVocabulary()
    certain = jax.tree.map(jnp.zeros_like, params())  # all logits 0: greedy takes id 0, which stands for no text
    assert Generator(MODEL, vocabulary, LENGTH, Sampling(temperature=0, max_new_tokens=5))(certain, "a") == ""


def test_the_loop_samples_each_prompt():
    texts = SampleText(prompts=("a", ""), sampling=Sampling(temperature=0, max_new_tokens=4))
    pairs = list(sampler(MODEL, ByteVocabulary, LENGTH, texts)(params()))
    assert pairs == [(prompt, text_of(prompt, temperature=0, max_new_tokens=4)) for prompt in ("a", "")]
    assert list(sampler(MODEL, ByteVocabulary, LENGTH, SampleText())(params())) == []


@pytest.mark.parametrize(
    "bad",
    [
        dict(max_new_tokens=0),
        dict(temperature=-0.1),
        dict(temperature=float("nan")),
        dict(top_k=0),
        dict(top_k=2**31),
        dict(seed=2**63),
        dict(seed=-(2**63) - 1),
        dict(top_p=float("nan")),
        dict(min_p=float("nan")),
        dict(repetition_penalty=float("nan")),
        dict(top_p=0.0),
        dict(top_p=1.1),
        dict(min_p=1.5),
        dict(repetition_penalty=0.0),
        dict(stop=("",)),
        dict(stop="end"),
        dict(thinking_tokens=0),
        dict(thinking_tags=("<think>",)),
    ],
    ids=str,
)
def test_bad_settings(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        Sampling(**bad)


def test_the_largest_settings_are_drawn_with():
    assert len(draws(LOGITS, seed=2**63 - 1, top_k=2**31 - 1)) == len(draws(LOGITS, seed=-(2**63)))
