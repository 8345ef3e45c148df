"""Calls that a request demands, thoughts apart, and an agent's loop, through the server with OpenAI's client."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import openai
import pytest

from capibara.inference.calls.reasoning import ReasoningIn
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.engine.requests.stream import Finish, Piece, Stream
from capibara.inference.sampling.sampling import Sampling
from capibara.inference.sampling.text import TextStream
from capibara.inference.server.service.service import Served, ServerConfig
from capibara.models import api
from tests.inference.server.test_server import HELLO, Running
from tests.inference.server.test_tool_calls import chat_of

TURNS = "{% for m in messages %}<|turn|>{{ m.role }}{{ m.content or '' }}{% for c in m.tool_calls or [] %}CALL{% endfor %}{% endfor %}{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
# Form -> how a template writes a call, its tokens.
FORMS = {
    "hermes": ("<tool_call>{{ c }}", ()),
    "mistral": ("[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments }}", ("[TOOL_CALLS]", "[ARGS]")),
    "gemma 4": ("<|tool_call>call:{{ c }}<tool_call|>", ("<|tool_call>", "<tool_call|>", '<|"|>')),
    "qwen xml": ("<tool_call>\n<function={{ c }}>\n<parameter={{ k }}>", ()),
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Rome", "Oslo"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["city", "days"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
NAMED = {"type": "function", "function": {"name": "now"}}
HOT = {"model": "tiny", "max_tokens": 200, "temperature": 1, "seed": 3}
LENGTH = 512


def served_with(folder, form, prompt="<|turn|>", more=()):
    """A tiny model with the tokens of a form, in an engine of its own; its prompts end with `prompt`."""
    call, tokens = FORMS[form]
    chat = chat_of(folder, TURNS.replace("CALL", call) + prompt, [*tokens, *more, "<|turn|>"])
    sizes = dict(vocab_size=320, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, dtype="float32")
    model = api.build(api.DecoderConfig(**sizes))
    params = jax.jit(model.init)(jax.random.key(1))
    engine = Engine(model, params, chat.vocabulary, LENGTH, EngineConfig(slots=2))
    return Served(engine, chat.vocabulary, chat, LENGTH, None, "tiny", Sampling(max_new_tokens=8))


def functions(message):
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]


def streamed(chunks):
    """Content, thought, calls and finish reason of a stream's deltas."""
    content, thought, calls, finish = "", "", [], None
    for chunk in chunks:
        (choice,) = chunk.choices
        content, finish = content + (choice.delta.content or ""), choice.finish_reason or finish
        thought += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            if call.id:
                assert call.index == len(calls)
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
    return content, thought, [(name, json.loads(arguments)) for name, arguments in calls], finish


@pytest.mark.parametrize("form", FORMS)
def test_a_model_calls_the_tool_that_is_demanded(tmp_path, form):
    served = served_with(tmp_path, form)
    with served.engine.start(), Running(served) as running:
        create = functools.partial(running.client().chat.completions.create, messages=HELLO, tools=TOOLS, **HOT)
        (choice,) = create(tool_choice="required", parallel_tool_calls=False).choices
        ((name, arguments),) = functions(choice.message)
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        if name == "weather":
            assert arguments["city"] in ("Rome", "Oslo") and 1 <= arguments["days"] <= 9
        assert functions(create(tool_choice=NAMED).choices[0].message) == [("now", {})]
        _, _, calls, finish = streamed(create(tool_choice="required", parallel_tool_calls=False, stream=True))
        assert calls == [(name, arguments)] and finish == "tool_calls"


ANSWER = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {
            "type": "object",
            "properties": {"sunny": {"type": "boolean"}},
            "required": ["sunny"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_a_model_calls_tools_before_an_answer_in_a_format(tmp_path, form):
    """As agents ask for it: OpenAI's Agents SDK with an output type, LangChain's provider strategy, PydanticAI's native output.

    A grammar of the answer alone would keep the model from its tools.
    """
    served = served_with(tmp_path, form)
    with served.engine.start(), Running(served) as running:
        create = functools.partial(running.client().chat.completions.create, messages=HELLO, tools=TOOLS, **HOT)
        options = {"response_format": ANSWER, "parallel_tool_calls": False}
        replies = [create(**options | {"seed": seed}).choices[0] for seed in range(12)]
        calls = [choice for choice in replies if choice.message.tool_calls]
        answers = [choice for choice in replies if not choice.message.tool_calls]
        assert calls and answers
        for choice in calls:
            assert choice.finish_reason == "tool_calls" and choice.message.content is None
            assert functions(choice.message)[0][0] in ("weather", "now")
        assert all(json.loads(choice.message.content)["sunny"] in (True, False) for choice in answers)
        (choice,) = create(**options, tool_choice="none").choices
        assert json.loads(choice.message.content)["sunny"] in (True, False)


def test_a_call_that_is_demanded_has_no_format(tmp_path):
    """As Instructor asks for it in its mode of Responses: the schema as a tool that is demanded, and as the format."""
    served = served_with(tmp_path, "hermes")
    with served.engine.start(), Running(served) as running:
        client = running.client()
        (choice,) = client.chat.completions.create(
            messages=HELLO, tools=TOOLS, tool_choice=NAMED, response_format=ANSWER, **HOT
        ).choices
        assert functions(choice.message) == [("now", {})]
        tools = [
            {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}, "strict": True}
        ]
        text = {"format": {"type": "json_schema", **ANSWER["json_schema"], "strict": True}}
        reply = client.responses.create(
            model="tiny", input="x", tools=tools, tool_choice={"type": "function", "name": "now"}, text=text
        )
        assert [(item.type, item.name) for item in reply.output] == [("function_call", "now")]
        with pytest.raises(openai.BadRequestError, match="demands a call, and a text can follow one grammar"):
            client.chat.completions.create(
                messages=HELLO, tools=TOOLS, tool_choice=NAMED, extra_body={"guided_regex": "a+"}, **HOT
            )
        for guided, want in (({"guided_regex": "a{3}"}, "aaa"), ({"guided_json": {"const": 1}}, "1")):
            reply = client.chat.completions.create(messages=HELLO, tools=TOOLS, extra_body=guided, **HOT)
            assert reply.choices[0].message.content == want


@pytest.mark.parametrize("tag, special", [("think", False), ("think", True), ("seed:think", False)])
def test_a_call_that_is_demanded_follows_the_thought_that_the_prompt_has_opened(tmp_path, tag, special):
    tokens = (f"<{tag}>", f"</{tag}>") if special else ()
    served = served_with(tmp_path, "hermes", f"<|turn|><{tag}>\n{{# </{tag}> #}}", tokens)
    with served.engine.start(), Running(served) as running:
        options = {**HOT, "tools": TOOLS, "tool_choice": NAMED, "extra_body": {"thinking_tokens": 5}}
        (choice,) = running.client().chat.completions.create(messages=HELLO, **options).choices
        assert functions(choice.message) == [("now", {})] and choice.message.content is None
        assert 1 <= len(choice.message.reasoning_content) <= 5


def test_a_message_that_mentions_a_tag_opens_no_thought(tmp_path):
    served = served_with(tmp_path, "hermes", "<|turn|>{# <think></think> #}")
    messages = [{"role": "user", "content": "What is <think>?"}]
    with served.engine.start(), Running(served) as running:
        options = {**HOT, "tools": TOOLS, "tool_choice": NAMED}
        (choice,) = running.client().chat.completions.create(messages=messages, **options).choices
        assert functions(choice.message) == [("now", {})] and choice.message.content is None


def test_calls_that_cannot_be_forced_are_refused(tmp_path, served):
    plain = chat_of(tmp_path, TURNS, [])
    cases = [
        (dict(tools=TOOLS, tool_choice="required"), "the form of the model's calls is not known"),
        (dict(tools=TOOLS, tool_choice=NAMED), "the form of the model's calls is not known"),
        (dict(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "no"}}), "names 'no', the tools are"),
        (dict(tools=TOOLS, tool_choice="any"), "must be 'none', 'auto', 'required' or"),
        (dict(tool_choice="required"), "which needs tools: leave it out"),
        (dict(tool_choice="auto"), "which needs tools: leave it out"),
    ]
    with Running(dataclasses.replace(served, vocabulary=plain.vocabulary, chat=plain)) as running:
        for options, message in cases:
            with pytest.raises(openai.BadRequestError, match=message) as caught:
                running.client().chat.completions.create(messages=HELLO, **HOT, **options)
            assert caught.value.param == "tool_choice"


def says(monkeypatch, chat, answer):
    """The engine gives `answer(prompt)`, token by token."""

    def submit(self, prompt, sampling, *, ends, spelled, **_):
        names = {token: chat.vocabulary.spelling(token) for token in spelled}
        text, stream = TextStream(chat.vocabulary, sampling.stop, names), Stream(lambda: False)
        for token in chat.vocabulary.encode_rendered(answer(chat.vocabulary.decode(prompt)))[0].tolist():
            if token in (*chat.vocabulary.end_ids, *ends):
                break
            stream.put(Piece(text.feed(token), token))
        stream.put(Piece(text.close(), None))
        stream.end(Finish.STOP, 1, 0)
        return stream

    monkeypatch.setattr(Engine, "submit", submit)


def test_an_agent_calls_two_tools_and_answers(tmp_path, served, monkeypatch):
    template = (
        TURNS.replace("CALL", "<tool_call>{{ c.function.name }}{{ c.function.arguments }}")
        + "<|turn|>assistant<think>\n"
    )
    chat = chat_of(tmp_path, template + "{# </think> #}", ["<|turn|>"])

    def answer(prompt):
        if "21 degrees" in prompt:
            return "I have both.</think>\n\nIt is noon, and 21 degrees."
        if "noon" in prompt:
            return 'Now the city.\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 1}}\n</tool_call>'
        return 'First the time.\n</think>\n\nI look.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'

    says(monkeypatch, chat, answer)
    results = {"now": "noon", "weather": "21 degrees"}
    with Running(dataclasses.replace(served, vocabulary=chat.vocabulary, chat=chat, length=4096)) as running:
        client, messages, called, thoughts = running.client(), list(HELLO), [], []
        for _ in range(5):
            reply = client.chat.completions.create(messages=messages, tools=TOOLS, **HOT)
            (choice,) = reply.choices
            thoughts.append(choice.message.reasoning_content)
            assert 0 < reply.usage.completion_tokens_details.reasoning_tokens < reply.usage.completion_tokens
            assert streamed(client.chat.completions.create(messages=messages, tools=TOOLS, stream=True, **HOT)) == (
                choice.message.content or "",
                thoughts[-1],
                functions(choice.message) if choice.message.tool_calls else [],
                choice.finish_reason,
            )
            messages.append(choice.message.model_dump(exclude_none=True))
            if choice.finish_reason == "stop":
                break
            for call in choice.message.tool_calls:
                called.append((call.function.name, json.loads(call.function.arguments)))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": results[call.function.name]})
    assert called == [("now", {}), ("weather", {"city": "Rome", "days": 1})]
    assert thoughts == ["First the time.", "Now the city.", "I have both."]
    assert messages[-1]["content"] == "It is noon, and 21 degrees."


@pytest.mark.parametrize("tokens", [(), ("<think>", "</think>")], ids=["text", "special tokens"])
def test_thoughts_are_inline_if_asked(tmp_path, served, monkeypatch, tokens):
    chat = chat_of(tmp_path, TURNS + "{# <think></think> #}", ["<|turn|>", *tokens])
    says(monkeypatch, chat, lambda _: "<think>Hm.</think>So.")
    for reasoning, content in (
        (ReasoningIn.APART, "So."),
        (ReasoningIn.INLINE, "Hm.So." if tokens else "<think>Hm.</think>So."),
    ):
        config = ServerConfig(reasoning=reasoning)
        with Running(dataclasses.replace(served, vocabulary=chat.vocabulary, chat=chat), config) as running:
            reply = running.client().chat.completions.create(messages=HELLO, **HOT)
            message, usage = reply.choices[0].message, reply.usage
            assert message.content == content
            if reasoning is ReasoningIn.APART:
                assert message.reasoning == message.reasoning_content == "Hm."
                assert usage.completion_tokens_details.reasoning_tokens > 2
            else:
                assert not hasattr(message, "reasoning_content") and usage.completion_tokens_details is None
