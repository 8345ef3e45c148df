"""Harmony of gpt-oss: a text of messages, each with a channel: thoughts, calls with a recipient, the answer.

https://github.com/openai/harmony. The prompt ends with <|start|>assistant.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from capibara.inference.calls.forms.form import Form, Marks, read_arguments
from capibara.inference.calls.forms.rules import check_name, rules_of_calls
from capibara.inference.calls.parsing.text import Content, Malformed, Reasoning, Steps, Text
from capibara.inference.calls.parsing.tools import Tools

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_ENDS = (_END, _CALL, _RETURN)
_TO = "to="
_RECIPIENT, _NAME = re.compile(r"to=([^\s<]+)"), re.compile(r"<\|channel\|>(\w+)")


def _read(text: Text, tools: Tools, marker: str) -> Steps[None]:
    """Reads messages; the first header has the marker."""
    header = "" if marker == _TO else marker
    while True:
        header += yield from text.head(_MESSAGE)
        text.at += len(_MESSAGE)
        yield from _read_message(text, tools, header)
        yield from text.spaces()
        header = yield from text.take(_START, _CHANNEL)
        if not header or (yield from is_cut_off(text)):
            return


def is_cut_off(text: Text) -> Steps[bool]:
    """Whether the text ends inside a header, which says nothing then; reads the header in this case."""
    start = text.at
    try:
        yield from text.head(_MESSAGE)
    except Malformed:
        if text.ended:
            return True
    text.at = start
    return False


def _read_message(text: Text, tools: Tools, header: str) -> Steps[None]:
    recipient, channel = _RECIPIENT.search(header), _NAME.search(header)
    if recipient is not None:
        yield from read_arguments(text, tools, recipient[1].removeprefix("functions."))
        yield from text.spaces()
        yield from text.take(*_ENDS)
    elif channel is None:
        raise Malformed
    else:
        event = Reasoning if channel[1] == "analysis" else Content
        yield from text.until(_ENDS, event)


def _rules(tools: Tools, marks: Marks, parallel: bool) -> Iterator[str]:
    def call(name: str, arguments: str) -> str:
        check_name(name, "the name", name, " ", "<")
        head = f"{_CHANNEL}commentary to=functions.{name} {_CONSTRAIN}json{_MESSAGE}"
        return f"{marks(head)} {arguments}"

    yield from rules_of_calls(tools, call, parallel, between=marks(f"{_END}{_START}assistant"))


FORMS = (
    Form(
        name="harmony",
        detect=lambda model: model.mentions(_CHANNEL) and model.mentions(_MESSAGE) and model.has_token(_CHANNEL),
        begins=(f"{_START}assistant", _CHANNEL),
        read=_read,
        rules=_rules,
        tokens=(_START, _CHANNEL, _MESSAGE, _CONSTRAIN, _END),
        ends=(_CALL, _RETURN),
        bare=(_TO,),
        covers_answer=True,
    ),
)
