"""Assistants' turns with calls, and the tools that they call; also run by a peer's python, so it imports nothing of ours."""

from __future__ import annotations

import json

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "Does it.",
            "parameters": {
                "type": "object",
                "properties": {
                    "x": {"type": "integer"},
                    "n": {"type": "number"},
                    "b": {"type": "boolean"},
                    "s": {"type": "string"},
                    "z": {"type": ["string", "null"]},
                    "a": {"type": "array", "items": {}},
                    "o": {"type": "object"},
                    "e": {"enum": ["red", "blue"]},
                },
                "required": ["x"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_time-2",
            "description": "Tells it.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]
# Some templates write types as text, and fail at several types or none.
PLAIN_TOOLS = [
    {
        "type": "function",
        "function": {
            **TOOLS[0]["function"],
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "integer", "description": "It."}},
                "required": ["x"],
            },
        },
    },
    TOOLS[1],
]
EMPTY = ("get_time-2", {})
# Content, thought, calls.
DIALOGUES = [
    ("Hello there.", "", []),
    ("Is a < b, or <tool, [1, 2], {x}?", "", []),
    ("Two lines,\n\n  indented: é 日本 🙂.", "", []),
    ("42", "I count: 6 * 7.\nYes.", []),
    ("", "", [("f", {"x": 1})]),
    ("", "", [EMPTY]),
    ("", "I need the time.", [EMPTY]),
    ("", "One < two,\nso f.", [("f", {"x": -7, "b": True})]),
    ("I look it up.", "", [("f", {"x": 0, "b": False, "n": 1.5})]),
    ("I look it up.", "First f.", [("f", {"x": 12345678901234567890})]),
    ("", "", [("f", {"x": 1}), EMPTY]),
    ("Both:", "", [("f", {"x": 1, "s": "one"}), ("f", {"x": 2, "s": "two"}), EMPTY]),
    ("", "Three.", [("f", {"x": 1}), ("f", {"x": 2}), ("f", {"x": 3})]),
    ("", "", [("f", {"x": 1, "s": "é 日本 🙂 \u2028"})]),
    ("", "", [("f", {"x": 1, "s": ""})]),
    ("", "", [("f", {"x": 1, "s": 'a "quoted" \\ word, it\'s'})]),
    ("", "", [("f", {"x": 1, "s": "def f():\n\treturn {'a': [1]}\n"})]),
    ("", "", [("f", {"x": 1, "s": "123"}), ("f", {"x": 1, "s": "true"})]),
    ("", "", [("f", {"x": 1, "z": None}), ("f", {"x": 1, "z": "text"})]),
    ("", "", [("f", {"x": 1, "a": [], "o": {}})]),
    ("", "", [("f", {"x": 1, "a": [1, -2.5, "x", None, True, ["y", []]]})]),
    ("", "", [("f", {"x": 1, "o": {"k": {"l": [{"m": "n, o"}], "p": None}, "q": False}})]),
    ("", "", [("f", {"x": 1, "e": "blue", "n": 1e21})]),
    ("", "", [("f", {"x": 1, "s": "</tool_call> <tool_call> [TOOL_CALLS] <|python_tag|> </think>"})]),
    ("", "", [("f", {"x": 1, "s": "a</parameter>b <parameter=c> </arg_value>d"})]),
    ("", "", [("f", {"x": 1, "s": '"}]} ), ] ```'})]),
    ("", "", [("f", {"x": 1, "s": "  spaces  "})]),
]  # fmt: skip


def message(index: int, as_text: bool = False, count: int | None = None) -> dict:
    """A turn as OpenAI's API has it; `as_text`: arguments are JSON text."""
    content, thought, calls = DIALOGUES[index]
    result = {"role": "assistant", "content": content}
    if thought:
        result |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), thought)
    if calls:
        result["tool_calls"] = [
            {
                "id": f"abcdefg{number:02}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments) if as_text else arguments},
            }
            for number, (name, arguments) in enumerate(calls[:count])
        ]
    return result
