"""Calls in a text, whole and streamed in any pieces."""

from __future__ import annotations

import json
import random

import pytest

from capibara.inference.server import tool_calls

ONE = '<tool_call>\n{"name": "f", "arguments": {"x": 1, "y": "é"}}\n</tool_call>'
TWO = ONE + '\n<tool_call>{"name": "g"}</tool_call>'
# A text -> what is left of it, and the name and arguments of each call.
TEXTS = {
    ONE: ("", [("f", {"x": 1, "y": "é"})]),
    f"I look it up. {TWO}": ("I look it up.", [("f", {"x": 1, "y": "é"}), ("g", {})]),
    ONE.removesuffix("</tool_call>"): ("", [("f", {"x": 1, "y": "é"})]),  # its last token may be the end token
    "no call, a < b and <tool": ("no call, a < b and <tool", []),
    **{
        text: (text, [])
        for text in (
            "", '<tool_call>{"name": "other"}</tool_call>', "<tool_call>not JSON</tool_call>", "<tool_call>[1]</tool_call>",
            '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', ONE + "<tool_call>{</tool_call>", "<tool_call>" + "[" * 99999,
        )
    },
}  # fmt: skip
NAMES = {"f", "g"}


def plain(calls):
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_calls_are_taken_out_of_a_text(text):
    rest, calls = tool_calls.split(text, NAMES)
    assert (rest, plain(calls)) == TEXTS[text]


@pytest.mark.parametrize("text", [text for text in TEXTS if len(text) < 1000], ids=range(len(TEXTS) - 1))
def test_a_streamed_text_has_the_same_calls(text):
    draw = random.Random(0)
    for _ in range(50):
        held, sent, start = tool_calls.CallStream(), "", 0
        while start < len(text):
            size = draw.randrange(1, 20)
            sent += held.add(text[start : start + size])
            start += size
        rest, calls = held.rest(NAMES)
        want, wanted = TEXTS[text]
        assert plain(calls) == wanted and (sent + rest).strip() == want.strip()
        assert "<tool_call>" not in sent


def test_names_are_those_of_functions():
    tools = [{"type": "function", "function": {"name": "f"}}, {"name": "g"}, 5]
    assert tool_calls.names_of(tools) == NAMES
