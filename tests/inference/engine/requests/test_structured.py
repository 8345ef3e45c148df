"""Structured output, penalties and biases in the engine: what restricts the next token, beside rows that are free."""

from __future__ import annotations

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.engine.requests.following import Orders, Submission
from capibara.inference.engine.requests.stream import Finish
from capibara.inference.sampling.grammar import Grammar
from capibara.inference.sampling.sampler import History, choose, settings_of
from capibara.inference.sampling.sampling import BeamSearch, Sampling, of_values
from capibara.models import api
from capibara.models.api import DecoderConfig

LENGTH = 192
MODEL = api.build(DecoderConfig(vocab_size=384, embed_dim=32, num_layers=2, num_heads=2, mlp_dim=64, dtype="float32"))
VOCABULARY = ByteVocabulary()
HOT = Sampling(temperature=1.0, max_new_tokens=150)
FREE = Sampling(temperature=0.9, max_new_tokens=24, seed=5)
PERSON = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "name": {"type": "string", "maxLength": 8},
    },
    "required": ["age", "name"],
    "additionalProperties": False,
}


@functools.cache
def params():
    return jax.tree.map(lambda x: x * 3, jax.jit(MODEL.init)(jax.random.key(1)))


def engine(slots=3, **config):
    return Engine(MODEL, params(), VOCABULARY, LENGTH, EngineConfig(slots=slots, **config))


def with_grammar(seed=0, sampling=HOT, **fields):
    return dataclasses.replace(sampling, seed=seed, grammar=Grammar(**fields))


CONFIGS = [{}, {"decode_steps": 4}, {"page_size": 32}, {"draft_tokens": 3}]


@pytest.mark.parametrize(
    "config", [CONFIGS[0], *(pytest.param(c, marks=pytest.mark.heavy) for c in CONFIGS[1:])], ids=str
)
def test_texts_match_their_grammars_beside_free_ones(config):
    one = engine(**config)
    alone = one.submit("free", FREE).result()
    asks = [
        with_grammar(1, json_schema=PERSON),
        with_grammar(2, regex=r"[a-f]{3}-\d{4}"),
        with_grammar(3, choice=["yes", "no", "yes, but"]),
        with_grammar(4, lark='start: "(" start ")" | "x"', sampling=dataclasses.replace(HOT, temperature=0.1)),
    ]
    streams = [one.submit("free", FREE), *(one.submit("p", ask) for ask in asks)]
    free, person, code, choice, nested = (stream.result() for stream in streams)
    assert free.tokens == alone.tokens and free.finish == alone.finish
    about = json.loads(person.text)
    assert set(about) == {"age", "name"} and 0 <= about["age"] <= 150 and len(about["name"]) <= 8
    assert re.fullmatch(r"[a-f]{3}-\d{4}", code.text) and code.finish is Finish.STOP
    assert choice.text in ("yes", "no", "yes, but") and choice.finish is Finish.STOP
    depth = nested.text.count("(")
    ended = nested.text == "(" * depth + "x" + ")" * depth
    assert ended if nested.finish is Finish.STOP else nested.text.startswith("(" * 60)


def test_every_text_of_a_schema_is_valid():
    one = engine(slots=8)
    texts = [one.submit("p", with_grammar(seed, json_schema=PERSON)) for seed in range(24)]
    for completion in (text.result() for text in texts):
        assert completion.finish is Finish.STOP
        about = json.loads(completion.text)
        assert list(about) == ["age", "name"] and isinstance(about["age"], int) and len(about["name"]) <= 8


def test_a_text_that_can_go_on_ends_at_an_end_token_only():
    """`yes` may be the whole text, or the beginning of `yes, but`."""
    one = engine(slots=8)
    texts = [one.submit("p", with_grammar(seed, choice=["yes", "yes, but"])).result() for seed in range(24)]
    assert {text.text for text in texts} == {"yes", "yes, but"}
    assert {text.end for text in texts if text.text == "yes"} == {VOCABULARY.eos_id}
    assert {text.end for text in texts if text.text == "yes, but"} == {None}


def test_a_schema_that_is_true_asks_for_any_object():
    texts = [engine().submit("p", with_grammar(seed, json_schema=True)).result() for seed in range(3)]
    assert all(text.text.lstrip().startswith("{") for text in texts)


def test_an_end_token_of_a_request_ends_a_text_with_a_grammar_too():
    letter = VOCABULARY.encode("!")[0]
    texts = [engine().submit("p", with_grammar(seed, regex="a{2,}"), ends=(letter,)).result() for seed in range(6)]
    assert all(set(text.text) <= {"a"} for text in texts)
    assert {text.end for text in texts if text.finish is Finish.STOP} <= {letter, VOCABULARY.eos_id}
    assert any(text.end == letter for text in texts)


def test_a_grammar_waits_for_the_end_of_a_thought():
    tags = ("<t>", "</t>")
    asked = dataclasses.replace(HOT, thinking_tags=tags, thinking_tokens=5, grammar=Grammar(choice=["yes", "no"]))
    text = engine().submit("why <t>", asked).result().text
    thought, _, answer = text.partition("</t>")
    assert len(thought.encode()) >= 1 and answer in ("yes", "no")
    closed = engine().submit("why <t> so </t>", asked).result().text
    assert closed in ("yes", "no")


def test_a_text_does_not_end_in_the_thought_before_its_grammar():
    asked = dataclasses.replace(HOT, thinking_tags=("<t>", "</t>"), thinking_tokens=5, grammar=Grammar(choice=["yes"]))
    ending = dataclasses.replace(asked, logit_bias={VOCABULARY.eos_id: 100.0})
    assert engine().submit("why <t>", ending).result().text.endswith("</t>yes")


def test_any_text_can_be_a_choice():
    texts = ["\x00", "\x7f", "\\", '"', "\n", "\u2028", "\U0010ffff", "a | b", "<[3]>"]
    one = engine(slots=8)
    streams = [one.submit("p", with_grammar(choice=[text])) for text in texts]
    assert [stream.result().text for stream in streams] == texts


def test_what_follows_has_the_same_matchers():
    """Every process of a mesh masks by the tokens that it receives itself."""
    asked = Submission(
        [5, 6], with_grammar(1, json_schema=PERSON, sampling=dataclasses.replace(HOT, logit_bias={7: 1.5})), (), 0
    )
    packed = json.loads(json.dumps(Orders([asked], [], 1, 0).packed()))
    assert Orders.of(packed).submitted[0].sampling == asked.sampling


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"json_schema": '{"type": "objec"}'}, "Invalid type: objec"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems, must be of at most four values"),
        ({"json_schema": "{"}, "Grammar.json_schema is no JSON"),
        ({"json_schema": "[1]"}, "Grammar.json_schema is [1], must be an object"),
        ({"json_schema": {"$ref": "https://example.com/x.json"}}, "example.com"),
        ({"json_schema": {"type": "string", "pattern": "(?=a)b"}}, "look-around"),
        ({"regex": "(a"}, "unclosed group"),
        ({"lark": "start: missing"}, "unknown name"),
        ({"regex": "a" * (2**18 + 1)}, "Grammar.regex has 262145 characters, must have at most 262144"),
        ({"choice": [str(i) for i in range(2000)]}, "Grammar.choice has 2000 texts, must have at most 1999"),
        ({"json_schema": {"$ref": "#"}}, "no text of this vocabulary matches"),
        ({"json_schema": {"multipleOf": 999_983}}, "multipleOf with 999983 remainders, must have at most 32768"),
        ({"json_schema": {"allOf": [{"multipleOf": 901}, {"multipleOf": 992}]}}, "893792 remainders"),
        ({"json_schema": {"multipleOf": 6552.99}}, "multipleOf with 655299 remainders"),
        ({"json_schema": {"properties": {str(i): {} for i in range(1025)}}}, "an object of 1025 keys"),
        ({"json_schema": {"anyOf": [{"const": {}}] * 5000}}, "has 10001 objects, must have at most 8192"),
        (
            {"json_schema": {"patternProperties": {f"^x{i}": {} for i in range(91)}}},
            "has 91 patternProperties that are compared 8281 times, must be at most 8192",
        ),
        (
            {"json_schema": {"allOf": [{"patternProperties": {f"^x{i}": {}}} for i in range(30)]}},
            "has 30 patternProperties that are compared 27030 times",
        ),
        ({"lark": 'start: %json {"title": "%json", "items": {"multipleOf": 999983}}'}, "999983 remainders"),
        ({"json_schema": {"const": 2**53 + 1}}, "has 9007199254740993, must have integers that a float64 can hold"),
        ({"json_schema": {"type": "integer", "minimum": 10**20, "maximum": 10**20 + 3}}, "that a float64 can hold"),
        ({"json_schema": {"type": "integer", "minimum": 1e20, "maximum": 1e21}}, "1e+20, must be below 2**63"),
    ],
    ids=range(22),
)
def test_a_malformed_grammar_is_refused_in_one_line(fields, message):
    with pytest.raises(UserError) as raised:
        engine().submit("p", with_grammar(**fields))
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "schema, text",
    [
        ({"type": "string", "format": "uri-reference", "maxLength": 3}, r'"[^"]*"'),
        ({"type": "string", "format": "iri", "enum": ["a/b"]}, '"a/b"'),
        ({"type": "array", "items": {"enum": [1]}, "minItems": 2.0, "maxItems": 2.0}, r"\[\s*1\s*,\s*1\s*\]"),
        ({"anyOf": [{"type": "null", "format": "regex"}]}, "null"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"const": "c", "format": "other"}}}, '"c"'),
        ({"const": 2**60, "default": 2**60 + 1}, "1152921504606846976"),
    ],
    ids=range(6),
)
def test_what_changes_no_document_is_no_reason_to_refuse_a_schema(schema, text):
    """Formats are annotations, and 2.0 is the integer 2."""
    assert re.fullmatch(text, engine().submit("p", with_grammar(json_schema=schema)).result().text)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: Grammar(), "Grammar has no field set, must have exactly one of"),
        (lambda: Grammar(regex="a", lark="b"), "Grammar has regex and lark set"),
        (lambda: Grammar(choice=()), "Grammar.choice is ()"),
        (lambda: Grammar(choice="yes"), "Grammar.choice ('yes') must be"),
        (lambda: Grammar(json_schema=False), "which no text matches"),
        (lambda: Sampling(logit_bias={-1: 1.0}), "Sampling.logit_bias has -1: 1.0"),
        (lambda: Sampling(logit_bias={1: float("nan")}), "Sampling.logit_bias has 1: nan"),
        (lambda: Sampling(presence_penalty=float("inf")), "Sampling.presence_penalty is inf"),
        (lambda: Sampling(min_new_tokens=9, max_new_tokens=8), "Sampling.min_new_tokens is 9"),
        (lambda: Sampling(temperature=0, beams=BeamSearch(), grammar=Grammar(regex="a")), "Sampling.grammar is"),
    ],
    ids=range(10),
)
def test_options_that_cannot_be_are_refused(build, message):
    with pytest.raises(UserError, match=re.escape(message)):
        build()


@pytest.mark.parametrize("biases", [{"a": 1.0}, 3, {"6": "x"}], ids=str)
def test_biases_of_a_file_that_are_none_are_refused(biases):
    with pytest.raises(UserError, match="Sampling.logit_bias"):
        of_values({"logit_bias": biases})


def test_a_bias_of_an_id_without_a_row_is_refused():
    with pytest.raises(UserError, match="Sampling.logit_bias has token 384, must be from 0 to 383"):
        engine().submit("p", Sampling(logit_bias={384: 1.0}))


def test_biases_and_penalties_are_those_of_the_formula():
    """(logit + bias), then the repetition penalty, then - frequency * count - presence * [count > 0]."""
    logits = jnp.asarray([[2.0, -1.0, 0.5, 0.4], [1.0, 0.9, 0.8, 0.0], [1.0, 0.9, 0.0, 0.0]])
    rows = settings_of(
        [
            Sampling(temperature=0, logit_bias={1: 3.5}, repetition_penalty=2.0),
            Sampling(temperature=0, frequency_penalty=0.1, presence_penalty=0.05),
            Sampling(temperature=0, presence_penalty=0.05),
        ]
    )
    history = History(
        jnp.asarray([[True, False, False, False], [False] * 4, [False] * 4]),
        jnp.asarray([[3, 0, 0, 0], [2, 1, 0, 0], [3, 0, 0, 0]], jnp.int32),
        jnp.asarray([[0.0, 3.5, 0.0, 0.0], [0.0] * 4, [0.0] * 4]),
    )
    # Row 0: 2 / 2, -1 + 3.5, ...; row 1: 1 - 0.25, 0.9 - 0.15, 0.8, 0; row 2: 1 - 0.05, 0.9, ...
    assert choose(logits, rows, jnp.zeros(3, jnp.int32), history)[0].tolist() == [1, 2, 0]


@pytest.mark.parametrize(
    "config", [{"decode_steps": 1}, {"decode_steps": 4}, {"draft_tokens": 3, "page_size": 32}], ids=str
)
def test_penalties_count_the_tokens_of_the_text_alone(config):
    """Against a loop over the model: the prompt's tokens do not count, and each time that a token is chosen does."""
    sampling = Sampling(
        temperature=0, max_new_tokens=20, frequency_penalty=0.7, presence_penalty=0.4, logit_bias={70: 2.5}
    )
    prompt = [*VOCABULARY.begin_ids, 70, 70, 70, 70]  # the token with the bias
    text: list[int] = []
    positions, segments = np.arange(64, dtype=np.int32)[None], np.ones((1, 64), np.int32)
    batch = {"positions": positions, "segment_ids": segments}
    forward = jax.jit(lambda params, tokens: MODEL.logits(params, batch | {"tokens": tokens}))
    for _ in range(20):
        logits = np.asarray(scores(forward, [*prompt, *text]))[: VOCABULARY.size].copy()
        logits[70] += 2.5
        counts = np.bincount(text, minlength=len(logits))
        text.append(int(np.argmax(logits - 0.7 * counts - 0.4 * (counts > 0))))
    assert engine(**config).submit(prompt, sampling).result().tokens == text


@pytest.mark.parametrize(
    "options", [{"frequency_penalty": 0.7, "presence_penalty": 0.4}, {"logit_bias": {70: 100.0}}], ids=str
)
def test_a_row_that_is_read_again_keeps_its_bias_and_counts(options):
    sampling, prompts = Sampling(temperature=0, max_new_tokens=90, **options), ("a", "bb", "ccc")
    wide, tight = engine(), engine(page_size=8, pages=26)
    alone, together = ([one.submit(prompt, sampling) for prompt in prompts] for one in (wide, tight))
    assert [text.result().tokens for text in together] == [text.result().tokens for text in alone]
    assert tight.statistics.preempted


def scores(forward, tokens):
    padded = np.zeros((1, 64), np.int32)
    padded[0, : len(tokens)] = tokens
    return forward(params(), padded)[0, len(tokens) - 1]


@pytest.mark.parametrize("config", [{}, {"decode_steps": 4}, {"draft_tokens": 3}], ids=str)
def test_a_text_ends_right_after_its_minimum(config):
    """Neither guesses nor several tokens of one program make it longer."""
    letter, one = VOCABULARY.encode("a")[0], engine(**config)
    biased = dataclasses.replace(FREE, temperature=0, logit_bias={VOCABULARY.eos_id: 100.0, letter: 50.0})
    asks = [dataclasses.replace(biased, min_new_tokens=least) for least in (1, 2, 3, 6)]
    texts = [one.submit("aaaaaaaaaaaa", ask).result().text for ask in asks]
    assert texts == ["a", "a" * 2, "a" * 3, "a" * 6]


def test_an_end_without_a_row_in_the_model_never_comes():
    model = api.build(dataclasses.replace(MODEL.config, vocab_size=64))
    small = Engine(model, jax.jit(model.init)(jax.random.key(0)), VOCABULARY, LENGTH)
    asked = dataclasses.replace(HOT, max_new_tokens=4, min_new_tokens=2, grammar=Grammar(regex="[0-9]{4}"))
    assert small.submit([3], asked, ends=(300,)).result().text.isdigit()


def test_a_text_has_at_least_its_minimum():
    ends = tuple(range(384))  # every token ends a text
    minimum = dataclasses.replace(FREE, min_new_tokens=0)
    assert len(engine().submit("p", minimum, ends=ends).result().tokens) == 0
    letter = VOCABULARY.encode("a")[0]
    biased = dataclasses.replace(FREE, logit_bias={VOCABULARY.eos_id: 100.0, letter: 50.0})
    short = engine().submit("p", biased).result()
    assert (len(short.tokens), short.end) == (0, VOCABULARY.eos_id)
    longer = engine().submit("p", dataclasses.replace(biased, min_new_tokens=7)).result()
    assert (longer.text, longer.end) == ("a" * 7, VOCABULARY.eos_id)
