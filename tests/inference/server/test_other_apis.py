"""Anthropic's and OpenAI's newer API through their own clients: answers, calls, thoughts, streams and mistakes."""

from __future__ import annotations

import dataclasses
import json

import anthropic
import openai
import pytest

from capibara.inference.engine.engine import Engine
from capibara.inference.engine.requests.stream import Finish, Piece, Stream
from capibara.inference.sampling.text import TextStream
from tests.inference.server.test_server import Running
from tests.inference.server.test_tool_calls import chat_of

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}\n"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}assistant: {% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
SAID = f"<think>I look.</think>Let me see. {CALL}<|end|>"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
LONG = {"max_output_tokens": 500}
HELLO = [{"role": "user", "content": "Weather in Oslo?"}]
ANTHROPIC_TOOL = {"name": "weather", "description": "Tells it.", "input_schema": SCHEMA}
OPENAI_TOOL = {"type": "function", "name": "weather", "description": "Tells it.", "parameters": SCHEMA, "strict": True}


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return chat_of(tmp_path_factory.mktemp("chat"), TEMPLATE, ["<|im_start|>"])


@pytest.fixture
def prompts(monkeypatch, chat):
    """Has the model say `SAID`, and then "Sunny." after a tool's result; collects the prompts."""
    seen = []

    def submit(self, prompt, sampling, *, ends, spelled, **_):
        seen.append("".join(chat.vocabulary.spelling(token) or chat.vocabulary.decode([token]) for token in prompt))
        said = "Sunny.<|end|>" if "17 degrees" in seen[-1] else SAID
        names = {token: chat.vocabulary.spelling(token) for token in spelled}
        text, stream = TextStream(chat.vocabulary, sampling.stop, names), Stream(lambda: False)
        finish = Finish.LENGTH
        for token in chat.vocabulary.encode_rendered(said)[0].tolist()[: sampling.max_new_tokens]:
            if token in (*chat.vocabulary.end_ids, *ends):
                finish = Finish.STOP
                break
            stream.put(Piece(text.feed(token), token, -0.5, ((token, -0.5),)))
            if text.stopped:
                finish = Finish.STOP
                break
        stream.put(Piece(text.close(), None))
        stream.end(finish, len(prompt), 0, stop=text.stop)
        return stream

    monkeypatch.setattr(Engine, "submit", submit)
    return seen


@pytest.fixture
def running(served, chat, prompts):
    with Running(dataclasses.replace(served, vocabulary=chat.vocabulary, chat=chat, length=2000)) as running:
        yield running


@pytest.fixture
def claude(running):
    return anthropic.Anthropic(base_url="http://{}:{}".format(*running.address), api_key="none", max_retries=0)


def test_anthropics_client_gets_thoughts_text_and_calls(claude):
    message = claude.messages.create(model="tiny", max_tokens=500, messages=HELLO, tools=[ANTHROPIC_TOOL])
    thought, text, call = message.content
    assert (thought.type, thought.thinking) == ("thinking", "I look.")
    assert (text.type, text.text.strip()) == ("text", "Let me see.")
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Oslo"}) and call.id
    assert (message.stop_reason, message.stop_sequence, message.role) == ("tool_use", None, "assistant")
    assert message.usage.input_tokens > 10 and message.usage.output_tokens == len(SAID.replace("<|end|>", ""))


def test_anthropics_client_puts_a_stream_together(claude):
    whole = claude.messages.create(model="tiny", max_tokens=500, messages=HELLO, tools=[ANTHROPIC_TOOL])
    with claude.messages.stream(model="tiny", max_tokens=500, messages=HELLO, tools=[ANTHROPIC_TOOL]) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert [block.model_dump(exclude={"id", "signature"}) for block in streamed.content] == [
        block.model_dump(exclude={"id", "signature"}) for block in whole.content
    ]
    assert streamed.stop_reason == "tool_use" and streamed.usage.output_tokens == whole.usage.output_tokens
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    assert kinds.count("thinking") > 3 and kinds.count("text") > 3 and kinds.count("input_json") > 3


def test_an_agent_of_anthropics_client_comes_to_its_end(claude, prompts):
    messages = list(HELLO)
    while True:
        message = claude.messages.create(
            model="tiny", max_tokens=500, system="Be brief.", messages=messages, tools=[ANTHROPIC_TOOL]
        )
        messages.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            break
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "17 degrees"} for call in calls]
        messages.append({"role": "user", "content": results})
    assert message.content[0].text == "Sunny." and message.stop_reason == "end_turn"
    prompt = prompts[-1]
    assert "system: Be brief." in prompt and "user: Weather in Oslo?" in prompt and "tool: 17 degrees" in prompt
    assert "<think>I look.</think>Let me see." in prompt and '"arguments": {"city": "Oslo"}' in prompt


def test_why_a_message_of_anthropics_ends(claude):
    ask = lambda **options: claude.messages.create(**{"model": "tiny", "max_tokens": 500, "messages": HELLO} | options)  # noqa: E731
    cut = ask(max_tokens=3)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
    stopped = ask(stop_sequences=["never", "me "])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "me ")
    assert stopped.content[-1].text == "Let "


@pytest.mark.parametrize(
    "thinking, limit", [({"type": "enabled", "budget_tokens": 5}, 5), ({"type": "adaptive"}, None)]
)
def test_a_budget_limits_thoughts_by_the_models_own_tags(claude, monkeypatch, thinking, limit):
    asked, real = [], Engine.submit
    monkeypatch.setattr(
        Engine,
        "submit",
        lambda self, prompt, sampling, **more: asked.append(sampling) or real(self, prompt, sampling, **more),
    )
    claude.messages.create(model="tiny", max_tokens=50, messages=HELLO, thinking=thinking)
    assert (asked[-1].thinking_tokens, asked[-1].thinking_tags) == (limit, ("<think>", "</think>"))


def test_anthropics_tokens_are_counted(claude, prompts):
    counted = claude.messages.count_tokens(model="tiny", messages=HELLO, system="Be brief.", tools=[ANTHROPIC_TOOL])
    message = claude.messages.create(
        model="tiny", max_tokens=5, messages=HELLO, system="Be brief.", tools=[ANTHROPIC_TOOL]
    )
    assert counted.input_tokens == message.usage.input_tokens


@pytest.mark.parametrize(
    "options, kind, message",
    [
        ({"model": "other"}, anthropic.NotFoundError, "the model here is 'tiny'"),
        ({"messages": []}, anthropic.BadRequestError, "at least 1 item"),
        (
            {"messages": [{"role": "user", "content": []}]},
            anthropic.BadRequestError,
            "must have the role user or assistant, and content",
        ),
        ({"messages": [{"role": "judge", "content": "x"}]}, anthropic.BadRequestError, "must have the role user or"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            anthropic.BadRequestError,
            r"messages\[0\]\.content\[0\] is .*, must have the type text or tool_result",
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 0}},
            anthropic.BadRequestError,
            "thinking.budget_tokens is 0",
        ),
        (
            {"tool_choice": {"type": "tool"}, "tools": [ANTHROPIC_TOOL]},
            anthropic.BadRequestError,
            "or tool with a name",
        ),
        (
            {"tool_choice": {"type": "tool", "name": "x"}, "tools": [ANTHROPIC_TOOL]},
            anthropic.BadRequestError,
            "the tools are",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            anthropic.BadRequestError,
            r"tools\[0\] is",
        ),
        (
            {"extra_body": {"temperature": 1.5}},
            anthropic.BadRequestError,
            "temperature is 1.5: input should be less than or equal to 1",
        ),
        ({"extra_body": {"temprature": 1}}, anthropic.BadRequestError, "did you mean temperature"),
    ],
    ids=range(11),
)
def test_mistakes_are_told_to_anthropics_client(claude, options, kind, message):
    with pytest.raises(kind, match=message) as caught:
        claude.messages.create(**{"model": "tiny", "max_tokens": 5, "messages": HELLO} | options)
    assert caught.value.body["type"] == "error"
    want = "not_found_error" if kind is anthropic.NotFoundError else "invalid_request_error"
    assert caught.value.body["error"]["type"] == want


def test_anthropics_usage_has_what_was_cached_apart(served):
    """With the real engine."""
    with Running(served) as running:
        claude = anthropic.Anthropic(base_url="http://{}:{}".format(*running.address), api_key="none", max_retries=0)
        asked = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "Count me once."}]}
        first, second = (claude.messages.create(**asked).usage for _ in range(2))
    assert second.cache_read_input_tokens > first.cache_read_input_tokens
    assert len({usage.input_tokens + usage.cache_read_input_tokens for usage in (first, second)}) == 1


def test_anthropics_key_is_checked(served):
    with Running(served, keys=("right",)) as running:
        address = "http://{}:{}".format(*running.address)
        with pytest.raises(anthropic.AuthenticationError) as caught:
            anthropic.Anthropic(base_url=address, api_key="wrong").messages.create(
                model="tiny", max_tokens=5, messages=HELLO
            )
        assert caught.value.body["error"]["type"] == "authentication_error"
        right = anthropic.Anthropic(base_url=address, api_key="right")
        assert right.messages.create(model="tiny", max_tokens=2, messages=HELLO).usage.output_tokens <= 2


def test_responses_have_thoughts_text_and_calls(running):
    reply = running.client().responses.create(model="tiny", input="Weather in Oslo?", tools=[OPENAI_TOOL], **LONG)
    reasoning, message, call = reply.output
    assert reasoning.content[0].text == "I look." and message.content[0].text.strip() == "Let me see."
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Oslo"})
    assert reply.status == "completed" and reply.output_text.strip() == "Let me see." and reply.usage.output_tokens > 20
    # From the token that completes the opening tag to the one that completes the closing one, a token a letter.
    assert reply.usage.output_tokens_details.reasoning_tokens == len(">I look.</think>")


def test_events_of_a_response_are_put_together(running):
    client, kinds = running.client(), []
    whole = client.responses.create(model="tiny", input=HELLO, tools=[OPENAI_TOOL], **LONG)
    with client.responses.stream(model="tiny", input=HELLO, tools=[OPENAI_TOOL], **LONG) as stream:
        for number, event in enumerate(stream):
            assert event.sequence_number == number
            kinds.append(event.type)
        streamed = stream.get_final_response()
    plain = lambda reply: [item.model_dump(exclude={"id", "call_id", "parsed_arguments"}) for item in reply.output]  # noqa: E731
    for ours, theirs in zip(plain(streamed), plain(whole), strict=True):
        for part in ours.get("content") or ():
            part.pop("parsed", None)
        assert ours == theirs
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    for name in ("reasoning_text", "output_text", "function_call_arguments"):
        assert kinds.count(f"response.{name}.delta") > 3 and kinds.count(f"response.{name}.done") == 1


def test_an_agent_of_responses_comes_to_its_end(running, prompts):
    client, items = running.client(), list(HELLO)
    for _ in range(3):
        reply = client.responses.create(
            model="tiny", input=items, instructions="Be brief.", tools=[OPENAI_TOOL], store=False, **LONG
        )
        items += [item.model_dump(exclude_none=True) for item in reply.output]
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            break
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "17 degrees"} for call in calls]
    assert reply.output_text == "Sunny."
    prompt = prompts[-1]
    assert "system: Be brief." in prompt and "tool: 17 degrees" in prompt and "<think>I look.</think>" in prompt
    assert prompt.count("assistant: ") == 2 and '"arguments": {"city": "Oslo"}' in prompt


def test_a_response_that_is_cut_off_says_so(running):
    reply = running.client().responses.create(
        model="tiny", input="x", max_output_tokens=20, include=["message.output_text.logprobs"]
    )
    assert reply.status == "incomplete" and reply.incomplete_details.reason == "max_output_tokens"
    whole = running.client().responses.create(
        model="tiny", input="17 degrees", include=["message.output_text.logprobs"]
    )
    assert "".join(one.token for one in whole.output[0].content[0].logprobs) == "Sunny."


@pytest.mark.parametrize(
    "options, param, message",
    [
        ({"input": []}, "input", "must be a text or a list of items"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "must have a message or a thought with text"),
        ({"input": [{"type": "web_search_call"}]}, "input", r"input\[0\] is .*, must be a message, function_call"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "must have a text or parts"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
        ({"background": True}, "background", "not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools", "must be a function with a name"),
        ({"include": ["file_search_call.results"]}, "include", "there is only 'message.output_text.logprobs'"),
        ({"reasoning": {"effort": "high"}}, "reasoning_effort", "nothing that the chat template asks for"),
        ({"text": {"format": {"type": "xml"}}}, "response_format", "must have the type 'text'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
    ],
    ids=range(11),
)
def test_mistakes_in_responses_are_told(running, options, param, message):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        running.client().post("/responses", body={"model": "tiny", "input": "x"} | options, cast_to=object)
    assert caught.value.param == param


def test_responses_follow_a_schema(served):
    """With the real engine."""
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    with Running(served) as running:
        reply = running.client().responses.create(
            model="tiny", input="x", max_output_tokens=100, temperature=1,
            text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        )  # fmt: skip
    assert json.loads(reply.output_text)["n"] in (1, 2)


def test_messages_follow_a_schema(served):
    """With the real engine."""
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    asked = {"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": "x"}]}
    with Running(served) as running:
        url = "http://{}:{}".format(*running.address)
        client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        reply = client.messages.create(**asked, output_config={"format": {"type": "json_schema", "schema": schema}})
        assert json.loads(reply.content[0].text)["n"] in (1, 2)
        for config, message in (
            ({"format": {"type": "text"}}, "output_config.format is .* must have type json_schema and a schema"),
            ({"format": {"type": "json_schema"}}, "schema"),
            ({"effort": "high"}, "reasoning_effort is nothing that the chat template asks for"),
            ({"task_budget": 3}, "output_config.task_budget is not a parameter"),
        ):
            with pytest.raises(anthropic.BadRequestError, match=message):
                client.messages.create(**asked, output_config=config)
