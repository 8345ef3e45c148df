"""Encoder-decoders answer as under teacher forcing, with named sentinels; encoders are rejected."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.sample import Generator, SampleText, Sampling, sampler
from capibara.models import api

SIZES = dict(vocab_size=384, embed_dim=32, num_layers=2, num_heads=2, mlp_dim=64, dtype="float32")
MODEL = api.build(api.EncoderDecoderConfig(**SIZES))
VOCABULARY = ByteVocabulary()
S, T = 32, 12


@functools.cache
def params():
    return jax.tree.map(lambda x: x * 2, jax.jit(MODEL.init)(jax.random.key(1)))


def answer(prompt, model=MODEL, **sampling):
    return Generator(model, VOCABULARY, T, Sampling(temperature=0.0, **{"max_new_tokens": 8, **sampling}), S)(
        params(), prompt
    )


def batch_of(encoder_ids, ids):
    """One pair, padded as in training."""

    def side(ids, length):
        row, segments = np.zeros((1, length), np.int32), np.zeros((1, length), np.int32)
        row[0, : len(ids)], segments[0, : len(ids)] = ids, 1
        return row, segments, np.arange(length, dtype=np.int32)[None] * segments

    names = ("tokens", "segment_ids", "positions")
    encoder = {f"encoder_{name}": value for name, value in zip(names, side(encoder_ids, S), strict=True)}
    return encoder | dict(zip(names, side(ids, T), strict=True))


def spelled(ids):
    numbers = {token: i for i, token in enumerate(VOCABULARY.sentinel_ids)}
    return "".join(f"<extra_id_{numbers[i]}>" if i in numbers else VOCABULARY.decode([i]) for i in ids)


@pytest.mark.parametrize("prompt", ["translate: capybara", "the <extra_id_0> eats <extra_id_1>", ""])
def test_greedy_answers_are_those_of_teacher_forcing(prompt):
    inputs = []
    for i, part in enumerate(prompt.replace(">", "<").split("<")):
        inputs += [VOCABULARY.sentinel_ids[int(part.removeprefix("extra_id_"))]] if i % 2 else VOCABULARY.encode(part)
    inputs = [*inputs, VOCABULARY.eos_id]
    logits = jax.jit(MODEL.logits)
    ids = [VOCABULARY.pad_id]
    while len(ids) <= 8:
        scores = np.asarray(logits(params(), batch_of(inputs, ids)))[0, len(ids) - 1, : VOCABULARY.size]
        if (token := int(scores.argmax())) == VOCABULARY.eos_id:
            break
        ids.append(token)
    assert len(ids) > 3
    got = answer(prompt)
    # Single bytes of a multi-byte character are each invalid; together they may be valid.
    assert got.replace("\ufffd", "") == spelled(ids[1:]).replace("\ufffd", "")


def test_the_answer_depends_on_the_prompt_and_its_end_is_cut():
    assert answer("capybara") != answer("river")
    assert answer("x" * S + "a") == answer("x" * S + "b")


def test_a_sentinel_that_the_vocabulary_has_not_is_named():
    with pytest.raises(UserError, match="<extra_id_125>, the vocabulary 125 sentinels"):
        answer("a <extra_id_125>")


def test_an_encoder_says_what_it_is():
    model = api.build(api.EncoderConfig(**SIZES))
    with pytest.raises(UserError, match="EncoderConfig.* is a masked language model"):
        answer("a", model=model)
    with pytest.raises(UserError, match="leave SampleText.prompts empty"):
        sampler(model, lambda: VOCABULARY, T, SampleText(prompts=("a",)))
    assert list(sampler(model, lambda: VOCABULARY, T, SampleText())({})) == []
