"""Arguments that are written without types get those of the tool's schema."""

from __future__ import annotations

import json

import pytest

from capibara.inference.calls.parsing.tools import Tools, dumped

PROPERTIES = {
    "s": {"type": "string"},
    "i": {"type": "integer"},
    "n": {"type": "number"},
    "b": {"type": "boolean"},
    "a": {"type": "array"},
    "o": {"type": "object"},
    "z": {"type": ["string", "null"]},
    "u": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    "r": {"$ref": "#/$defs/text"},
    "l": {"$ref": "#/$defs/loop"},
    "e": {"enum": ["red", "blue"]},
    "c": {"const": 3},
    "free": {},
    "odd": {"anyOf": [{"type": "string"}, {}]},
}
DEFINITIONS = {"text": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}
TOOLS = Tools(
    [{"function": {"name": "f", "parameters": {"properties": PROPERTIES, "$defs": DEFINITIONS}}}, {"name": "g"}, 5]
)
TYPED = [
    ("s", "5", "5"), ("s", " null ", " null "), ("i", "5", 5), ("i", " -5\n", -5), ("i", "five", "five"), ("n", "1e3", 1000.0),
    ("n", "nan", "nan"), ("n", "1e999", "1e999"), ("b", "True", True), ("b", "false", False), ("b", "yes", "yes"),
    ("a", "[1, null]", [1, None]), ("a", "[1, None, 'x']", [1, None, "x"]), ("o", '{"k": {"l": true}}', {"k": {"l": True}}),
    ("o", "{'k': (1, 2)}", "{'k': (1, 2)}"), ("o", "{1, 2}", "{1, 2}"), ("o", "__import__('os')", "__import__('os')"),
    ("z", "null", None), ("z", "5", "5"), ("z", "nullify", "nullify"), ("u", "5", 5), ("u", "5.5", "5.5"), ("u", "true", "true"),
    ("r", "5", "5"), ("l", "5", 5), ("e", "5", "5"), ("c", "3", 3), ("free", "5", 5), ("free", "five", "five"), ("free", '"x"', '"x"'),
    ("odd", "5", 5), ("unknown", "[5]", [5]), ("o", "[" * 100_000, "[" * 100_000), ("i", "9" * 5000, "9" * 5000),
]  # fmt: skip


@pytest.mark.parametrize("key, text, value", TYPED, ids=range(len(TYPED)))
def test_an_argument_has_the_type_of_its_schema(key, text, value):
    result = json.loads(TOOLS.typed("f", key, text))
    assert result == value and type(result) is type(value)


def test_a_value_with_a_type_keeps_it_unless_the_schema_has_another():
    for key, value, expected in (
        ("i", "5", 5),
        ("s", "5", "5"),
        ("s", 5, 5),
        ("free", "5", "5"),
        ("u", "5", "5"),
        ("b", 1, 1),
    ):
        assert json.loads(TOOLS.coerced("f", key, value)) == expected


def test_tools_have_names_and_arguments():
    assert "f" in TOOLS and "g" in TOOLS and set(TOOLS.parameters) == {"f", "g"}
    tools = Tools([{"function": {"name": "h", "parameters": {"properties": {"a": {}, "b": {}}, "required": ["b"]}}}])
    assert tools.arguments("h") == [("b", {}, True), ("a", {}, False)]
    assert Tools([{"function": {"name": "h", "parameters": {"properties": [], "required": 1}}}]).arguments("h") == []


def test_json_has_no_lone_surrogates():
    assert dumped({"a": "é\ud800"}) == '{"a": "é"}'


def test_strings_that_a_schema_allows():
    color, other = {"$ref": "#/$defs/color"}, {"enum": ["red", "blue", 5, None]}
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}, {"const": "red"}]}
    parameters = {"$defs": {"color": {"enum": ["red", "green"]}, "loop": loop}}
    tools = Tools([{"function": {"name": "f", "parameters": parameters}}])
    for schema, texts in (
        ({}, None),
        (True, None),
        ({"type": "string"}, None),
        ({"type": ["integer", "null"]}, []),
        ({"type": ["string", "null"]}, None),
        (color, ["red", "green"]),
        ({**color, "enum": ["green"]}, ["green"]),
        (other, ["red", "blue"]),
        ({"const": "red"}, ["red"]),
        ({"const": 5}, []),
        ({"allOf": [color, other]}, ["red"]),
        ({"anyOf": [color, other, {"type": "null"}]}, ["red", "green", "blue"]),
        ({"oneOf": [color, {"type": "string"}]}, None),
        ({"anyOf": []}, None),
        (loop, None),
        ({"$ref": "#/$defs/missing"}, None),
    ):
        assert tools.texts("f", schema) == texts, schema


def test_a_string_that_a_schema_names_is_one():
    properties = {"k": {"enum": ["1", 2, 1.5]}, "r": {"allOf": [{"type": ["integer", "null"]}, {"type": "integer"}]}}
    tools = Tools([{"function": {"name": "f", "parameters": {"properties": properties}}}])
    assert [tools.typed("f", "k", text) for text in ("1", "2", "1.5", "x")] == ['"1"', "2", "1.5", '"x"']
    assert tools.types("f", "r") == {"integer"}
