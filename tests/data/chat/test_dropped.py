"""What a chat template leaves out of a conversation is told or refused; null keys of Arrow are no keys."""

from __future__ import annotations

import dataclasses
import json
import logging

import pytest

from capibara.core.types import UserError
from capibara.data.chat.conversations import ChatJsonlSource, TrainOn, render_example
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
    "what follows a thought": (
        WHOLE.replace("m.content | trim", "m.content.split('</think>')[0]"),
        RECORD,
        "the content of a message of the assistant",
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


# As Qwen 3's: a thought is in the text only after the last message of the user.
LAST_THOUGHT = (
    "{% for m in messages %}<s>{{ m.role }}: {% if m.role == 'assistant' %}{% if loop.last %}{{ m.content }}"
    "{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}{% else %}{{ m.content }}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def test_thoughts_of_earlier_turns_are_trained_on_each_turn_alone(tmp_path, caplog):
    turns = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>two and two</think>4"},
        {"role": "user", "content": "3+3?"},
        {"role": "assistant", "content": "<think>unseen</think>5", "weight": 0},
        {"role": "user", "content": "4+4?"},
        {"role": "assistant", "content": "<think>four and four</think>8"},
    ]
    lines = [{"messages": turns}, {"messages": turns[:3]}, {"messages": [turns[0], turns[3]]}]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    template = ChatTemplate(tokenizer=str(make(tmp_path / "a", default=LAST_THOUGHT)), dropped="refuse")
    source = ChatJsonlSource(files=(str(path),), validation_files=(str(path),), template=template, train_on="each")
    documents = source.open("train")
    with_loss = [[one.text[slice(*part)] for part in one.loss] for one in map(documents.example, range(len(documents)))]
    first, last = ["<think>two and two</think>4</s>"], ["<think>four and four</think>8</s>"]
    assert with_loss == [first, last, first]
    assert documents.example(1).text.startswith(
        "<s>user: 2+2?</s><s>assistant: 4</s><s>user: 3+3?</s><s>assistant: 5</s>"
    )
    assert not caplog.records and documents.fingerprint()["train_on"] == "each"
    with pytest.raises(
        UserError, match=r"leaves out a thought.*train on each turn alone \(ChatJsonlSource.train_on = 'each'\)"
    ):
        dataclasses.replace(source, train_on="assistant").open("train")
    path.write_text(json.dumps(lines[2]) + "\n")
    with pytest.raises(
        UserError, match="ChatJsonlSource.files have no message with loss: give at least one the weight 1"
    ):
        source.open("train")


def test_a_thought_of_the_turn_that_is_trained_on_is_told(tmp_path):
    """On each turn alone, a template may drop the thoughts of the turns before, but not the one that has loss."""
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": RECORD["messages"]}) + "\n")
    template = ChatTemplate(tokenizer=str(make(tmp_path / "a", default=LAST)), dropped="refuse")
    source = ChatJsonlSource(files=(str(path),), validation_files=(str(path),), template=template, train_on="each")
    with pytest.raises(UserError, match=r"leaves out a thought \(<think>\) of a message of the assistant"):
        source.open("train")


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
