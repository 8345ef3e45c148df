"""Muse: a text of messages, each with a recipient: a thought is to self, an answer to user, a call to its tool.

The prompt ends with <|start|>assistant.
"""

from __future__ import annotations

import dataclasses
import re

from capibara.inference.calls.forms import tagged
from capibara.inference.calls.forms.form import Form
from capibara.inference.calls.forms.harmony import is_cut_off
from capibara.inference.calls.parsing.text import Content, Reasoning, Steps, Text
from capibara.inference.calls.parsing.tools import Tools

_START, _MESSAGE, _END, _TURN_END = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"
_TO, _RECIPIENT = "to=", re.compile(r"to=([^\s<]+)")
_CALLS = tagged.invokes("function_calls", "atem:")
# Each call is a message of its own.
_CALL = dataclasses.replace(_CALLS, is_section=False, header=f" to=NAME{_MESSAGE}", between=f"{_END}{_START}assistant")


def _read(text: Text, tools: Tools, marker: str) -> Steps[None]:
    """Reads messages; without a recipient the first begins with the marker of its text."""
    has_header = marker != _MESSAGE
    while True:
        header = ""
        if has_header:
            header = yield from text.head(_MESSAGE)
            text.at += len(_MESSAGE)
        recipient = _RECIPIENT.search(header)
        yield from _read_message(text, tools, "user" if recipient is None else recipient[1])
        yield from text.spaces()
        if not (yield from text.take(_START)) or (yield from is_cut_off(text)):
            return
        has_header = True


def _read_message(text: Text, tools: Tools, recipient: str) -> Steps[None]:
    if recipient in ("self", "user"):
        yield from text.until((_END, _TURN_END), Reasoning if recipient == "self" else Content)
        return
    yield from text.spaces()
    yield from text.expect(_CALLS.begin)
    yield from _CALLS.read(text, tools, _CALLS.begin)
    yield from text.spaces()
    yield from text.take(_END, _TURN_END)


FORMS = (
    Form(
        name="muse",
        detect=lambda model: model.mentions(_CALLS.begin) and model.mentions(_MESSAGE),
        begins=(f"{_START}assistant", _MESSAGE),
        read=_read,
        rules=_CALL.rules,
        tokens=(_START, _END, *_CALLS.marks),
        ends=(_TURN_END,),
        bare=(_TO,),
        covers_answer=True,
    ),
)
