"""Conversations in every format, and what is said of records that hold none."""

from __future__ import annotations

import json

import pytest

from capibara.core.types import UserError
from capibara.data.chat.formats import Conversation, Format, read_conversation, read_preference, read_prompt

TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    ("record", "format"),
    [
        ({"messages": TALK}, Format.MESSAGES),
        ({"prompt": "p", "messages": TALK}, Format.MESSAGES),
        (
            {"messages": [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in TALK]},
            "messages",
        ),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, Format.SHAREGPT),
        ({"conversations": TALK}, Format.SHAREGPT),
        ({"prompt": "q", "completion": "a"}, Format.PROMPT_COMPLETION),
        ({"prompt": TALK[:1], "completion": TALK[1:]}, Format.PROMPT_COMPLETION),
        ({"instruction": "q", "input": "", "output": "a"}, Format.ALPACA),
        ({"instruction": "q", "output": "a", "system": ""}, Format.ALPACA),
        ({"question": "q", "solution": "a"}, Format.QUESTION),
        ({"question": "q", "answer": "a", "id": 7}, Format.QUESTION),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, Format.CHOSEN),
        ({"prompt": "q", "response": "a"}, Format.PROMPT_COMPLETION),
        ({"instruction": "q", "context": "", "response": "a", "category": "open_qa"}, Format.ALPACA),
        ({"problem": "q", "solution": "a", "level": "5"}, Format.QUESTION),
        ({"query": "q", "response": "a"}, Format.QUESTION),
        (
            {"contents": [{"role": "user", "parts": [{"text": "q"}]}, {"role": "model", "parts": [{"text": "a"}]}]},
            Format.CONTENTS,
        ),
        (
            {
                "input": {"messages": TALK[:1]},
                "preferred_output": TALK[1:],
                "non_preferred_output": [{"role": "assistant", "content": "b"}],
            },
            Format.CHOSEN,
        ),
    ],
)
def test_formats(record, format):
    assert read_conversation(record, "a:1", Format(format)) == Conversation(TALK, None)
    if format != "chosen":
        assert read_conversation(record, "a:1") == Conversation(TALK, None)


@pytest.mark.parametrize(
    "system",
    [
        {"system": "Be brief."},
        {"system_prompt": "Be brief."},
        {"schemaVersion": "bedrock-conversation-2024", "system": [{"text": "Be brief."}]},
        {"system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"systemInstruction": {"role": "system", "parts": [{"text": "Be brief."}]}},
        {"system": None, "system_prompt": "Be brief."},
    ],
)
def test_a_system_message_beside_the_messages(system):
    """As Anthropic, Amazon Bedrock, Gemini and data sets on the Hub have it."""
    messages = [{"role": "system", "content": "Be brief."}, *TALK]
    assert read_conversation({"messages": TALK} | system, "a:1").messages == messages
    assert read_conversation({"messages": messages} | system, "a:1").messages == messages
    pair = {"question": "q", "chosen": "a", "rejected": "b"} | system
    assert read_preference(pair, "a:1").chosen.messages == messages


def test_a_system_message_that_is_no_text_is_refused():
    with pytest.raises(UserError, match="a:1: system: only parts of type text"):
        read_conversation({"messages": TALK, "system": [{"cachePoint": {"type": "default"}}]}, "a:1")
    with pytest.raises(UserError, match="a:1: system: the content must be text, not 5"):
        read_conversation({"messages": TALK, "system": 5}, "a:1")


def test_variables_of_the_template_are_the_records():
    record = {"messages": TALK, "chat_template_kwargs": {"enable_thinking": False, "documents": None}}
    assert read_conversation(record, "a:1").variables == {"enable_thinking": False}
    record["chat_template_kwargs"] = '{"enable_thinking": false}'
    assert read_conversation(record, "a:1").variables == {"enable_thinking": False}
    assert read_conversation({"messages": TALK, "chat_template_kwargs": {}}, "a:1").variables is None
    with pytest.raises(UserError, match=r"a:1: chat_template_kwargs must be an object, not \[1\]"):
        read_conversation({"messages": TALK, "chat_template_kwargs": [1]}, "a:1")


def test_functions_are_tools():
    assert read_conversation({"messages": TALK, "functions": [TOOL["function"]]}, "a:1").tools == [TOOL]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"contents": [{"role": "user", "parts": [{"fileData": {}}]}]}, "contents.0.: only parts of type text"),
        ({"contents": "q"}, "contents must be a list of turns"),
        ({"contents": [{"role": "user"}]}, "contents must be a list of turns"),
    ],
)
def test_contents_that_are_no_text_are_refused(record, said):
    with pytest.raises(UserError, match=said):
        read_conversation(record, "a:1")


def test_openais_pairs_need_their_input():
    with pytest.raises(UserError, match="a:1: input must be an object with messages, not 'q'"):
        read_preference({"input": "q", "preferred_output": TALK[1:], "non_preferred_output": TALK[1:]}, "a:1")


def test_alpaca_with_everything():
    record = {"instruction": "i", "input": "n", "output": "o", "system": "s", "history": [["q", "a"]]}
    messages = read_conversation(record, "a:1").messages
    assert messages == [
        {"role": "system", "content": "s"},
        *TALK,
        {"role": "user", "content": "i\n\nn"},
        {"role": "assistant", "content": "o"},
    ]


def test_tool_calls_of_sharegpt_and_openai_are_the_same():
    sharegpt = {
        "conversations": [
            {"from": "system", "value": "s"},
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": '{"y": 2}'},
            {"from": "gpt", "value": "a"},
        ],
        "tools": '[{"name": "f", "parameters": {}}]',
    }
    openai = {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{**CALL, "function": {"name": "f", "arguments": '{"x": 1}'}}],
            },
            {"role": "tool", "content": {"y": 2}, "tool_call_id": "call00001"},
            {"role": "assistant", "content": "a"},
        ],
        "tools": [TOOL],
    }
    first, second = read_conversation(sharegpt, "a:1"), read_conversation(openai, "a:1")
    assert first == second
    assert first.messages[2] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert first.messages[3] == {"role": "tool", "content": '{"y": 2}', "tool_call_id": "call00001"}
    assert first.tools == [TOOL]


def test_what_else_a_message_has_is_kept():
    messages = [TALK[0], {**TALK[1], "weight": 0, "name": "n"}]
    assert read_conversation({"messages": messages, "tools": ""}, "a:1") == Conversation(messages, None)


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_goes_by_the_names_that_templates_know(key):
    message = read_conversation({"messages": [TALK[0], {**TALK[1], key: "r"}]}, "a:1").messages[1]
    assert message["reasoning_content"] == message["thinking"] == "r" and message["content"] == "a"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"text": "x"},
            r"a.jsonl:7 has no conversation \(it has: text\): known keys are messages; conversations/.*; prompt \+",
        ),
        ({}, r"a.jsonl:7 has no conversation \(it has: nothing\)"),
        ([TALK], r"a.jsonl:7 must be a JSON object, not list: .* with `capibara prepare instructions`"),
        (
            {"prompt": "x", "chosen": "y", "rejected": "z"},
            r"is a preference pair: set ChatJsonlSource.format = 'chosen'",
        ),
        ({"messages": []}, r"a.jsonl:7: messages must be a list of messages, not \[\]"),
        ({"messages": "hi"}, r"messages must be a list of messages, not 'hi'"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\]: the content must be text, not None"),
        ({"messages": [TALK[0], {"text": "x"}]}, r"messages\[1\] must have role and content, .*\(it has: text\)"),
        ({"messages": ["x"]}, r"messages\[0\] must have role and content, .*\(it has: 'x'\)"),
        ({"messages": [{"role": 3, "content": "x"}]}, r"messages\[0\]: the role must be text, not 3"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            r"only parts of type text .* not \[\{'type': 'im",
        ),
        ({"messages": TALK, "images": ["x.jpg"]}, r"a.jsonl:7 has images: only text"),
        ({"prompt": 1, "completion": "x"}, r"a.jsonl:7: prompt must be text, not 1"),
        ({"instruction": "x", "output": None}, r"a.jsonl:7: output must be text, not None"),
        ({"instruction": "x", "output": "y", "history": [["q"]]}, r"history must be a list of \[instruction, answer\]"),
        (
            {"conversations": [{"from": "function_call", "value": "f("}]},
            r"conversations\[0\]: a call must be JSON .*: 'f\('",
        ),
        ({"messages": [{**TALK[1], "tool_calls": [{"x": 1}]}]}, r"a tool call must have a name and arguments, not"),
        (
            {"messages": [{**TALK[1], "tool_calls": [{"name": "f", "arguments": "{"}]}]},
            r"the arguments of f must be JSON",
        ),
        ({"messages": TALK, "tools": "["}, r"a.jsonl:7: tools must be JSON"),
        *(
            ({"messages": TALK, "tools": [tool]}, r"a.jsonl:7: tools must be a list of functions with a name, not")
            for tool in (
                {},
                {"name": None},
                {"type": "function", "function": {}},
                {"function": "f"},
                {"function": {"name": ""}},
                {"function": {"name": 3}},
                {"function": None, "name": "f"},
            )
        ),
        ({"messages": TALK, "tools": [3]}, r"a.jsonl:7: tools must be a list of functions with a name, not \[3\]"),
    ],
)
def test_bad_records(record, message):
    with pytest.raises(UserError, match=message) as caught:
        read_conversation(record, "a.jsonl:7")
    assert "\n" not in str(caught.value)


def test_a_record_of_another_format_than_is_asked_for():
    with pytest.raises(
        UserError, match=r"a:1 is no alpaca record: it needs instruction and output/response \(it has: messages\)"
    ):
        read_conversation({"messages": TALK}, "a:1", Format.ALPACA)


ENDINGS = ([*TALK], [TALK[0], {"role": "assistant", "content": "b"}])


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": TALK[:1], "chosen": ENDINGS[0][1:], "rejected": ENDINGS[1][1:]},
        {"chosen": ENDINGS[0], "rejected": ENDINGS[1]},
        {"prompt": "q", "chosen": ENDINGS[0], "rejected": ENDINGS[1], "score": 3},
        {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"},
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
    ],
)
def test_preferences(record):
    pair = read_preference(json.loads(json.dumps(record)), "a:1")
    assert (pair.chosen.messages, pair.rejected.messages) == ENDINGS


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"prompt": "q", "chosen": "a"},
            r"a:1 is no preference pair: it needs chosen and rejected \(it has: prompt, chosen\)",
        ),
        ({"chosen": "a", "rejected": "b"}, r"a:1: chosen and rejected have no prompt .*: known keys are prompt, "),
        ({"chosen": ENDINGS[0], "rejected": [TALK[1], TALK[1]]}, r"may only differ in their last message"),
        ({"prompt": "q", "chosen": "a", "rejected": 3}, r"a:1: rejected must be text, not 3"),
        ({"chosen": TALK[:1], "rejected": TALK[:1]}, r"chosen must end with a message of the assistant"),
    ],
)
def test_bad_preferences(record, message):
    with pytest.raises(UserError, match=message):
        read_preference(record, "a:1")


@pytest.mark.parametrize("key", ["question", "prompt", "query"])
def test_what_was_said_before_a_question(key):
    """ms-swift has a history beside query and response, LLaMA-Factory beside instruction."""
    record = {key: "i", "response": "o", "history": [["q", "a"]]}
    asked = [*TALK, {"role": "user", "content": "i"}]
    assert read_conversation(record, "a:1").messages == [*asked, {"role": "assistant", "content": "o"}]
    assert read_prompt(record, "a:1").messages == asked
    with pytest.raises(UserError, match=r"a:1: history must be a list of \[instruction, answer\], not 'q'"):
        read_prompt({**record, "history": ["q"]}, "a:1")


@pytest.mark.parametrize(
    "beside",
    [
        {"context": "The cat sat."},
        {"passage": "The cat sat."},
        {"choices": ["on a mat", "nowhere"]},
        {"options": {"A": "on a mat", "B": "nowhere"}},
        {"choices": {"text": ["on a mat"], "label": ["A"]}},
    ],
)
@pytest.mark.parametrize("key", ["question", "prompt", "problem", "instruction"])
def test_what_a_question_is_about_is_in_it_or_refused(beside, key):
    """Without its passage or choices a model would learn to guess."""
    name = next(iter(beside))
    about = " ".join(["The cat sat.", "A on a mat", "B nowhere"])
    record = {"response": "a", **beside}
    if (key, name) != ("instruction", "context"):  # which Dolly's lines have
        for reader in (read_conversation, read_prompt):
            with pytest.raises(
                UserError, match=rf"a:1: {name} \(.*\) is not in {key}, which alone the model would read"
            ):
                reader({key: "Where?", **record}, "a:1")
        assert read_conversation({key: f"{about} Where?", **record}, "a:1").messages[0]["content"].endswith("Where?")
    assert read_conversation({key: "Where?", **record, name: None}, "a:1").messages[0]["content"] == "Where?"


@pytest.mark.parametrize("key", ["prompt", "question"])
def test_a_pair_has_what_its_question_is_about(key):
    pair = {key: "i", "chosen": "a", "rejected": "b"}
    assert len(read_preference({**pair, "history": [["q", "a"]]}, "a:1").chosen.messages) == 4
    with pytest.raises(UserError, match=f"context .* is not in {key}"):
        read_preference({**pair, "context": "c"}, "a:1")


def test_a_call_of_openais_older_form_is_a_tool_call():
    call = {"name": "f", "arguments": '{"x": 1}'}
    older = [
        TALK[0], {"role": "assistant", "content": None, "function_call": call}, {"role": "function", "name": "f", "content": "2"},
        TALK[1],
    ]  # fmt: skip
    record = {"messages": older, "functions": [TOOL["function"]]}
    messages, tools, _ = read_conversation(record, "a:1")
    assert tools == [TOOL]
    assert messages == [
        TALK[0], {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "name": "f", "tool_call_id": "call00001"}, TALK[1],
    ]  # fmt: skip


def test_documents_are_for_the_template():
    documents = [{"title": "t", "text": "x"}]
    assert read_conversation({"messages": TALK, "documents": documents}, "a:1").variables == {"documents": documents}


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ({"history": 5}, r"line: history must be a list of \[instruction, answer\], not 5"),
        ({"history": "Hi"}, r"line: history must be a list of \[instruction, answer\], not 'Hi'"),
        ({"choices": [3, 4.5]}, r"line: choices \(\[3, 4.5\]\) is not in question"),
        ({"options": json.loads("[" * 900 + '"x"' + "]" * 900)}, "line: options .* is not in question"),
        ({"documents": "a text"}, "line: documents must be a list of objects such as {title, text}, not 'a text'"),
        ({"documents": ["a text"]}, "line: documents must be a list of objects"),
        (
            {"documents": [{"text": "a"}], "chat_template_kwargs": {"documents": []}},
            "line has documents, and chat_template_kwargs has them too: leave one of the two out",
        ),
        (
            {"tools": [{"name": "f"}], "functions": [{"name": "g"}]},
            "line has tools and functions, which is their older name: leave one of the two out",
        ),
    ],
)
def test_what_stands_beside_a_question_is_read_or_refused(beside, message):
    with pytest.raises(UserError, match=message):
        read_conversation({"question": "What is 2 + 2?", "answer": "4"} | beside, "line")


def test_numbers_that_a_question_has_are_choices():
    record = {"question": "Is it 3 or 4.5?", "answer": "3", "choices": [3, 4.5, None, True]}
    assert [message["content"] for message in read_conversation(record, "line").messages] == ["Is it 3 or 4.5?", "3"]


def test_messages_have_one_history_and_one_list_of_calls():
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert read_conversation({"messages": turns, "history": [["a", "b"]]}, "line").messages == turns
    with pytest.raises(UserError, match="line has history beside messages, which are read alone: write it into them"):
        read_conversation({"messages": turns, "history": [["c", "d"]]}, "line")
    calls = {"tool_calls": [{"name": "f", "arguments": {}}], "function_call": {"name": "g", "arguments": "{}"}}
    with pytest.raises(UserError, match="has tool_calls and function_call, which is their older name: leave one"):
        read_conversation({"messages": [turns[0], turns[1] | calls]}, "line")
