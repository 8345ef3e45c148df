"""Turns that are cut off or changed at random, in every form: nothing fails, and whatever is said to be a call is one."""

from __future__ import annotations

import json
import random

import pytest

from tests.inference.calls import turns
from tests.inference.calls.dialogues import DIALOGUES, message
from tests.inference.calls.family_templates import TEMPLATES, render
from tests.inference.calls.turns import Model

NAMES = {"f", "get_time-2"}
TRIES = 4


def broken(draw, text):
    """The text, cut off or with a part removed, doubled or replaced."""
    start = draw.randrange(len(text) + 1)
    end = min(len(text), start + draw.randrange(1, 12))
    marks = ['"', "{", "}", "]", "<", ">", "\\", "é", "\n", "<tool_call>", text[start:end] * 2, ""]
    return text[:start] if draw.random() < 0.4 else text[:start] + draw.choice(marks) + text[end:]


@pytest.mark.parametrize("name", TEMPLATES)
def test_broken_turns_are_read(name):
    template, tokens = TEMPLATES[name]
    dialect, draw = turns.dialect_of(Model(template, tokens)), random.Random(name)
    for index in range(len(DIALOGUES)):
        turn = render(template, message(index))
        for number in range(TRIES):
            text = broken(draw, turn)
            whole, _ = turns.read(dialect, text, False, "whole")
            content, thought, calls = turns.in_whole(whole)
            assert all(called in NAMES and isinstance(json.loads(arguments), dict) for called, arguments in calls)
            for how in ("characters", "tokens"):
                again, deltas = turns.read(dialect, text, False, how, number)
                assert turns.in_whole(again) == (content, thought, calls), text
                streamed, streamed_thought, begun = turns.joined(deltas)
                assert streamed_thought == thought and [call for call in begun if call in calls] == calls, text
                assert len(begun) > len(calls) or streamed == content, text
            tags = () if dialect.tags is None else (dialect.tags.open.strip(), dialect.tags.close)
            tags += () if dialect.tags is None else dialect.tags.answer
            if not calls and name not in ("harmony", "solar open", "muse") and not any(tag in text for tag in tags):
                assert content.strip() == text.strip(), "nothing is lost"
