"""MiniMax M3's calls: arguments as elements in each other, by the schema of their tool."""

from __future__ import annotations

import json
import time

import pytest

from capibara.core.types import UserError
from capibara.inference.calls.dialect import Dialect
from capibara.inference.calls.forms import table
from capibara.inference.calls.forms.elements import FORMS
from capibara.inference.calls.parsing.tools import Tools
from tests.inference.calls import turns
from tests.inference.calls.family_templates import TEMPLATES, render

(FORM,) = FORMS
MARK = "]<]minimax[>["
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "book",
            "parameters": {
                "type": "object",
                "properties": {
                    "guest": {"$ref": "#/$defs/guest"},
                    "nights": {"type": "integer"},
                    "rooms": {"type": "array", "items": {"$ref": "#/$defs/room"}, "maxItems": 2},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "notes": {"type": "object", "additionalProperties": {"type": "string"}},
                    "free": {},
                },
                "required": ["nights", "guest"],
                "$defs": {
                    "guest": {"type": "object", "properties": {"zip": {"type": "string"}, "old": {"type": "boolean"}}},
                    "room": {
                        "type": "object",
                        "properties": {"beds": {"type": "integer", "minimum": 1, "maximum": 9}, "item": {"type": "string"}},
                        "required": ["beds"],
                    },
                },
            },
        },
    }
]  # fmt: skip


def read(body, how="whole"):
    dialect = Dialect(FORM)
    message, deltas = turns.read(dialect, body, False, how, tools=TOOLS)
    whole = turns.in_whole(message)
    assert turns.joined(deltas) == whole
    return whole


def call(inside):
    return f'{MARK}<tool_call>\n{MARK}<invoke name="book">{inside}{MARK}</invoke>\n{MARK}</tool_call>'


def element(name, inside):
    return f"{MARK}<{name}>{inside}{MARK}</{name}>"


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ("", {}),
        (element("nights", "2") + "\n" + element("guest", element("zip", "018956")), {"nights": 2, "guest": {"zip": "018956"}}),
        (element("tags", element("item", "1") + element("item", "a <b> ]")), {"tags": ["1", "a <b> ]"]}),
        (element("tags", element("item", "one")), {"tags": ["one"]}),
        (element("tags", ""), {"tags": []}),
        (element("notes", ""), {"notes": {}}),
        (element("notes", element("a", "1") + element("b", " x\n")), {"notes": {"a": "1", "b": " x\n"}}),
        (
            element("rooms", f"\n{element('item', element('beds', '2') + element('item', 'sea'))}\n"),
            {"rooms": [{"beds": 2, "item": "sea"}]},
        ),
        (element("free", element("a", "1") + element("a", "x")), {"free": {"a": [1, "x"]}}),
        (element("free", element("item", "1") + element("item", "[2]")), {"free": [1, [2]]}),
        (element("free", "null"), {"free": None}),
        (element("free", ""), {"free": ""}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("how", ["whole", "characters"])
def test_elements_are_values_of_the_schema(inside, arguments, how):
    content, _, calls = read(f"I book. {call(inside)}", how)
    assert (content, [(name, json.loads(text)) for name, text in calls]) == ("I book.", [("book", arguments)])


@pytest.mark.parametrize(
    "inside",
    [
        "text", element("nights", "2")[:-1], f"{MARK}<nights>2{MARK}</night>", f"{MARK}</nights>", f"{MARK}<>1{MARK}</>",
        element("free", "text" + element("a", "1")), "".join(f"{MARK}<a>" for _ in range(40)),
    ],
)  # fmt: skip
def test_what_is_no_call_stays_text(inside):
    body = call(inside)
    assert read(body) == (body, "", [])


def test_a_grammar_has_the_elements_of_the_schema():
    rules = "\n".join(FORM.rules(Tools(TOOLS), json.dumps, False))
    nights, guest = rules.index("<nights>"), rules.index("<guest>")
    assert nights < rules.index("<rooms>") and guest < rules.index("<rooms>"), "those that are required come first"
    assert "{0,2}" in rules and "<beds>" in rules and "<old>" in rules
    assert {form.name for form in table.FORMS} >= {"hy 3", "dots", "longcat", "minimax m3"}


def tool(properties, **others):
    parameters = {"type": "object", "properties": properties, **others}
    return Tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])


def test_a_grammar_of_schemas_that_refer_to_themselves_is_small():
    reference, begin_s = {"$ref": "#/$defs/n"}, time.monotonic()
    tree = {"type": "object", "properties": {**{key: reference for key in "abcd"}, "v": {"type": "integer"}}}
    rules = "\n".join(FORM.rules(tool({"x": reference}, **{"$defs": {"n": tree}}), json.dumps, False))
    assert len(rules) < 20_000 and "object_0_0: " in rules
    choices = {"anyOf": [reference] * 10 + [{"type": "integer"}]}
    for form in table.FORMS:
        "\n".join(form.rules(tool({"x": reference}, **{"$defs": {"n": choices}}), json.dumps, False))
    assert time.monotonic() - begin_s < 5, "each reference is read once, not each way to it"


def test_a_grammar_lets_arguments_have_what_their_schema_allows():
    optional = {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}
    properties = {"x": optional, "map": {"type": "object", "additionalProperties": {"type": "integer"}}}
    rules = "\n".join(FORM.rules(tool(properties, **{"$defs": {"n": {"enum": [7, 8]}}}), json.dumps, False))
    assert '"$defs": {"n": {"enum": [7, 8]}}' in rules and '"additionalProperties": {"type": "integer"}' in rules
    assert read(call(element("notes", '{"a": "1"}')))[2] == [("book", '{"notes": {"a": "1"}}')]


@pytest.mark.parametrize(
    ("properties", "message"),
    [
        ({"a>b": {}}, "tool f has the argument 'a>b', which the model's calls cannot name: it must not be empty"),
        ({"": {}}, "tool f has the argument '', which"),
        ({"x": {"type": "array", "minItems": "a"}}, "tool f has minItems 'a', must be a whole number from 0"),
        ({"x": {"type": "array", "maxItems": float("inf")}}, "tool f has maxItems inf, must be a whole number from 0"),
        ({"x": {"type": "array", "minItems": -1}}, "tool f has minItems -1, must be"),
        ({"x": {"type": "array", "minItems": 5, "maxItems": 2}}, "tool f has minItems 5 above maxItems 2: correct"),
    ],
)
def test_schemas_that_no_call_can_keep_to_are_refused(properties, message):
    with pytest.raises(UserError, match=message):
        list(FORM.rules(tool(properties), json.dumps, False))
    list(FORM.rules(tool({"x": {"type": "array", "minItems": 2.0}}, required=5), json.dumps, False))


def test_what_a_template_writes_is_read():
    arguments = {
        "nights": 2,
        "guest": {"zip": "01", "old": False},
        "rooms": [{"beds": 1}, {"beds": 2, "item": "x"}],
        "tags": ["a"],
    }
    template, _ = TEMPLATES["minimax m3"]
    turn = render(template, {"content": "", "tool_calls": [{"function": {"name": "book", "arguments": arguments}}]})
    assert [(name, json.loads(text)) for name, text in read(turn)[2]] == [("book", arguments)]
