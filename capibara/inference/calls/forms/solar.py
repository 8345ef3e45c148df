"""Solar Open: a text of messages, each with a marker of what it is: a thought, calls, the answer.

The prompt ends with <|begin|>assistant.
"""

from __future__ import annotations

from collections.abc import Iterator

from capibara.inference.calls.forms.form import Form, Marks, read_arguments, read_each
from capibara.inference.calls.forms.rules import rules_of_calls
from capibara.inference.calls.parsing.text import Content, Malformed, Reasoning, Steps, Text
from capibara.inference.calls.parsing.tools import Tools

_BEGIN, _END, _CALLS_END = "<|begin|>assistant", "<|end|>", "<|calls|>"
_THOUGHT, _ANSWER, _CALLS = "<|think|>", "<|content|>", "<|tool_calls|>"
_CALL, _NAME, _ARGUMENTS, _CALL_END = (
    "<|tool_call:begin|>",
    "<|tool_call:name|>",
    "<|tool_call:args|>",
    "<|tool_call:end|>",
)


def _read(text: Text, tools: Tools, marker: str) -> Steps[None]:
    """Reads one message."""
    if marker == _BEGIN:
        marker = yield from text.take(_THOUGHT, _ANSWER, _CALLS)
        if not marker and not text.ended:  # at its end it says nothing
            raise Malformed
    if marker == _CALLS:
        yield from read_each(text, _CALL, _CALLS_END, lambda: _read_call(text, tools))
    elif marker:
        yield from text.until((_END,), Reasoning if marker == _THOUGHT else Content)


def _read_call(text: Text, tools: Tools) -> Steps[None]:
    yield from text.head(_NAME)  # an id, which its template does not need
    text.at += len(_NAME)
    name = (yield from text.head(_ARGUMENTS)).strip()
    text.at += len(_ARGUMENTS)
    yield from read_arguments(text, tools, name)
    yield from text.spaces()
    yield from text.take(_CALL_END)


def _rules(tools: Tools, marks: Marks, parallel: bool) -> Iterator[str]:
    def call(name: str, arguments: str) -> str:
        return f"{marks(_CALL)} /[a-z0-9]{{10}}/ {marks(_NAME + name + _ARGUMENTS)} {arguments} {marks(_CALL_END)}"

    yield from rules_of_calls(tools, call, parallel, begin=marks(_CALLS))


FORMS = (
    Form(
        name="solar open",
        detect=lambda model: model.mentions(_CALL) and model.mentions(_THOUGHT),
        begins=(_BEGIN, _THOUGHT, _ANSWER, _CALLS),
        read=_read,
        rules=_rules,
        tokens=(_END, _CALL, _NAME, _ARGUMENTS, _CALL_END),
        ends=(_CALLS_END, "<|flush|>"),
        covers_answer=True,
    ),
)
