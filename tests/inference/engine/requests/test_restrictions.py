"""Tokens and words that a text may not have, stops that it has, and salts: against a loop over the model in NumPy."""

from __future__ import annotations

import dataclasses
import json
import re
import types

import jax
import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.inference.engine.requests.following import Orders, Submission
from capibara.inference.engine.requests.stream import Finish
from capibara.inference.sampling.grammar import Grammar
from capibara.inference.sampling.restrictions import Restrictions, word_ids
from capibara.inference.sampling.sampling import BeamSearch, Sampling
from tests.inference.engine.requests.test_structured import FREE, MODEL, VOCABULARY, engine, scores

GREEDY = Sampling(temperature=0, max_new_tokens=24)
PROMPT = "a prompt, a prompt"
CONFIGS = [
    {"decode_steps": 4},
    pytest.param({}, marks=pytest.mark.heavy),
    pytest.param({"draft_tokens": 3, "page_size": 32}, marks=pytest.mark.heavy),
]
LETTERS = tuple(VOCABULARY.encode("abcdefghij klm"))


def looped(sampling, prompt=PROMPT):
    """The greedy text by a loop over the whole model: excluded are other ids, and the last token of a word."""
    tokens, text = VOCABULARY.prompt_ids(prompt), []
    batch = {"positions": np.arange(64, dtype=np.int32)[None], "segment_ids": np.ones((1, 64), np.int32)}
    forward = jax.jit(lambda params, tokens: MODEL.logits(params, batch | {"tokens": tokens}))
    words = [VOCABULARY.encode(space + word) for word in sampling.bad_words for space in ("", " ")]
    while len(text) < sampling.max_new_tokens:
        logits = np.asarray(scores(forward, [*tokens, *text]))[: VOCABULARY.size].copy()
        if sampling.allowed_ids is not None:
            logits[[token for token in range(len(logits)) if token not in sampling.allowed_ids]] = -np.inf
        for *before, last in words:
            if text[len(text) - len(before) :] == before and len(text) >= len(before):
                logits[last] = -np.inf
        text.append(int(np.argmax(logits)))
        if text[-1] in VOCABULARY.end_ids:
            return text[:-1]
    return text


def restricted(config):
    """Greedy samplings of which each but the first would have another text without its restriction."""
    free = engine(**config).submit(PROMPT, GREEDY).result()
    pairs = [bytes(token - 3 for token in free.tokens[i : i + 2]).decode("latin-1") for i in (0, 5)]
    letters = tuple(chr(token - 3) for token in free.tokens[:2] if token - 3 < 128)
    return [
        GREEDY,
        dataclasses.replace(GREEDY, allowed_ids=LETTERS),
        dataclasses.replace(GREEDY, bad_words=letters or ("a",)),
        dataclasses.replace(GREEDY, bad_words=tuple(pair for pair in pairs if pair.isascii()) or ("ab",)),
        dataclasses.replace(GREEDY, allowed_ids=LETTERS, bad_words=("a", "bc", "cb", "dd", "eee", "j", "fg", "hi")),
    ]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_restricted_texts_are_those_of_the_loop_beside_free_ones(config):
    asks = restricted(config)
    want = [looped(ask) for ask in asks]
    streams = [engine_.submit(PROMPT, ask) for engine_ in (engine(**config),) for ask in asks]
    assert [stream.result().tokens for stream in streams] == want
    assert want[1] != want[0] and want[4] != want[1] and set(want[1]) <= {*LETTERS}


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_drawn_texts_are_restricted_too(config):
    sampling = dataclasses.replace(FREE, temperature=2.0, allowed_ids=LETTERS, bad_words=("ab", "c", " d"))
    texts = [engine(**config).submit("p", dataclasses.replace(sampling, seed=seed)).result().text for seed in range(4)]
    for text in texts:
        assert set(text) <= {*"abdefghij klm"} and "ab" not in text and "d" not in text and len(text) == 24


def test_a_row_that_is_read_again_stays_restricted():
    sampling = dataclasses.replace(GREEDY, max_new_tokens=90, allowed_ids=LETTERS, bad_words=("ab", "ba", "c"))
    wide, tight = engine(), engine(page_size=8, pages=26)
    alone, together = ([one.submit(prompt, sampling) for prompt in ("a", "bb", "ccc")] for one in (wide, tight))
    assert [text.result().tokens for text in together] == [text.result().tokens for text in alone]
    assert tight.statistics.preempted


def test_a_grammar_and_restrictions_hold_together():
    sampling = dataclasses.replace(
        FREE, temperature=1.5, grammar=Grammar(regex="[a-f]{8}"), bad_words=("a", "bc", "cc")
    )
    for seed in range(4):
        text = engine().submit("p", dataclasses.replace(sampling, seed=seed)).result().text
        assert re.fullmatch("[b-f]{8}", text) and "bc" not in text and "cc" not in text


def test_a_text_whose_grammar_leaves_no_token_gets_the_error_alone():
    one = engine()
    stuck = one.submit("p", dataclasses.replace(FREE, grammar=Grammar(regex="ab"), bad_words=("ab",)))
    free = one.submit("free", FREE)
    with pytest.raises(UserError, match="no token is left for Sampling.allowed_ids, bad_words, grammar and"):
        stuck.result()
    assert free.result().tokens == engine().submit("free", FREE).result().tokens


def test_words_are_tokens_alone_and_after_a_space():
    assert word_ids(["no", " no"], VOCABULARY) == [tuple(VOCABULARY.encode("no"))]  # whatever is before it
    merged = types.SimpleNamespace(encode={"no": [7], " no": [8], "a": [1, 2], " a": [3, 1, 2], "": [], " ": [3]}.get)
    assert word_ids(["no", "a"], merged) == [(7,), (8,), (1, 2)]
    with pytest.raises(UserError, match="Sampling.bad_words has ' ', which has no tokens"):
        word_ids([" "], merged)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"allowed_ids": ()}, "Sampling.allowed_ids is (), must have at least one token id"),
        ({"allowed_ids": (384,)}, "Sampling.allowed_ids has token 384, must be from 0 to 383"),
        ({"allowed_ids": tuple(VOCABULARY.encode("a")), "bad_words": ("a",)}, "leave no token"),
        ({"bad_words": ("a", "")}, "Sampling.bad_words is ('a', '')"),
        ({"beams": BeamSearch(), "bad_words": ("no",)}, "Sampling.bad_words is ('no',), which beam search"),
        ({"beams": BeamSearch(), "allowed_ids": (5,)}, "Sampling.allowed_ids is (5,), which beam search"),
    ],
    ids=range(6),
)
def test_restrictions_that_cannot_be_are_refused(options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        engine().submit("p", Sampling(temperature=0, **options))


def test_rows_of_the_model_without_a_token_are_never_allowed():
    allowed = Sampling(allowed_ids=(383, 385))
    Restrictions(allowed, [], 392, 384)
    with pytest.raises(UserError, match="Sampling.allowed_ids and Sampling.bad_words leave no token"):
        Restrictions(dataclasses.replace(allowed, allowed_ids=(385,)), [], 392, 384)


def test_bits_beyond_the_model_are_no_tokens():
    """A row of 40 tokens has 64 bits."""
    restrictions, row = (
        Restrictions(Sampling(allowed_ids=(7,)), [(7, 7)], 40, 40),
        np.full(2, -1, np.int32).view(np.uint32),
    )
    restrictions.allow(row, [])
    assert row.tolist() == [1 << 7, 0]
    with pytest.raises(UserError, match="no token is left for Sampling.allowed_ids"):
        restrictions.allow(row, [7])


def test_an_end_token_alone_is_not_enough_before_the_least_length():
    sampling = dataclasses.replace(GREEDY, allowed_ids=(VOCABULARY.eos_id,), min_new_tokens=2)
    with pytest.raises(UserError, match="no token is left for Sampling.allowed_ids"):
        engine().submit("p", sampling).result()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_text_has_its_stop_if_asked(config):
    one = engine(**config)
    free = one.submit(PROMPT, GREEDY).result()
    stop = next(free.text[i : i + 2] for i in range(2, 20) if free.text[i : i + 2].isascii())
    ended, has = (
        one.submit(PROMPT, dataclasses.replace(GREEDY, stop=(stop,), include_stop=include)).result()
        for include in (False, True)
    )
    assert has.text == ended.text + stop == free.text[: free.text.index(stop) + 2]
    assert (has.finish, has.stop) == (ended.finish, ended.stop) == (Finish.STOP, stop)


def test_a_text_has_the_text_of_its_end_token_if_asked():
    one = engine()
    letter = VOCABULARY.encode("b")[0]
    sampling = dataclasses.replace(GREEDY, allowed_ids=(letter,))
    for include, text in ((False, ""), (True, "b")):
        asked = dataclasses.replace(sampling, include_stop=include)
        result = one.submit("p", asked, ends=(letter,)).result()
        assert (result.text, result.tokens, result.end, result.finish) == (text, [], letter, Finish.STOP)
    special = one.submit("p", dataclasses.replace(asked, allowed_ids=(VOCABULARY.eos_id,))).result()
    assert special.text == ""  # it has no text, unless it is spelled
    named = one.submit(
        "p", dataclasses.replace(asked, allowed_ids=(VOCABULARY.eos_id,)), spelled=(VOCABULARY.eos_id,)
    ).result()
    assert named.text == "</s>"


@pytest.mark.parametrize("config", [{}, {"page_size": 32}], ids=str)
def test_only_requests_of_one_salt_share_what_is_read(config):
    one, prompt = engine(slots=1, **config), "a prompt of more than sixteen tokens"
    cached = [
        one.submit(prompt, GREEDY, salt=salt).result().cached_tokens for salt in ("", "x", "y", "x", "", "y", "z")
    ]
    assert [count > 0 for count in cached] == [False, False, False, True, True, True, False]
    together = engine(slots=3)
    streams = [together.submit(prompt, GREEDY, salt=salt) for salt in ("x", "y", "x")]
    assert [stream.result().cached_tokens > 0 for stream in streams] == [False, False, True]


def test_other_processes_get_restrictions_and_salts():
    sampling = dataclasses.replace(GREEDY, allowed_ids=LETTERS, bad_words=("a", "bc"), include_stop=True, stop=("x",))
    orders = Orders([Submission([5, 6], sampling, (), 0, None, (), "salt")], [], 1, 0)
    (item,) = Orders.of(json.loads(json.dumps(orders.packed()))).submitted
    assert (item.sampling, item.salt) == (sampling, "salt")
