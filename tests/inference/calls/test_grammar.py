"""Grammars of tool_choice: whatever a model says that keeps to one is read as calls that the schema allows."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from capibara.core.types import UserError
from capibara.data.tokenizers.vocabulary import TokenizerJsonVocabulary
from capibara.inference.calls.dialect import Dialect
from capibara.inference.calls.forms import table
from capibara.inference.grammars.matcher import Grammars
from capibara.inference.sampling.text import TextStream
from tests.inference.calls import turns

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {
                    "tag": {"enum": ["red", "a </b"]},
                    "word": {"type": "string", "maxLength": 5},
                    "count": {"type": "integer", "minimum": -50, "maximum": 50},
                    "flag": {"type": "boolean"},
                    "rows": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 2},
                    "any": {"anyOf": [{"type": "string"}, {"type": "integer", "maximum": 9}, {"type": "null"}]},
                },
                "required": ["count", "tag"],
            },
        },
    },
    {"type": "function", "function": {"name": "get-time", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "none"}},
]
TYPES = {"count": int, "flag": bool, "rows": list, "word": str, "tag": str}


def vocabulary_of(folder, marks):
    """Bytes, and these markers as special tokens."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in ["<|eos|>", *sorted(marks)]])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eos|>"}))
    return TokenizerJsonVocabulary(path=str(folder), bos_token="<|eos|>", pad_token="<|eos|>")


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """All markers of all forms are special tokens."""
    marks = {mark for form in table.FORMS for mark in (*form.begins, *form.tokens)}
    singles = [mark for mark in marks if mark[:2] in ("<|", "<｜", "[T", "[A") and mark.count("<") <= 1]
    return vocabulary_of(tmp_path_factory.mktemp("tokenizer"), singles)


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory):
    """No marker is a token."""
    return vocabulary_of(tmp_path_factory.mktemp("bytes"), ())


CLOSERS = (
    "</parameter>",
    "</｜DSML｜parameter>",
    "</｜DSML｜ parameter>",
    "</atem:parameter>",
    "</arg_value>",
    "<escape>",
    "</steptml:parameter>",
    "</param>",
    "</ifm|arg_value>",
    "]<]minimax[>[</word>",
    "<|close|>argument<|sep|>",
    '<|"|>',
)


@functools.cache
def closers_of(form):
    return [closer.encode() for closer in CLOSERS if any(mark and mark in closer for mark in form.tokens)]


def continues(form, written):
    """The next byte of a form's closing tag that the text may have begun, of the longest beginning first."""
    closers = closers_of(form)
    for size in range(max(map(len, closers), default=0) - 1, -1, -1):
        for closer in closers:
            if size < len(closer) and written.endswith(closer[:size]):
                yield closer[size : size + 1]


@functools.cache
def grammars_of(vocabulary):
    """Its grammars, and the bytes of each token."""
    return Grammars(vocabulary), [vocabulary.bytes_of([token]) for token in range(vocabulary.size)]


def spoken(vocabulary, dialect, grammar, draw, most=5000):
    """A random text that keeps to a grammar; ends are likely, so that it is short."""
    grammars, pieces = grammars_of(vocabulary)
    matcher, names = grammars.matcher(grammar), {token: vocabulary.spelling(token) for token in dialect.spelled}
    stream, row, text = TextStream(vocabulary, (), names), np.zeros(-(-vocabulary.size // 32), np.uint32), ""
    written = b""
    for _ in range(most):
        if matcher.complete:
            return text + stream.close()
        matcher.allow(row, frozenset({vocabulary.eos_id}))
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[: vocabulary.size]).tolist()
        special = [token for token in allowed if token == vocabulary.eos_id or token in names]
        closing = [token for byte in continues(dialect.form, written) for token in allowed if pieces[token] == byte][:1]
        ends = special + closing or [token for token in allowed if pieces[token] in (b'"', b"}", b"]")] or allowed
        token = int(draw.choice(ends if draw.random() < 0.9 else allowed))
        if token == vocabulary.eos_id or (vocabulary.eos_id in allowed and draw.random() < 0.5):
            return text + stream.close()
        matcher.accept(token)
        text += stream.feed(token)
        written += pieces[token]
    raise AssertionError(f"no end: {text!r}")


def check(calls, names):
    for name, written in calls:
        arguments = json.loads(written)
        assert name in names
        if name == "look":
            assert {"count", "tag"} <= set(arguments), "those that are required"
            assert -50 <= arguments["count"] <= 50 and arguments["tag"] in ("red", "a </b")
            assert all(type(arguments[key]) is kind for key, kind in TYPES.items() if key in arguments), arguments
        elif name == "get-time":
            assert arguments == {}


@pytest.mark.parametrize("form", table.FORMS, ids=lambda form: form.name)
def test_what_keeps_to_a_grammar_is_read_as_calls(vocabulary, form):
    ids = {name: token for token in range(vocabulary.size) if (name := vocabulary.spelling(token))}
    dialect, draw = Dialect(form, None, ids), np.random.default_rng(0)
    for parallel, names in ((False, ["look"]), (False, ["get-time"]), (True, ["look", "get-time"])):
        grammar = dialect.grammar(TOOLS, names, parallel)
        for _ in range(2):
            text = spoken(vocabulary, dialect, grammar, draw)
            message, deltas = turns.read(dialect, text, False, "characters", tools=TOOLS)
            content, thought, calls = turns.in_whole(message)
            assert (content, thought) == ("", "") and calls and (parallel or len(calls) == 1), text
            check(calls, names)
            assert turns.joined(deltas) == (content, thought, calls)


WORDS = [
    {
        "type": "function",
        "function": {
            "name": "say",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string"}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["word", "count"],
            },
        },
    }
]


@pytest.mark.parametrize("tokens", ["vocabulary", "of_bytes"])
@pytest.mark.parametrize("form", table.FORMS, ids=lambda form: form.name)
def test_any_text_comes_to_an_end_and_another_argument_follows(form, tokens, request):
    vocabulary, draw = request.getfixturevalue(tokens), np.random.default_rng(1)
    ids = {name: token for token in range(vocabulary.size) if (name := vocabulary.spelling(token))}
    dialect = Dialect(form, None, ids)
    grammar = dialect.grammar(WORDS, ["say"], False)
    for _ in range(2):
        text = spoken(vocabulary, dialect, grammar, draw)
        _, _, ((name, arguments),) = turns.in_whole(turns.read(dialect, text, False, "whole", tools=WORDS)[0])
        assert name == "say" and {key: type(value) for key, value in json.loads(arguments).items()} == {
            "word": str,
            "count": int,
        }, text


class Uniform:
    """Draws all tokens alike."""

    def __init__(self, seed):
        self.choice = np.random.default_rng(seed).choice

    def random(self):
        return 0.95


def dialect_in(vocabulary, form):
    return Dialect(
        form, None, {name: token for token in range(vocabulary.size) if (name := vocabulary.spelling(token))}
    )


def arguments_of(vocabulary, form, schema, draw, parallel=False):
    """The argument of each call in a random text."""
    parameters = {"type": "object", "properties": {"k": schema}, "required": ["k"], "$defs": DEFINITIONS}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    dialect = dialect_in(vocabulary, form)
    text = spoken(vocabulary, dialect, dialect.grammar(tools, ["f"], parallel), draw)
    content, _, calls = turns.in_whole(turns.read(dialect, text, False, "whole", tools=tools)[0])
    assert not content and calls, text
    return [json.loads(arguments)["k"] for _, arguments in calls]


DEFINITIONS = {"color": {"type": "string", "enum": ["red", "dark red"]}}
COLOR = {"$ref": "#/$defs/color"}
CHOICES = [
    (COLOR, ["red", "dark red"]),
    ({"anyOf": [COLOR, {"type": "null"}]}, ["red", "dark red", None]),
    ({"allOf": [COLOR, {"enum": ["red", "blue"]}]}, ["red"]),
    ({"const": "red"}, ["red"]),
    ({"type": ["string", "integer"], "enum": ["1", "b", 2]}, ["1", "b", 2]),
    ({"enum": ["", "a", "a<"]}, ["", "a", "a<"]),
    ({"enum": ["\x7f", 'q"\\', "\u2028\n"]}, ["\x7f", 'q"\\', "\u2028\n"]),
]


@pytest.mark.parametrize("tokens", ["vocabulary", "of_bytes"])
@pytest.mark.parametrize("form", table.FORMS, ids=lambda form: form.name)
def test_a_text_is_one_that_its_schema_names(form, tokens, request):
    vocabulary = request.getfixturevalue(tokens)
    for seed, (schema, choices) in enumerate(CHOICES):
        assert arguments_of(vocabulary, form, schema, Uniform(seed))[0] in choices


@pytest.mark.parametrize("form", table.FORMS, ids=lambda form: form.name)
def test_a_choice_that_another_begins_with_can_be_written(of_bytes, form):
    draw = Uniform(0)
    assert {arguments_of(of_bytes, form, {"enum": ["a", "a<"]}, draw)[0] for _ in range(10)} == {"a", "a<"}


@pytest.mark.parametrize("tokens", ["vocabulary", "of_bytes"])
@pytest.mark.parametrize("form", table.FORMS, ids=lambda form: form.name)
def test_several_calls_may_follow_each_other(form, tokens, request):
    vocabulary, draw = request.getfixturevalue(tokens), Uniform(0)
    assert any(len(arguments_of(vocabulary, form, {"type": "boolean"}, draw, True)) > 1 for _ in range(16))


def accepts(vocabulary, form, text, schema):
    """Whether a text keeps to a grammar."""
    parameters = {"type": "object", "properties": {"k": schema}, "required": ["k"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    matcher = Grammars(vocabulary).matcher(dialect_in(vocabulary, form).grammar(tools, ["f"], False))
    row = np.zeros(-(-vocabulary.size // 32), np.uint32)
    for token in vocabulary.encode(text):
        matcher.allow(row, frozenset({vocabulary.eos_id}))
        if not row[token // 32] >> (token % 32) & 1:
            return False
        matcher.accept(token)
    return matcher.complete


def form_of(name):
    (form,) = [form for form in table.FORMS if form.name == name]
    return form


def test_a_forced_text_of_minicpm_5_may_be_quoted_and_its_quotes_are_closed(of_bytes):
    form, call = form_of("minicpm 5"), '<function name="f"><param name="k">{}</param></function>'
    for value, allowed in (
        ("<![CDATA[a </param></function> <b>]]>", True),
        ("<![CDATA[]]>", True),
        ("<![CDATA [a", True),
        ("a <![CDATA[", True),
        ("<![CDATA[a", False),
        ("<![CDATA[a]]> b", False),
    ):
        assert accepts(of_bytes, form, call.format(value), {"type": "string"}) is allowed, value


NAMES = [
    ("qwen xml", "a>b", "a>b"),
    ("k2 horizon", "a\nb", "a</ifm|arg_key>"),
    ("kimi k3", "a<|sep|>", "a<|sep|>"),
    ("gemma 4", "a{b", "a:b"),
    ("lfm2", "a(b", "a=b"),
    ("mistral", "a{b", None),
    ("functionary", "a>b", None),
    ("harmony", "a b", None),
    ("hermes", " a", None),
    ("hermes", "a" * 300, None),
    ("hermes", "", None),
]


@pytest.mark.parametrize(("form", "name", "key"), NAMES)
def test_a_name_that_would_be_read_otherwise_is_refused(form, name, key):
    parameters = {"type": "object", "properties": {} if key is None else {key: {"type": "boolean"}}}
    cases = [(name, {"type": "object"}, "the name")] + ([] if key is None else [("f", parameters, "the argument")])
    for tool, schema, what in cases:
        tools = [{"type": "function", "function": {"name": tool, "parameters": schema}}]
        with pytest.raises(UserError, match=f"{what} .*, which the model's calls cannot write"):
            Dialect(form_of(form)).grammar(tools, [tool], True)


@pytest.mark.parametrize(
    ("form", "schema", "message"),
    [
        ("kimi k3", {"type": "text"}, "of type text, must be a type of JSON Schema"),
        ("qwen xml", {"type": "string", "enum": []}, "which no string matches"),
        ("minimax m3", {"type": "string", "enum": [1]}, "which no string matches"),
        ("gemma 4", {"type": "string", "const": 1}, "which no string matches"),
    ],
)
def test_a_schema_that_no_argument_matches_is_refused(form, schema, message):
    parameters = {"type": "object", "properties": {"k": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(UserError, match=message):
        Dialect(form_of(form)).grammar(tools, ["f"], True)


def test_half_of_a_surrogate_pair_is_left_out_of_a_grammar(of_bytes):
    assert arguments_of(of_bytes, form_of("qwen xml"), {"enum": ["\ud800a"]}, Uniform(0)) == ["a"]


def test_an_unknown_form_is_refused():
    with pytest.raises(UserError, match="form of the model's calls is not known: leave tool_choice out"):
        Dialect().grammar(TOOLS, ["look"], True)


def test_every_literal_of_a_call_is_a_token_where_the_tokenizer_has_it():
    (form,) = [form for form in table.FORMS if form.name == "hy 3"]
    marks = ("<tool_calls>", "<tool_call>", "<tool_sep>", "<arg_key>", "</arg_value>", "</tool_calls>")
    dialect = Dialect(form, None, {mark: number for number, mark in enumerate(marks, 500)})
    assert {*range(500, 506)} <= {*dialect.spelled}, "a special token that is not spelled is not in the text"


def test_a_schema_may_describe_a_grammar(vocabulary):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "description": "root ::= 1"}}}
    for form in table.FORMS:
        ids = {name: token for token in range(vocabulary.size) if (name := vocabulary.spelling(token))}
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        Grammars(vocabulary).matcher(Dialect(form, None, ids).grammar(tools, ["f"], False))
