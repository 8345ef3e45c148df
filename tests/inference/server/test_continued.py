"""Answers that continue a message of the assistant, prompts without the beginning of an answer, and echoes."""

from __future__ import annotations

import json

import anthropic
import openai
import pytest

import capibara as cb
from capibara.inference.engine.engine import Engine
from tests.inference.server.test_other_apis import HELLO, TEMPLATE, chat, claude, prompts, running  # noqa: F401

BEGUN = [*HELLO, {"role": "assistant", "content": "In Oslo it is"}]
WEATHER = {"name": "weather", "arguments": "{}"}
CALLED = {"role": "assistant", "content": "I look.", "tool_calls": [{"type": "function", "function": WEATHER}]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CONTINUE = {"add_generation_prompt": False, "continue_final_message": True}


@pytest.fixture
def complete(running):  # noqa: F811
    def complete(messages, *, stream=False, **options):
        create = running.client().chat.completions.create
        return create(model="tiny", messages=messages, max_tokens=300, stream=stream, extra_body=options)

    return complete


def test_the_last_message_is_continued_where_it_ends(complete, prompts):  # noqa: F811
    complete(BEGUN, **CONTINUE)
    assert prompts[-1] == "<|im_start|>user: Weather in Oslo?<|im_start|>assistant: In Oslo it is"


def test_without_the_beginning_of_an_answer_the_prompt_ends_with_the_last_message(complete, prompts):  # noqa: F811
    complete(BEGUN, add_generation_prompt=False)
    assert prompts[-1].endswith("assistant: In Oslo it is")
    complete(BEGUN)
    assert prompts[-1].endswith("assistant: In Oslo it isassistant: ")


def test_an_echo_has_the_message_before_the_answer(complete):
    plain = complete(BEGUN, **CONTINUE).choices[0].message.content
    assert complete(BEGUN, **CONTINUE, echo=True).choices[0].message.content == f"In Oslo it is{plain}"
    assert complete(HELLO, echo=True).choices[0].message.content == plain  # it is the user's
    parts = [{"type": "text", "text": "In Oslo "}, {"type": "text", "text": "it is"}]
    begun = [*HELLO, {"role": "assistant", "content": parts}]
    answers = complete(begun, **CONTINUE, echo=True, n=2).choices
    assert [answer.message.content for answer in answers] == [f"In Oslo it is{plain}"] * 2
    chunks = [chunk.choices[0].delta.content or "" for chunk in complete(BEGUN, stream=True, **CONTINUE, echo=True)]
    assert "".join(chunks) == f"In Oslo it is{plain}" and chunks[1] == "In Oslo it is"


@pytest.mark.parametrize(
    "messages, options, message",
    [
        (BEGUN, {"continue_final_message": True}, "continue_final_message needs add_generation_prompt = false"),
        (HELLO, CONTINUE, "continue_final_message needs a last message of the assistant with a text"),
        ([*HELLO, {"role": "assistant", "content": ""}], CONTINUE, "needs a last message of the assistant with a text"),
        ([*HELLO, CALLED], CONTINUE, "needs a last message of the assistant with a text and no tool calls"),
        (BEGUN, {"echo": True, "stream": True, "tools": [TOOL]}, "echo is not available in a stream with tools"),
        (BEGUN, {"use_beam_search": True}, "use_beam_search is not supported"),
        (BEGUN, {"logprob_token_ids": [5]}, "logprob_token_ids is not supported"),
        (BEGUN, {"chat_template": "{{ messages }}"}, "chat_template is not supported"),
        (BEGUN, {"top_k": -2}, "top_k is -2"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(complete, messages, options, message):
    with pytest.raises(openai.BadRequestError, match=message):
        complete(messages, **options)


def test_values_that_ask_for_nothing_are_taken(complete):
    nothing = {
        "use_beam_search": False,
        "bad_words": [],
        "skip_special_tokens": True,
        "priority": 0,
        "length_penalty": 1.0,
    }
    plain = complete(HELLO).choices[0].message.content
    for top_k in (-1, 0, 10**9):
        assert complete(HELLO, **nothing, top_k=top_k).choices[0].message.content == plain


def test_anthropics_last_message_of_the_assistant_begins_the_answer(claude, prompts):  # noqa: F811
    claude.messages.create(model="tiny", max_tokens=20, messages=BEGUN)
    assert prompts[-1].endswith("<|im_start|>assistant: In Oslo it is")
    claude.messages.create(model="tiny", max_tokens=20, messages=HELLO)
    assert prompts[-1].endswith("Weather in Oslo?assistant: ")


@pytest.mark.parametrize(
    "content, thinks, message",
    [
        ("", False, "messages.1. has no text that the answer could continue: leave it out"),
        ([{"type": "thinking", "thinking": "a", "signature": ""}], False, "messages.1. has no text that the answer"),
        ("It is", True, "messages.1. begins the answer, before which a thought belongs"),
    ],
)
def test_anthropics_answers_that_cannot_be_continued_are_refused(claude, content, thinks, message):  # noqa: F811
    messages = [*HELLO, {"role": "assistant", "content": content}]
    thinking = {"type": "enabled", "budget_tokens": 1024} if thinks else {"type": "disabled"}
    with pytest.raises(anthropic.BadRequestError, match=message):
        claude.messages.create(model="tiny", max_tokens=2000, messages=messages, thinking=thinking)


def test_after_a_call_of_anthropics_a_new_answer_begins(claude, prompts):  # noqa: F811
    call = {"type": "tool_use", "id": "1", "name": "weather", "input": {}}
    messages = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]}]
    claude.messages.create(model="tiny", max_tokens=20, messages=messages)
    assert prompts[-1].endswith("</tool_call>assistant: ")


def test_anthropics_answer_is_continued_after_its_thought(claude, prompts):  # noqa: F811
    blocks = [{"type": "thinking", "thinking": "So.", "signature": ""}, {"type": "text", "text": "It is"}]
    messages, thinking = [*HELLO, {"role": "assistant", "content": blocks}], {"type": "enabled", "budget_tokens": 1024}
    claude.messages.create(model="tiny", max_tokens=1500, messages=messages, thinking=thinking)
    assert prompts[-1].endswith("<think>So.</think>It is")


def test_a_template_that_does_not_write_the_message_cannot_be_continued(tmp_path):
    from capibara.core.types import UserError
    from capibara.data.chat.formats import Conversation
    from tests.inference.server.test_tool_calls import chat_of

    ended = chat_of(tmp_path, TEMPLATE.replace("{{ m.content }}", "{{ m.content }}<|im_start|>"), ["<|im_start|>"])
    assert ended.text_so_far(Conversation(BEGUN), "the request").endswith("In Oslo it is<|im_start|>")
    assert ended.text_to_continue(Conversation(BEGUN), "the request").endswith("In Oslo it is")
    shouting = chat_of(tmp_path, TEMPLATE.replace("{{ m.content }}", "{{ m.content | length }}"), ["<|im_start|>"])
    with pytest.raises(UserError, match="does not write the last message as it is"):
        shouting.text_to_continue(Conversation(BEGUN), "the request")


@pytest.mark.parametrize("special, count", [(None, 1), (True, 1), (False, 0)])
def test_completions_begin_with_the_tokenizers_token_unless_asked_not_to(running, prompts, monkeypatch, special, count):  # noqa: F811
    from capibara.data.tokenizers.vocabulary import TokenizerJsonVocabulary

    monkeypatch.setattr(TokenizerJsonVocabulary, "begin_ids", property(lambda self: (self.eos_id,)))
    running.client().completions.create(
        model="tiny",
        prompt="river",
        max_tokens=4,
        extra_body={} if special is None else {"add_special_tokens": special},
    )
    assert prompts[-1].endswith("river") and (prompts[-1] != "river") == bool(count)


def test_a_prompt_without_tokens_is_refused(running):  # noqa: F811
    with pytest.raises(openai.BadRequestError, match="prompt has no tokens"):
        running.client().completions.create(
            model="tiny", prompt="", max_tokens=4, extra_body={"add_special_tokens": False}
        )


def test_thoughts_are_left_out_where_they_are_not_wanted(complete, running):  # noqa: F811
    whole = complete(HELLO).choices[0].message
    assert whole.reasoning_content == whole.reasoning == "I look."
    assert not hasattr(complete(HELLO, include_reasoning=False).choices[0].message, "reasoning_content")
    chunks = [chunk.choices[0].delta for chunk in complete(HELLO, stream=True, include_reasoning=False)]
    assert not any(hasattr(delta, name) for delta in chunks for name in ("reasoning", "reasoning_content"))
    assert "".join(delta.content or "" for delta in chunks) == whole.content
    cut = running.client().chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=len("<think>I look.</"),
        stream=True,
        extra_body={"include_reasoning": False},
    )
    assert not any(
        hasattr(chunk.choices[0].delta, "reasoning") for chunk in cut
    )  # what waited for the tag's end neither


def test_all_tokens_without_a_row_are_named(complete):
    with pytest.raises(openai.BadRequestError, match="logit_bias has the tokens 'a', 'b', must have ids from 0 to"):
        complete(HELLO, logit_bias={"a": 1.0, "5": 1.0, "b": 2.0})


def test_a_key_of_a_part_that_the_template_would_not_get_is_refused(complete):
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    assert complete([{"role": "user", "content": [part]}]).choices
    with pytest.raises(openai.BadRequestError, match="a part of the content has .*source_lang_code.* = .*en"):
        complete([{"role": "user", "content": [part | {"source_lang_code": "en"}]}])
    with pytest.raises(openai.BadRequestError, match="a part of the content has .*image_url.* = .*cat"):
        complete([{"role": "user", "content": [part | {"image_url": "cat.png"}]}])


def test_tokens_are_named_by_their_ids_where_that_is_asked_for(running, complete, chat):  # noqa: F811
    ids = {"return_tokens_as_token_ids": True}
    (choice,) = (
        running.client()
        .completions.create(model="tiny", prompt="a b", max_tokens=5, logprobs=1, extra_body=ids)
        .choices
    )
    assert [int(name.removeprefix("token_id:")) for name in choice.logprobs.tokens]
    firsts = [next(iter(values)) for values in choice.logprobs.top_logprobs]
    assert firsts == choice.logprobs.tokens
    content = complete(HELLO, logprobs=True, top_logprobs=1, **ids).choices[0].logprobs.content
    spelled = [int(item.token.removeprefix("token_id:")) for item in content]
    assert chat.vocabulary.decode(spelled) == b"".join(bytes(item.bytes or []) for item in content).decode()
    assert all(item.top_logprobs[0].token == item.token for item in content)


def test_a_chunk_without_tokens_has_no_log_probabilities(complete):
    first, *others = complete(HELLO, stream=True, logprobs=True)
    assert first.choices[0].logprobs is None and others[-1].choices[0].logprobs is None
    assert any(chunk.choices[0].logprobs for chunk in others)


def test_responses_take_the_other_sampling_parameters(running, monkeypatch):  # noqa: F811
    asked = []
    submit = Engine.submit  # the one that `prompts` has put in its place
    monkeypatch.setattr(
        Engine,
        "submit",
        lambda self, ids, sampling, **more: asked.append(sampling) or submit(self, ids, sampling, **more),
    )
    create = running.client().responses.create
    create(model="tiny", input="x", extra_body={"top_k": 4, "repetition_penalty": 1.2, "seed": 42, "stop": ["q"]})
    assert (asked[-1].top_k, asked[-1].repetition_penalty, asked[-1].seed, asked[-1].stop) == (4, 1.2, 42, ("q",))
    with pytest.raises(openai.BadRequestError, match="top_k is -2"):
        create(model="tiny", input="x", extra_body={"top_k": -2})


def test_deltas_of_a_streamed_response_have_their_tokens(running, chat):  # noqa: F811
    create = running.client().responses.create
    include = ["message.output_text.logprobs"]
    events = [*create(model="tiny", input="x", stream=True, include=include, max_output_tokens=300)]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert deltas and all(delta.logprobs for delta in deltas[:-1])
    for delta in deltas[1:-1]:
        assert "".join(item.token for item in delta.logprobs) == delta.delta
    plain = create(model="tiny", input="x", stream=True, max_output_tokens=300)
    assert not any(event.logprobs for event in plain if event.type == "response.output_text.delta")


def test_conversations_are_tokenized_as_they_would_be_asked(running, chat):  # noqa: F811
    post = lambda **body: json.loads(running.http("POST", "/tokenize", json.dumps(body))[1])  # noqa: E731
    begun, ended, open_ = (
        post(messages=BEGUN, **options)["tokens"] for options in (CONTINUE, {"add_generation_prompt": False}, {})
    )
    texts = [chat.vocabulary.decode(ids) for ids in (begun, ended, open_)]
    assert texts[0].endswith("In Oslo it is") and texts[2] == f"{texts[1]}assistant: "
    special = post(messages=BEGUN, add_special_tokens=True)["tokens"]
    assert special == [*chat.vocabulary.begin_ids, *open_]
    answer = post(prompt="river", return_token_strs=True)
    assert answer["token_strs"] == [chat.vocabulary.tokenizer.id_to_token(token) for token in answer["tokens"]]
    assert post(prompt="river")["token_strs"] is None
    assert json.loads(running.http("GET", "/version")[1]) == {"version": cb.__version__}


def test_an_answer_may_be_as_long_as_fits_and_a_completion_as_sampling_says(running, served, monkeypatch):  # noqa: F811
    asked = []
    submit = Engine.submit  # the one that `prompts` has put in its place
    monkeypatch.setattr(
        Engine,
        "submit",
        lambda self, ids, sampling, **more: asked.append((len(ids), sampling)) or submit(self, ids, sampling, **more),
    )
    client = running.client()
    client.chat.completions.create(model="tiny", messages=HELLO)
    client.responses.create(model="tiny", input="x")
    client.completions.create(model="tiny", prompt="x")
    rooms = [2000 + 1 - count for count, _ in asked]
    assert [sampling.max_new_tokens for _, sampling in asked] == [*rooms[:2], served.sampling.max_new_tokens]


def test_a_choice_says_that_no_prompt_was_scored(running):  # noqa: F811
    (choice,) = running.client().completions.create(model="tiny", prompt="a", max_tokens=4).choices
    assert choice.prompt_logprobs is None and choice.token_ids is None and choice.prompt_token_ids is None
