"""Functions as tools: their results, errors of calls, and options that are refused."""

from __future__ import annotations

import json

import pytest

from capibara.core.types import UserError
from capibara.strategies.environments.functions import FunctionTools


def add(a, b):
    return a + b


def shout(text):
    return text.upper()


def call(name, arguments):
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("name", "arguments", "content"),
    [
        ("add", '{"a": 2, "b": 3}', "5"),
        ("add", {"a": 2, "b": 3}, "5"),
        ("shout", '{"text": "no"}', "NO"),
        ("add", '{"a": 2}', "error: TypeError: "),
        ("add", "{a: 2}", "error: JSONDecodeError: "),
        ("add", "[1]", "error: TypeError: "),
        ("subtract", "{}", "error: there is no tool 'subtract', only add, shout"),
        ("shout", json.dumps({"text": "x" * 99}), "X" * 20),
    ],
)
def test_each_call_has_a_result(name, arguments, content):
    episode = FunctionTools(functions=(add, shout), result_chars=20 if name == "shout" else 2000).begin({})
    (message,) = episode.step([{"role": "assistant", "content": None, "tool_calls": [call(name, arguments)]}])
    assert message["content"].startswith(content) and len(message["content"]) <= max(len(content), 200)
    assert (message["role"], message["name"], message["tool_call_id"]) == ("tool", name, "c1")


def test_a_message_without_a_call_ends_the_dialogue():
    assert FunctionTools(functions=(add,)).begin({}).step([{"role": "assistant", "content": "5"}]) == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, "functions is empty"),
        ({"functions": (3,)}, "functions .* must be tuple.a function"),
        ({"functions": (add,), "turns": 0}, "FunctionTools.turns is 0, must be at least 1"),
        ({"functions": (add,), "result_chars": 0}, "result_chars is 0"),
    ],
)
def test_options_are_checked(options, error):
    with pytest.raises(UserError, match=error):
        FunctionTools(**options)
