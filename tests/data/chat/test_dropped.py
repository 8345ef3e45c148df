"""What a chat template leaves out of a conversation is told or refused; null keys of Arrow are no keys."""

from __future__ import annotations

import logging

import pytest

from capibara.core.types import UserError
from capibara.data.chat.conversations import TrainOn, render_example
from capibara.data.chat.formats import read_conversation
from capibara.data.chat.template import ChatTemplate
from tests.data.chat.test_template_files import TOOLS, make

WHOLE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<s>{{ m.role }}: {% if m.reasoning_content %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content | trim }}{% for c in m.tool_calls or [] %}"
    "{{ c.function | tojson }}{% endfor %}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
LAST = WHOLE.replace("m.content | trim", "m.content.split('</think>')[-1] | trim").replace(
    "m.reasoning_content", "false"
)
RECORD = {
    "messages": [
        {"role": "system", "content": "Be  short.\n"},
        {"role": "user", "content": 'What is "2+2"?'},
        {"role": "assistant", "content": "<think>two and two</think>4"},
    ]
}
CALL = {"function": {"name": "f", "arguments": {"x": 1}}}
CASES = {
    "nothing": (WHOLE, RECORD, None),
    "nothing of tools": (WHOLE, RECORD | {"tools": TOOLS}, None),
    "a thought": (LAST, RECORD, r"a thought \(<think>\) of a message of the assistant"),
    "a thought beside the content": (
        LAST,
        {"messages": [*RECORD["messages"][:2], {"role": "assistant", "content": "4", "reasoning_content": "two"}]},
        r"a thought \(<think>\) of a message of the assistant",
    ),
    "tools": (WHOLE.replace("if tools", "if false"), RECORD | {"tools": TOOLS}, "the tools"),
    "a system message": (
        WHOLE.replace("messages %}<s>", "messages if m.role != 'system' %}<s>"), RECORD,
        "the content of a message of the system",
    ),
    "a call": (
        WHOLE.replace("m.tool_calls or []", "[]"),
        {"messages": [RECORD["messages"][1], {"role": "assistant", "content": "I call", "tool_calls": [CALL]}]},
        "a tool call of a message of the assistant",
    ),
}  # fmt: skip


def read(folder, record, **options):
    return render_example(
        ChatTemplate(tokenizer=str(folder), **options), read_conversation(record, "a:1"), TrainOn.ALL, "a:1"
    )


@pytest.mark.parametrize("name", CASES)
def test_what_a_template_leaves_out_is_told(tmp_path, caplog, name):
    template, record, what = CASES[name]
    folder = make(tmp_path / "a", default=template)
    with caplog.at_level(logging.WARNING):
        read(folder, record)
    assert len(caplog.records) == (what is not None)
    if what is None:
        read(folder, record, dropped="refuse")
        return
    caplog.records[0].getMessage().index("a:1: the chat template leaves out ")
    with pytest.raises(UserError, match=f"a:1: the chat template leaves out {what}: .*ChatTemplate.dropped = 'warn'"):
        read(folder, record, dropped="refuse")


def test_it_is_told_the_1st_10th_and_100th_time(tmp_path, caplog):
    template = ChatTemplate(tokenizer=str(make(tmp_path / "a", default=LAST)))
    for number in range(120):
        render_example(template, read_conversation(RECORD, "a"), TrainOn.ASSISTANT, f"a:{number}")
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[1] for line in lines] == ["0", "9", "99"] and "of 100 conversations of 100" in lines[-1]


def test_null_keys_are_no_keys():
    plain = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"default": None}}}}}
        ],
    }
    nulls = {
        "messages": [{**message, "tool_calls": None, "name": None, "from": None} for message in plain["messages"]],
        "tools": [
            {"type": "function", "function": {"name": "f", "description": None, "parameters": {
                "required": None, "properties": {"x": {"default": None, "type": None}, "y": None}}}}
        ],
    }  # fmt: skip
    assert read_conversation(nulls, "a") == read_conversation(plain, "a")
