"""Kimi K3's calls, and what K2 Horizon, MiniCPM 5 and Step 3 have beside their tags."""

from __future__ import annotations

import json

import pytest

from capibara.inference.calls.dialect import Dialect
from capibara.inference.calls.forms import table
from capibara.inference.calls.parsing.tools import Tools
from capibara.inference.calls.reasoning import tags_of
from tests.inference.calls import turns
from tests.inference.calls.family_templates import TEMPLATES

FORMS = {form.name: form for form in table.FORMS}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "n": {"type": "integer"},
                    "either": {"type": ["string", "integer", "null"]},
                    'a "b" & c': {"type": "string"},
                    "free": {},
                },
            },
        },
    }
    for name in ("look", 'say "&quot;"')
]


def read(form, body):
    """Content and calls, the same however the text arrives."""
    results = []
    for how in ("whole", "characters", "tokens"):
        message, deltas = turns.read(Dialect(FORMS[form]), body, False, how, tools=TOOLS)
        whole = turns.in_whole(message)
        if not whole[0]:
            assert turns.joined(deltas) == whole
        results.append((whole[0], [(name, json.loads(arguments)) for name, arguments in whole[2]]))
    assert results[0] == results[1] == results[2]
    return results[0]


def opened(tag):
    return f"<|open|>{tag}<|sep|>"


def closed(tag):
    return f"<|close|>{tag}<|sep|>"


def argument(key, kind, value):
    return opened(f'argument key="{key}"' + (f' type="{kind}"' if kind else "")) + value + closed("argument")


def xtml(*inside, name="look"):
    calls = "".join(
        opened(f'call tool="{name}" index="{i}"') + body + closed("call") for i, body in enumerate(inside, 1)
    )
    return opened("tools") + calls + closed("tools")


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ("", {}),
        (argument("n", "number", "-7"), {"n": -7}),
        (argument("either", "string", "7") + argument("free", "string", "null"), {"either": "7", "free": "null"}),
        (argument("either", "number", "7") + argument("free", "null", "null"), {"either": 7, "free": None}),
        (argument("free", "object", '{"a": [1, "<|sep|>"]}'), {"free": {"a": [1, "<|sep|>"]}}),
        (argument("free", "array", "[]") + "\n" + argument("n", "number", " 1 "), {"free": [], "n": 1}),
        (argument("a &quot;b&quot; &amp; c", "string", '"&amp;" <'), {'a "b" & c': '"&amp;" <'}),
        (argument("a &quot;b&quot; &amp; c", "number", "7"), {'a "b" & c': 7}),  # as it is written
        (argument("n", None, "3") + argument("either", None, "x"), {"n": 3, "either": "x"}),
        (opened('json type="object"') + '{"n": 1, "free": "<|open|>"}' + closed("json"), {"n": 1, "free": "<|open|>"}),
    ],
)  # fmt: skip
def test_arguments_have_their_types(inside, arguments):
    assert read("kimi k3", xtml(inside)) == ("", [("look", arguments)])
    assert read("kimi k3", xtml(inside, inside)) == ("", [("look", arguments)] * 2)


def test_names_are_escaped():
    assert read("kimi k3", xtml("", name="say &quot;&amp;quot;&quot;")) == ("", [('say "&quot;"', {})])


@pytest.mark.parametrize(
    "body",
    [
        xtml("", name="unknown"),
        xtml(argument("n", "number", "1")).replace(closed("argument"), ""),
        xtml(opened('json type="object"') + "[1]" + closed("json")),
        xtml(opened('json type="object"') + '{"n": NaN}' + closed("json")),
        xtml(opened('json type="object"') + "{" + closed("json")),
        xtml(argument("n", "number", "1") + opened('json type="object"') + "{}" + closed("json")),
        xtml("text"),
        opened("tools") + closed("tools"),
        opened("tools") + opened("call " + "x" * 2000),
    ],
)
def test_what_is_malformed_is_content(body):
    assert read("kimi k3", body) == (body, [])


def test_a_response_is_content_and_a_thought_apart():
    tags = tags_of(turns.Model(TEMPLATES["kimi k3"][0]))
    dialect = Dialect(FORMS["kimi k3"], tags)
    assert dialect.after("<|open|>message<|sep|><|open|>think<|sep|>").thinks_after("<|open|>think<|sep|>")
    text = (
        "So."
        + closed("think")
        + opened("response")
        + "Yes: <|sep|>"
        + closed("response")
        + xtml("")
        + closed("message")
    )
    message, _ = turns.read(dialect, text, True, "characters", tools=TOOLS)
    assert turns.in_whole(message) == ("Yes: <|sep|>", "So.", [("look", "{}")])


def test_a_template_that_puts_its_tags_together_shows_them():
    macro = "{%- macro close_tag(tag) -%}{{- '<|close|>' + tag + '<|sep|>' -}}{%- endmacro -%}"
    dialect = turns.dialect_of(turns.Model(macro))
    assert dialect.form is FORMS["kimi k3"] and dialect.tags.close == closed("think")


def test_the_prompt_says_which_tags_a_thought_has():
    dialect = turns.dialect_of(turns.Model("<ifm|think_fast></ifm|think_fast><ifm|think></ifm|think><ifm|tool_call>"))
    assert dialect.form.name == "k2 horizon"
    for effort in ("think", "think_fast", "think_faster"):
        prompt = f"<|ifm|im_start|>assistant\n<ifm|{effort}>\n"
        after = dialect.after(prompt)
        assert after.tags[:2] == (f"<ifm|{effort}>", f"</ifm|{effort}>") and after.thinks_after(prompt)
        message, _ = turns.read(after, f"a</ifm|{effort}>b", True, "whole", tools=TOOLS)
        assert turns.in_whole(message) == ("b", "a", [])
    assert dialect.after("assistant\n") == dialect and Dialect().after("<think>") == Dialect()


def ifm(key, kind, value):
    kind = f"<ifm|arg_type>{kind}</ifm|arg_type>\n" if kind else ""
    return f"<ifm|arg_key>{key}</ifm|arg_key>\n{kind}<ifm|arg_value>{value}</ifm|arg_value>\n"


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ("look\n" + ifm("n", "integer", "1"), {"n": 1}),
        ("look\n" + ifm("either", "string", "1") + ifm("free", None, "x"), {"either": "1", "free": "x"}),
        ("look\n" + ifm("either", "integer", "1"), {"either": 1}),
        ("look\n" + ifm("free", "string", "1") + ifm("n", "string", "1"), {"free": "1", "n": 1}),
        ("look\n" + ifm("n", "string", "2"), {"n": 2}),  # its schema has no strings
        ("look", {}),
        ('{"name": "look", "arguments": {"n": 1}}', {"n": 1}),
        ('\n{"name": "look", "arguments": {"free": "</ifm|tool_call>"}}\n', {"free": "</ifm|tool_call>"}),
    ],
)  # fmt: skip
def test_k2_horizon_writes_tags_or_objects(inside, arguments):
    one = f"<ifm|tool_call>{inside}</ifm|tool_call>"
    section = f"<ifm|tool_calls>\n{one}\n{one}</ifm|tool_calls>"
    assert read("k2 horizon", section) == ("", [("look", arguments)] * 2)
    assert read("k2 horizon", one) == ("", [("look", arguments)])


@pytest.mark.parametrize(
    ("value", "arguments"),
    [
        ("<![CDATA[a </param> b]]>", {"free": "a </param> b"}),
        ("<![CDATA[]]>", {"free": ""}),
        ("a <b> c", {"free": "a <b> c"}),
        ("[1, 2]", {"free": [1, 2]}),
    ],
)
def test_minicpm_5_may_quote_a_value(value, arguments):
    body = f'<function name="look"><param name="free">{value}</param></function>'
    assert read("minicpm 5", body) == ("", [("look", arguments)])
    for open_ended in ("<![CDATA[a</param>", "<![CDATA[a]]>", "<![CDATA[a]]> b</param>"):
        body = f'<function name="look"><param name="free">{open_ended}</function>'
        assert read("minicpm 5", body) == (body, [])


def test_each_argument_is_written_in_a_type_that_its_schema_allows():
    marks = json.dumps
    rules = [*FORMS["kimi k3"].rules(Tools(TOOLS[:1]), marks, True)]
    (either,) = [rule for rule in rules if rule.startswith("value_0_1:")]
    assert [f'type=\\"{kind}\\"' in either for kind in ("string", "number", "null", "boolean")] == [
        True,
        True,
        True,
        False,
    ]
    (quoted,) = [rule for rule in rules if rule.startswith("value_0_2:")]
    assert "a &quot;b&quot; &amp; c" in quoted


def test_a_call_after_a_name_that_is_too_long_is_read_however_the_text_arrives():
    begin, end = "<ifm|tool_call>look\n" + ifm("n", None, "1"), "</ifm|tool_call>"
    content, calls = read("k2 horizon", f"{begin}<ifm|arg_key>{'9' * 5000}\n{begin}{end}")
    assert content.startswith("<ifm|tool_call>look") and calls == [("look", {"n": 1})]


def test_the_arguments_of_plamo_3_have_their_marks():
    begin, end = "<|plamo:begin_{}:plamo|>".format, "<|plamo:end_{}:plamo|>".format
    head = begin("tool_requests") + begin("tool_request") + begin("tool_name") + "look" + end("tool_name")
    marks = begin("tool_arguments") + "<|plamo:constrain|>json<|plamo:msg|>"
    tail = end("tool_arguments") + end("tool_request") + end("tool_requests")
    assert read("plamo 3", head + marks + '{"n": 1}' + tail) == ("", [("look", {"n": 1})])
    assert read("plamo 3", head + '{"n": 1}' + tail)[1] == []
