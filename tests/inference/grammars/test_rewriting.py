"""Keywords that llguidance lacks: which texts the grammars of their schemas write, and what jsonschema says of random ones."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import time

import jsonschema
import numpy as np
import pytest

from capibara.core.types import UserError
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.grammars import disjoint, schemas
from capibara.inference.grammars.matcher import Grammars
from capibara.inference.sampling.grammar import Grammar

VOCABULARY = ByteVocabulary()
ENDS = frozenset({VOCABULARY.eos_id})
LETTER = {chr(byte): VOCABULARY.encode(chr(byte))[0] for byte in range(32, 127)}
PAIR = {"properties": {"a": True, "b": True, "c": True}}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "a": {}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}, "b": {}}, "required": ["kind"]}
TREE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/t"}}}
# Keywords, texts that match, and texts that do not.
CASES = {
    "not a type": ({"not": {"type": ["string", "object"]}}, ["1", "null", "[]"], ['"a"', "{}"]),
    "not values": ({"not": {"enum": [5, "foo", True, []]}}, ["6", '"fo"', '"fooo"', "false", "[0]", "4.9"], ["5", "5.0", '"foo"', "true", "[]"]),
    "not a property": ({"not": {"required": ["a"]}, **PAIR}, ['{"b":1}'], ['{"a":1}', "3"]),
    "not a property's value": ({"not": {"properties": {"a": {"type": "null"}}}}, ['{"a":1}'], ['{"a":null}', "{}", "3"]),
    "not bounds": ({"not": {"minimum": -3, "maxLength": 1}}, ["-4", '"ab"'], ["-3", "0", '"a"', "null"]),
    "not exclusive bounds": ({"not": {"exclusiveMinimum": 3}}, ["3", "2"], ["3.5", "4"]),
    "not a condition": ({"not": {"if": {"type": "null"}, "then": True, "else": {"type": "string"}}}, ["1"], ['"a"', "null"]),
    "not few items that are counted": ({"not": {"contains": {"type": "null"}, "maxContains": 1}}, ["[null,null]", "[]", "[1]"], ["[null]", "[null,1]"]),
    "not a tuple": ({"not": {"prefixItems": [{}, {}], "items": False}}, ["[1,2,3]"], ["[1,2]", "[]"]),
    "not a closed object": ({"not": {"properties": {"a": {}}, "additionalProperties": False}}, ['{"a":1,"b":2}', '{"b":1}'], ['{"a":1}', "{}"]),
    "not items": ({"not": {"items": {"type": "null"}}}, ["[1]", "[null,2]"], ["[]", "[null]", "{}"]),
    "not not": ({"not": {"not": {"type": "null"}}}, ["null"], ["1"]),
    "not a reference": ({"not": {"$ref": "#/$defs/t"}, "$defs": {"t": TREE}}, ['{"next":1}', "1", '{"next":{"next":2}}'], ["{}", '{"next":{}}']),
    "one of two names": ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}], **PAIR, "type": "object"}, ['{"a":1}', '{"b":1,"c":2}'], ['{"a":1,"b":1}', "{}"]),
    "one of two kinds": ({"oneOf": [CAT, DOG]}, ['{"kind":"cat"}', '{"kind":"wolf"}'], ['{"kind":"cow"}', "{}"]),
    "one of two that are closed": (
        {"oneOf": [{"type": "object", "properties": {n: {}, "c": {}}, "additionalProperties": False} for n in "ab"]},
        ['{"a":1}', '{"b":1,"c":1}'], ['{"c":1}', "{}", '{"a":1,"b":1}'],
    ),
    "one of three whose type is beside them": (
        {"type": "object", "oneOf": [{"required": ["t"], "properties": {"t": {"enum": [n]}, n: {"type": "number"}}} for n in ("ab", "ac", "b")]},
        ['{"t":"ab","ab":1}', '{"t":"b"}'], ['{"t":"ab","ab":"x"}', '{"t":"c"}', "{}", "1"],
    ),
    "one of two that are no objects of a kind": ({"oneOf": [{"required": ["t"], "properties": {"t": {"const": n}}} for n in "ab"]}, ['{"t":"a"}'], ["1", '{"t":"c"}']),
    "one of two that are closed with many names": (
        {"oneOf": [{"type": "object", "properties": dict.fromkeys("cdefg" + n, {}), "additionalProperties": False} for n in "ab"]},
        ['{"c":1,"a":1}', '{"c":1,"b":1}'], ['{"c":1}', "{}", '{"a":1,"b":1}'],
    ),
    "a condition": ({"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"type": "null"}}, ['"ab"', "null"], ['"a"', "1"]),
    "a condition of a property": ({**PAIR, "if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"required": ["b"]}}, ['{"a":1,"b":2}', '{"a":2}', "{}"], ['{"a":1}']),
    "names that others need": ({**PAIR, "dependentRequired": {"b": ["c"]}}, ['{"b":1,"c":1}', '{"a":1}'], ['{"b":1}']),
    "schemas that names need": ({**PAIR, "dependentSchemas": {"a": {"required": ["c"]}}}, ['{"a":1,"c":1}', '{"b":1}'], ['{"a":1,"b":1}']),
    "names by a pattern": ({"propertyNames": {"pattern": "^x"}, "properties": {"y": {}}}, ['{"x":1}', "{}"], ['{"y":1}', '{"z":1}']),
    "names of a list": ({"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "null"}}, ['{"a":null}'], ['{"a":1}', '{"c":null}']),
    "names of no length": ({"propertyNames": {"minLength": 3, "maxLength": 2}}, ["{}", "1"], ['{"ab":1}', '{"abc":1}']),
    "not a long value": ({"not": {"const": "x" * 80}}, [f'"{"x" * 79}"', f'"{"x" * 79}y"'], [f'"{"x" * 80}"']),
    "names by their length": ({"propertyNames": {"maxLength": 2}}, ['{"ab":1}'], ['{"abc":1}']),
    "an item": ({"contains": {"type": "null"}}, ["[null]", "[1,null,2]", "3"], ["[]", "[1]"]),
    "items that are counted": ({"contains": {"type": "null"}, "minContains": 2, "maxContains": 3}, ["[null,1,null]"], ["[null]", "[null,null,null,null]"]),
    "no item": ({"contains": {"type": "null"}, "minContains": 0, "maxContains": 0}, ["[]", "[1]"], ["[null]"]),
    "items that differ": ({"uniqueItems": True, "items": {"enum": ["a", "b", 3]}}, ["[]", '["b",3]'], ['["a","a"]', '["a","b",3,"a"]']),
    "nothing else": ({"allOf": [{"properties": {"a": {}}}], "properties": {"b": {}}, "unevaluatedProperties": False}, ['{"b":1,"a":1}'], ['{"c":1}']),
    "nothing else than a branch has": (
        {"anyOf": [{"required": ["a"], "properties": {"a": {}}}, {"required": ["b"], "properties": {"b": {}}}], "unevaluatedProperties": False},
        ['{"a":1}', '{"a":1,"b":1}'], ['{"a":1,"c":1}', "{}"],
    ),
    "nothing else than a condition has": (
        {"if": {"required": ["a"], "properties": {"a": {}}}, "then": {"properties": {"b": {}}}, "else": {"properties": {"c": {}}}, "unevaluatedProperties": False, "properties": {"a": {}}},
        ['{"a":1,"b":1}', '{"c":1}'], ['{"a":1,"c":1}', '{"b":1}'],
    ),
    "no other item": ({"$ref": "#/$defs/t", "unevaluatedItems": False, "$defs": {"t": {"prefixItems": [{}, {}]}}}, ["[1,2]"], ["[1,2,3]"]),
    "a dynamic reference": ({"$dynamicAnchor": "n", "properties": {"a": {"$dynamicRef": "#n"}}, "type": "object"}, ['{"a":{"a":{}}}'], ['{"a":{"a":1}}']),
    "dependencies of draft 7": ({"$schema": "http://json-schema.org/draft-07/schema#", **PAIR, "dependencies": {"a": ["b"], "b": {"required": ["c"]}}}, ['{"a":1,"b":1,"c":1}', '{"c":1}'], ['{"a":1}', '{"b":1}']),
    "a condition of draft 6": ({"$schema": "http://json-schema.org/draft-06/schema#", "if": {"type": "null"}, "then": False}, ["null", "1"], []),
    "a reference with escapes": ({"not": {"$ref": "#/$defs/a~1b~0c%25"}, "$defs": {"a/b~c%": {"type": "null"}, "a~1b~0c%": True}}, ["1"], ["null"]),
    "a reference of draft 7 is alone": ({"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"a": {"$ref": "#/definitions/t", "not": {}}}, "definitions": {"t": {"type": "null"}}, "not": {"required": ["b"]}}, ['{"a":null}'], ['{"a":1}']),
}  # fmt: skip


@functools.cache
def grammars():
    return Grammars(VOCABULARY)


def writes(schema, text):
    """Whether the grammar of a schema can write a text."""
    matcher, row = (
        grammars().matcher(Grammar(json_schema=json.dumps(schema))),
        np.zeros(-(-VOCABULARY.size // 32), np.uint32),
    )
    for token in (*VOCABULARY.encode(text), VOCABULARY.eos_id):
        if token == VOCABULARY.eos_id and matcher.complete:
            return True
        matcher.allow(row, ENDS)
        if not row[token // 32] >> (token % 32) & 1:
            return False
        if token != VOCABULARY.eos_id:
            matcher.accept(token)
    return True


@pytest.mark.parametrize("name", CASES)
def test_a_schema_writes_what_matches_and_nothing_else(name):
    schema, matching, others = CASES[name]
    valid = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema).is_valid
    assert all(valid(json.loads(text)) for text in matching) and not any(valid(json.loads(text)) for text in others)
    assert [text for text in matching if not writes(schema, text)] == []
    assert [text for text in others if writes(schema, text)] == []


def drawn(schema, rng):
    """A text that a grammar writes letter by letter; None: it is too long."""
    matcher, row = (
        grammars().matcher(Grammar(json_schema=json.dumps(schema))),
        np.zeros(-(-VOCABULARY.size // 32), np.uint32),
    )
    text = bytearray()
    for count in range(200):
        if matcher.complete:
            return text.decode()
        matcher.allow(row, ENDS)
        allowed = {*np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()}
        if VOCABULARY.eos_id in allowed and rng.random() < 0.3:
            return text.decode()
        closing = [LETTER[letter] for letter in '"}],:' if LETTER[letter] in allowed]
        likely = [LETTER[letter] for letter in 'abc013-.{["\\ut' if LETTER[letter] in allowed]
        chosen = closing if closing and rng.random() < 0.4 + count / 400 else likely or [*allowed - ENDS] or [*allowed]
        token = rng.choice(chosen)
        if token == VOCABULARY.eos_id:
            return text.decode()
        matcher.accept(token)
        text.append(token - LETTER["a"] + ord("a"))
    return None


@pytest.mark.parametrize("name", CASES)
def test_a_random_text_of_a_schema_matches_it(name):
    schema, rng = CASES[name][0], random.Random(name)
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    texts = [text for text in (drawn(schema, rng) for _ in range(8)) if text is not None]
    assert texts and [text for text in texts if not validator.is_valid(json.loads(text))] == []


def test_a_key_has_one_spelling():
    """llguidance takes an escaped name for another one, which then has the schema of other names."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "patternProperties": {"^x": {"type": "null"}}}
    assert writes(schema, '{"a":"b","c":1}')
    assert not any(writes(schema, text) for text in ('{"\\u0061":1}', '{"a":"b","\\u0061":1}', '{"\\u0078":1}'))
    assert writes({"type": "string"}, '"a\\n\\"é\\u0001"')


@pytest.mark.parametrize(
    "schema, message",
    [
        ({"type": "object", "minProperties": 2}, "minProperties 2 with 0 required"),
        ({"minProperties": 4, "required": ["a", "b"], "patternProperties": {"^x": {}}, "additionalProperties": False}, "minProperties 4"),
        ({"properties": {"a\x7f": {}}}, "with a control character"),
        ({"not": {}}, "matches no text"),
        ({"uniqueItems": True}, "uniqueItems"),
        ({"not": {"pattern": "a"}}, "pattern in a schema that must not match"),
        ({"not": {"type": "integer"}}, "the type integer"),
        ({"not": {"const": [1]}}, "a list or an object that must not match"),
        ({"not": {"$ref": "#/$defs/t"}, "$defs": {"t": {"uniqueItems": True}}}, "uniqueItems in a schema that must not match"),
        ({"not": {"$ref": "x.json"}}, "refers to 'x.json', which is not in it"),
        ({"$schema": "https://example.com/x", "not": {"type": "null"}}, "must be a draft of JSON Schema"),
        ({"not": {"enum": ["x" * 81]}}, "1 values of up to 81 characters that must not match"),
        ({"contains": {"type": "null"}, "minContains": -1}, "minContains -1, must be an integer of at least 0"),
        ({"contains": {"type": "null"}, "minContains": True}, "minContains True"),
        ({"not": {"minItems": 1.5}}, "minItems 1.5"),
        ({"contains": {"type": "null"}, "minContains": 9}, "contains of more than 8 items"),
        ({"propertyNames": {"not": {"pattern": "a"}}}, "propertyNames with not"),
        ({"anyOf": [{"properties": {f"{i}": {}}} for i in range(9)], "unevaluatedProperties": False}, "more than 64 ways"),
        ({"$defs": {"t": {"allOf": [{"$ref": "#/$defs/t"}]}}, "$ref": "#/$defs/t", "unevaluatedItems": False}, "references in each other"),
        ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "oneOf"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_refused_by_its_keyword(schema, message):
    with pytest.raises(UserError) as raised:
        grammars().matcher(Grammar(json_schema=json.dumps(schema)))
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"if": {"required": [f"a{i}"]}, "then": {"required": [f"b{i}"]}} for i in range(60)]},
        {"oneOf": [{"required": [f"a{i}"]} for i in range(100)]},
        {"dependentRequired": {f"a{i}": [f"b{i}"] for i in range(60)}},
        functools.reduce(lambda x, _: {"oneOf": [x, {"required": ["a"], "properties": {"a": x}}]}, range(12), {"type": "object"}),
        functools.reduce(lambda x, _: {"not": {"anyOf": [x, x]}}, range(16), {"type": "null"}),
        {"oneOf": [{"type": "object", "required": [f"a{k}" for k in range(900)], "properties": {f"a{k}": {} for k in range(900)}} for _ in range(60)]},
        {"$ref": "#/$defs/d0", "unevaluatedProperties": False, "$defs": {f"d{i}": {"allOf": 60 * [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(9)} | {"d9": {}}},
        {"oneOf": 2 * [{"$ref": "#/$defs/d0"}], "$defs": {f"d{i}": {"allOf": 60 * [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(9)} | {"d9": {"pattern": "a"}}},
        {"oneOf": 2 * [{"enum": [[i] for i in range(3000)]}]},
        {"not": {"const": "a" * 5000}},
    ],
)  # fmt: skip
def test_alternatives_of_alternatives_are_bounded(schema):
    begin_s = time.process_time()
    with pytest.raises(UserError):
        grammars().matcher(Grammar(json_schema=json.dumps(schema)))
    assert time.process_time() - begin_s < 1


def test_branches_that_their_common_type_keeps_apart_are_not_multiplied():
    """Each would be joined with all ways to match none of the others: a real schema took 2 s and 0.6 GB to be refused."""
    names = {n: {f"{n}{i}": {"type": "number"} for i in range(9)} for n in ("line", "bar", "area")}
    branches = [{"required": ["t"], "properties": {"t": {"enum": [n]}, **of}} for n, of in names.items()]
    schema = schemas.prepared(json.dumps({"type": "object", "oneOf": branches}))
    assert schema["allOf"] == [{"anyOf": branches}]
    assert "oneOf" not in schema and len(json.dumps(schemas.prepared(json.dumps({"oneOf": branches})))) > 5 * len(
        json.dumps(schema)
    )


def test_schemas_that_llguidance_reads_stay_as_they_are():
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/t"}}, "$defs": {"t": {"type": "null"}}}
    assert schemas.prepared(json.dumps(schema)) == schema


@pytest.mark.parametrize(
    "first, second, is_disjoint",
    [
        ({"type": "string"}, {"type": ["null", "integer"]}, True), ({"type": "number"}, {"type": "integer"}, False),
        ({"const": 1}, {"enum": [1.0, 2]}, False), ({"const": 1}, {"const": True}, True), ({"maximum": 1}, {"minimum": 2}, False),
        ({"type": "number", "maximum": 1}, {"type": "integer", "minimum": 2}, True), (CAT, DOG, True), (CAT, {"type": "object"}, False),
        (CAT, {"type": "object", "additionalProperties": False}, True), (CAT, {"type": "object", "patternProperties": {"": {}}, "additionalProperties": False}, False), ({"anyOf": [CAT, {"type": "null"}]}, DOG, True),
        (CAT, {"properties": {"kind": {"const": "dog"}}}, True), ({"allOf": [{"type": "null"}]}, {"type": "string"}, True),
    ],
)  # fmt: skip
def test_schemas_that_exclude_each_other(first, second, is_disjoint):
    assert disjoint.is_disjoint(first, second, disjoint.Reader(lambda _: True)) is is_disjoint
    assert disjoint.is_disjoint(second, first, disjoint.Reader(lambda _: True)) is is_disjoint


MALFORMED = [None, 5, "a", [5], {"a": 5}, [], {}, [{}], True]


@pytest.mark.parametrize(
    "key", sorted({key for schema, _, _ in CASES.values() for key in schema} | {"type", "enum", "additionalItems"})
)
def test_a_keyword_of_another_type_is_refused(key):
    """Or it has a meaning."""
    for value in MALFORMED:
        for schema in (
            {key: value, "not": {"type": "null"}},
            {"not": {key: value}},
            {"oneOf": [{key: value}] * 2},
            {"anyOf": [{key: value}], "unevaluatedItems": False},
        ):
            with contextlib.suppress(UserError):
                grammars().matcher(Grammar(json_schema=json.dumps(schema)))


def test_what_only_a_reference_reaches_is_read_to_its_end():
    schema = {
        "not": {"type": "null"},
        "$ref": "#/components/x",
        "components": {
            "x": {"items": {"items": {"$ref": "#/components/y"}}, "type": "array"},
            "y": {"not": {"const": 1}},
        },
    }
    assert writes(schema, "[[2]]") and not writes(schema, "[[1]]")
