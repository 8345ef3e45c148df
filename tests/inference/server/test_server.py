"""OpenAI's official client against a server: answers, streams, and clear errors for everything else."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from capibara.core.types import UserError
from capibara.data.chat.formats import Conversation
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.engine.requests.stream import ProcessLost, Stream
from capibara.inference.sampling.sampling import Sampling
from capibara.inference.server import server
from capibara.inference.server.app import app_of
from capibara.inference.server.prometheus import ServingMetrics
from capibara.inference.server.service.answers import StreamedTexts
from capibara.inference.server.service.http_errors import Refusal
from capibara.inference.server.service.service import ServerConfig, Service

SLOTS, LENGTH = 2, 256
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 12}
HELLO = [{"role": "user", "content": "Hello"}]


class Running:
    """A server in a thread; used with `with`."""

    def __init__(self, served, takes=ServerConfig(), keys=()):
        listening = server.listen("127.0.0.1", 0)
        self.address = listening.getsockname()
        metrics = ServingMetrics(lambda: self.service.load)
        self.service = Service(metrics)
        if served is not None:
            self.service.ready(served, takes)
        self.thread = threading.Thread(
            target=server.Server(app_of(self.service, metrics, keys), self.service).run, args=([listening],)
        )

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.service.drain()
        self.thread.join(30)
        assert not self.thread.is_alive()

    def client(self, key="none", kind=openai.OpenAI):
        return kind(base_url="http://{}:{}/v1".format(*self.address), api_key=key, max_retries=0, timeout=60)

    def http(self, method, path, body=None, headers=None):
        connection = http.client.HTTPConnection(*self.address, timeout=30)
        with contextlib.closing(connection):
            connection.request(method, path, body, {"Content-Type": "application/json", **(headers or {})})
            response = connection.getresponse()
            return response.status, response.read(), response.headers

    def metrics(self):
        status, page, _ = self.http("GET", "/metrics")
        assert status == 200
        families = text_string_to_metric_families(page.decode())
        return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


@pytest.fixture(scope="module")
def running(served):
    with Running(served) as running:
        yield running


@pytest.fixture
def slow(served, monkeypatch):
    """Slows down each program of the engine."""
    step = served.engine._loop.step

    def slowly():
        time.sleep(0.02 * served.engine._config.most_steps)
        return step()

    monkeypatch.setattr(served.engine._loop, "step", slowly)


def expected(served, prompt, **sampling):
    """The engine's own text after a prompt, or after the ids of a conversation."""
    sampling = Sampling(**{"temperature": 0.0, "max_new_tokens": 12, **sampling})
    ends = () if isinstance(prompt, str) else served.chat.ends
    return served.engine.submit(prompt, sampling, ends=ends).result()


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


# Answers.


def test_a_completion_is_the_engines(running, served):
    want = expected(served, "The river")
    found = running.client().completions.create(prompt="The river", **GREEDY)
    (choice,) = found.choices
    assert (choice.text, choice.finish_reason) == (want.text, want.finish) and len(want.text) > 3
    assert (found.model, found.object, found.id[:5]) == ("tiny", "text_completion", "cmpl-")
    assert found.usage.prompt_tokens == 9 and found.usage.completion_tokens == len(want.tokens)
    assert found.usage.total_tokens == 9 + len(want.tokens)
    echoed = running.client().completions.create(prompt="The river", echo=True, **GREEDY)
    assert echoed.choices[0].text == "The river" + want.text
    ids = served.vocabulary.encode("The river")  # its tokenizer.json adds no beginning token
    assert running.client().completions.create(prompt=ids, **GREEDY).choices[0].text == want.text


def test_many_prompts_and_texts_come_in_their_order(running, served):
    asked = dict(GREEDY, temperature=1.5, n=3, seed=7)
    found = running.client().completions.create(prompt=["a", "b"], **asked)
    want = [expected(served, prompt, temperature=1.5, seed=7 + k).text for prompt in ("a", "b") for k in range(3)]
    assert [choice.text for choice in found.choices] == want and len(set(want)) == 6
    assert found.usage.prompt_tokens == 2
    chunks = list(running.client().completions.create(prompt=["a", "b"], stream=True, **asked))
    texts = [""] * 6
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == want


def test_without_a_seed_texts_differ(running):
    asked = dict(GREEDY, temperature=2.0)
    texts = {running.client().completions.create(prompt="a", **asked).choices[0].text for _ in range(4)}
    assert len(texts) > 1


def test_a_conversation_is_answered_through_the_template(running, served):
    messages = [
        {"role": "system", "content": "Be <|im_end|> kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "you"}]},
    ]
    said = [messages[0], {"role": "user", "content": "Hello you"}]
    ids = served.chat.ids_after(Conversation(said), "here")
    want = expected(served, ids)
    found = running.client().chat.completions.create(messages=messages, **GREEDY)
    assert found.choices[0].message.content == want.text and found.choices[0].message.role == "assistant"
    assert (found.choices[0].finish_reason, found.object) == (want.finish, "chat.completion")
    assert found.usage.prompt_tokens == len(ids)
    again = running.client().chat.completions.create(messages=messages, **GREEDY)
    assert again.usage.prompt_tokens_details.cached_tokens == len(ids) - 1  # read for the one before
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    with_tools = running.client().chat.completions.create(messages=messages, tools=tools, **GREEDY)
    assert with_tools.usage.prompt_tokens > len(ids) + len("look")
    without = running.client().chat.completions.create(messages=messages, tools=tools, tool_choice="none", **GREEDY)
    assert without.usage.prompt_tokens == len(ids)


def test_a_stream_says_what_the_whole_says(running):
    client = running.client()
    asked = dict(GREEDY, logprobs=True, top_logprobs=2, max_tokens=30)
    whole = client.chat.completions.create(messages=HELLO, **asked)
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(messages=HELLO, stream=True, stream_options=options, **asked))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    named = [
        token for c in chunks if c.choices for token in (c.choices[0].logprobs.content if c.choices[0].logprobs else [])
    ]
    want = whole.choices[0].logprobs.content
    assert [(one.token, one.bytes) for one in named] == [(one.token, one.bytes) for one in want]
    # The prompt was read before: the last bits differ.
    assert [one.logprob for one in named] == pytest.approx([one.logprob for one in want], abs=1e-4)
    assert len(named) == whole.usage.completion_tokens
    assert all(len(one.top_logprobs) == 2 and one.top_logprobs[0].logprob == one.logprob for one in named)
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], whole.usage.completion_tokens)
    assert not any(chunk.usage for chunk in chunks[:-1]) and len({chunk.id for chunk in chunks}) == 1


def test_completions_name_likely_tokens(running):
    found = running.client().completions.create(prompt="The", logprobs=3, **GREEDY).choices[0]
    named = found.logprobs
    assert len(named.tokens) == len(named.token_logprobs) == len(named.top_logprobs) == len(named.text_offset) == 12
    assert all(max(best.values()) == value for best, value in zip(named.top_logprobs, named.token_logprobs))
    assert named.text_offset[0] == 0 and named.text_offset == sorted(named.text_offset)
    many = running.client().completions.create(prompt="The", logprobs=20, **GREEDY).choices[0].logprobs
    assert any(name.startswith("bytes:\\x") for best in many.top_logprobs for name in best)
    assert not any("\ufffd" in name for best in many.top_logprobs for name in best)
    assert all(name in best for best, name in zip(many.top_logprobs, many.tokens))


def test_stop_strings_and_our_own_parameters(running, served):
    text = expected(served, "The river", max_new_tokens=30).text
    stop = text[5:8]
    asked = dict(GREEDY, max_tokens=30)
    found = running.client().completions.create(prompt="The river", stop=stop, **asked).choices[0]
    assert (found.text, found.finish_reason) == (text[: text.index(stop)], "stop")
    own = {"repetition_penalty": 1.8, "top_k": 5, "min_p": 0.01}
    want = expected(served, "The river", max_new_tokens=30, **own).text
    assert (
        running.client().completions.create(prompt="The river", extra_body=own, **asked).choices[0].text == want != text
    )
    thought = dict(asked, prompt="<think>a", extra_body={"thinking_tokens": 2})
    text_after = running.client().completions.create(**thought).choices[0].text
    assert text_after == expected(served, "<think>a", max_new_tokens=30, thinking_tokens=2).text
    assert "</think>" in text_after[:12]
    assert running.client().completions.create(prompt="a", model="tiny").usage.completion_tokens <= 8
    greedy, text = dict(GREEDY, temperature=2.0), expected(served, "The river").text
    for near in ({"temperature": 1e-30}, {"top_p": 0}):
        assert running.client().completions.create(prompt="The river", **greedy | near).choices[0].text == text


def test_models_are_listed(running):
    assert [model.id for model in running.client().models.list()] == ["tiny"]
    assert running.client().models.retrieve("tiny").owned_by == "capibara"
    with pytest.raises(openai.NotFoundError, match="'other' is no model here"):
        running.client().models.retrieve("other")


# Refusals.

CHAT = {"messages": HELLO}
REFUSED = {
    "an unknown parameter": ({"prompt": "a", "temprature": 1}, "temprature", "did you mean temperature"),
    "no prompt": ({}, "prompt", "missing"),
    "a prompt of numbers": ({"prompt": [1.5]}, "prompt", "must be a string, a list"),
    "an empty list": ({"prompt": []}, "prompt", "must be a string, a list"),
    "a token that is not there": ({"prompt": [5, 10**12]}, "prompt", "must be from 0 to 259"),
    "a negative token": ({"prompt": [-1]}, "prompt", "must be from 0 to 259"),
    "a prompt too long": ({"prompt": "x" * 300}, "prompt", "has 300 tokens, must have at most 256"),
    "too many tokens": ({"prompt": "abc", "max_tokens": 255}, "max_tokens", "at most 254"),
    "tokens beyond number": ({"prompt": "abc", "max_tokens": 10**30}, "max_tokens", "at most 254"),
    "no tokens": ({"prompt": "a", "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    "a string for a number": ({"prompt": "a", "temperature": "0.5"}, "temperature", "should be a valid number"),
    "a truth for a number": ({"prompt": "a", "n": True}, "n", "should be a valid integer"),
    "too hot": ({"prompt": "a", "temperature": 2.5}, "temperature", "less than or equal to 2"),
    "a penalty": ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
    "a bias of a word": ({"prompt": "a", "logit_bias": {"the": 1}}, "logit_bias", "token 'the', must have ids from 0 to 259"),
    "a bias of no row": ({"prompt": "a", "logit_bias": {"260": 1}}, "logit_bias", "ids from 0 to 259"),
    "a large bias": ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias", "logit_bias of 5 is 101.0, must be from -100 to 100"),
    "many biases": ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "has 1025 tokens"),
    "an end of no row": ({"prompt": "a", "stop_token_ids": [260]}, "stop_token_ids", "must be from 0 to 259"),
    "a minimum above the limit": ({"prompt": "a", "min_tokens": 9, "max_tokens": 8}, "min_tokens", r"min_tokens is 9, must be at most max_tokens \(8\)"),
    "fewer drawn than returned": ({"prompt": "a", "n": 3, "best_of": 2}, "best_of", r"best_of is 2, must be at least n \(3\)"),
    "the best of a stream": ({"prompt": "a", "best_of": 2, "stream": True}, "best_of", "stream has texts before the best is known"),
    "too many drawn": ({"prompt": "a", "best_of": 17}, "best_of", "best_of is 17: at most 16"),
    "suffix": ({"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
    "too many texts": ({"prompt": ["a"] * 5, "n": 4}, "n", "5 prompts, n = 4: at most 16"),
    "too many stops": ({"prompt": "a", "stop": ["a"] * 5}, "stop", "at most 4"),
    "a stop of zero": ({"prompt": "a", "stop": 0}, "stop", "stop is 0, must be a string or a list"),
    "a stop of no kind": ({"prompt": "a", "stop": {}}, "stop", "must be a string or a list"),
    "an empty stop": ({"prompt": "a", "stop": [""]}, "stop", "1 to 1000 characters"),
    "too many likely": ({"prompt": "a", "logprobs": 21}, "logprobs", "less than or equal to 20"),
    "no top_p": ({"prompt": "a", "top_p": -0.1}, "top_p", "greater than or equal to 0"),
    "half a thought": ({"prompt": "a", "thinking_tokens": 0}, "thinking_tokens", "greater than or equal to 1"),
    "no messages": ({"messages": []}, "messages", "at least 1 item"),
    "text for messages": ({"messages": "hi"}, "messages", "valid list"),
    "a message of nothing": ({"messages": [{}]}, "messages", r"messages\[0\] must have role and content"),
    "a message with a number": ({"messages": [{"role": "user", "content": 5}]}, "messages", "content must be text"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages", "type text"
    ),
    "a template's refusal": ({"messages": [{"role": "judge", "content": "x"}]}, "messages", "^[^/]*template fails: the role judge is not known[^/]*$"),
    "a conversation too long": ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages", "at most 256"),
    "likely without logprobs": (CHAT | {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    "a tool that must be": (CHAT | {"tool_choice": "required"}, "tool_choice", "needs tools: leave it out"),
    "a choice of no kind": (CHAT | {"tool_choice": "any"}, "tool_choice", "must be 'none', 'auto', 'required' or"),
    "tools that are none": (CHAT | {"tools": [5]}, "messages", "tools must be a list of functions"),
    "a format of no kind": (CHAT | {"response_format": {"type": "xml"}}, "response_format", "must have the type 'text', 'json_object' or"),
    "a format without a schema": (CHAT | {"response_format": {"type": "json_schema"}}, "response_format", "must have a schema"),
    "a schema that cannot be": (CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}}, "response_format", 'matches no text: ask for one'),
    "two grammars": (CHAT | {"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex and guided_choice are set"),
    "a pattern that does not end": ({"prompt": "a", "guided_regex": "(a"}, "guided_regex", "unclosed group"),
    "a choice of numbers": ({"prompt": "a", "guided_choice": [1]}, "guided_choice", "must be a list of strings"),
    "a grammar of no text": ({"prompt": "a", "structured_outputs": {"grammar": 5}}, "guided_grammar", "must be a string"),
    "an output of no kind": ({"prompt": "a", "structured_outputs": {"xml": ""}}, "structured_outputs", "must be an object with one of json, regex"),
    "a variable that nobody reads": (CHAT | {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs", "'enable_thinking', and the template asks for none"),
    "an effort": (CHAT | {"reasoning_effort": "low"}, "reasoning_effort", "nothing that the chat template asks for"),
    "two limits": (CHAT | {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "max_tokens is 3 and max_completion_tokens is 4: .* leave one out"),
    "a limit of many digits": (CHAT | {"max_tokens": 10**3000}, "max_tokens", r" - max_tokens is 1\d{,99}\.\.\., must"),
    "texts of many digits": (CHAT | {"n": 10**3000}, "n", r" - n is 1\d{,99}\.\.\.: at most"),
    "options of a stream": ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "needs stream = true"),
    "options without a stream": (CHAT | {"stream": False, "stream_options": {}}, "stream_options", "needs stream = true"),
    "a choice of no tools": (CHAT | {"tool_choice": "auto"}, "tool_choice", "needs tools"),
    "a key that is almost one": ({"messages": [{"role": "user", "content": "x", "tool_cals": []}]}, "messages", r"messages\[0\] has 'tool_cals', which is no key of a message: did you mean tool_calls"),
    "a hurry": (CHAT | {"max_completion_tokens": 999}, "max_completion_tokens", "of prompt and text together"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_told(running, name):
    given, param, message = REFUSED[name]
    path = "/chat/completions" if "messages" in given else "/completions"
    with pytest.raises(openai.BadRequestError, match=message) as error:
        running.client().post(path, body={"model": "tiny", **given}, cast_to=object)
    assert error.value.param == param and error.value.type == "invalid_request_error"


BODIES = {
    "no JSON": (b"{", 400),
    "nothing": (b"", 400),
    "no UTF-8": (b'{"model": "tiny", "prompt": "\xff\xfe"}', 400),
    "half a character": (b'{"model": "tiny", "prompt": "\\ud800"}', 400),
    "a list": (b"[1]", 400),
    "deep": (b"[" * 100_000, 400),
    "no number": (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', 400),
    "infinity": (b'{"model": "tiny", "prompt": "a", "temperature": 1e999}', 400),
    "a long number": (b'{"model": "tiny", "prompt": "a", "max_tokens": ' + b"9" * 9999 + b"}", 400),
    "a long seed": (b'{"model": "tiny", "prompt": "a", "max_tokens": 1, "seed": ' + b"9" * 400 + b"}", 400),
    "a long penalty": (b'{"model": "tiny", "prompt": "a", "repetition_penalty": ' + b"9" * 400 + b"}", 400),
    "infinity of a call": (
        b'{"model": "tiny", "prompt": "a", "messages": [{"tool_calls": [{"function": {"arguments": {"x": 1e400}}}]}]}',
        400,
    ),
    "large": (b'{"model": "tiny", "prompt": "' + b"x" * 2**21 + b'"}', 413),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_of_any_kind_is_answered(running, name):
    body, want = BODIES[name]
    status, answer, _ = running.http("POST", "/v1/completions", body)
    assert status == want, answer
    if want != 200:
        assert json.loads(answer)["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize("number", ["1e400", "-2E+0999", "9" * 400 + ".5", "9" * 299 + "e99", "NaN", "-Infinity"])
@pytest.mark.parametrize("as_text", [False, True], ids=["values", "a text"])
def test_numbers_of_a_conversation_are_finite(running, number, as_text):
    """Templates would write Infinity, which is no JSON; pydantic_core reads 1e400 as it also without allow_inf_nan."""
    arguments = json.dumps(f'{{"x": {number}}}') if as_text else f'{{"x": {number}}}'
    call = f'{{"id": "a", "type": "function", "function": {{"name": "f", "arguments": {arguments}}}}}'
    talk = f'[{{"role": "user", "content": "1e400 NaN"}}, {{"role": "assistant", "tool_calls": [{call}]}}]'
    status, answer, _ = running.http("POST", "/v1/chat/completions", f'{{"model": "tiny", "messages": {talk}}}')
    assert status == 400 and json.loads(answer)["error"]["code"] == "invalid_json", answer


def test_what_is_not_there_is_told_in_the_same_shape(running):
    with pytest.raises(openai.NotFoundError, match="model is 'other', the model here is 'tiny'") as error:
        running.client().completions.create(prompt="a", model="other")
    assert error.value.code == "model_not_found"
    for method, path, want in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)):
        status, answer, _ = running.http(method, path)
        assert status == want and json.loads(answer)["error"]["code"] == "no_such_url"
    for kind in ("text/plain", ""):  # what a web page of others may send without asking
        status, answer, _ = running.http("POST", "/v1/completions", b"{}", {"Content-Type": kind})
        assert status == 415 and b"application/json" in answer


def test_a_model_without_a_template_has_no_chat(served):
    with Running(dataclasses.replace(served, chat=None)) as running:
        with pytest.raises(openai.BadRequestError, match="tiny has no chat template: request completions"):
            running.client().chat.completions.create(messages=HELLO, **GREEDY)
        assert running.client().completions.create(prompt="a", **GREEDY).choices


def test_a_key_is_asked_for(served):
    with Running(served, keys=("first", "zweiter-schlüssel")) as running:
        for key in ("wrong", "firs", "first2"):
            with pytest.raises(openai.AuthenticationError, match="API key is missing or wrong") as error:
                running.client(key).completions.create(prompt="a", **GREEDY)
            assert error.value.code == "invalid_api_key"
        assert running.client("first").completions.create(prompt="a", **GREEDY).choices
        second = {"Authorization": "Bearer zweiter-schlüssel".encode()}
        assert running.http("GET", "/v1/models", headers=second)[0] == 200
        for key, want in ((b"first\t ", 200), (b"first\xa0", 401), (b"first\x85", 401)):
            assert running.http("GET", "/v1/models", headers={"Authorization": b"Bearer " + key})[0] == want, key
        for path, want in (("/metrics", 401), ("/v1/models", 401), ("/health", 200), ("/ready", 200)):
            assert running.http("GET", path)[0] == want, path
        # Without a key not even a mistake in the body is told.
        assert running.http("POST", "/v1/completions", b"{")[0] == 401


# Many, late, gone.


@pytest.mark.parametrize("clients", [60, pytest.param(200, marks=pytest.mark.heavy)])
def test_many_clients_at_once(served, slow, clients):
    async def ask(client, number):
        try:
            text = (await client.completions.create(prompt=f"{number}", **GREEDY)).choices[0].text
            return number, text
        except openai.RateLimitError as error:
            assert int(error.response.headers["retry-after"]) >= 1 and error.code == "queue_full"
            return number, None

    async def everyone(running):
        async with running.client(kind=openai.AsyncOpenAI) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(clients)))

    with Running(served, ServerConfig(queue=20)) as running:
        answers = asyncio.run(everyone(running))
        answered = [number for number, text in answers if text is not None]
        assert 22 <= len(answered) < clients
        first = answers[answered[0]]
        want = expected(served, str(first[0])).text
        assert first[1] == want == running.client().completions.create(prompt=f"{first[0]}", **GREEDY).choices[0].text
        found = running.metrics()
        path = "/v1/completions"
        assert found["capibara_requests_total", path, "200"] == len(answered) + 1
        assert found["capibara_requests_total", path, "429"] == clients - len(answered)
        assert (found["capibara_queue_depth",], found["capibara_slots_busy",], found["capibara_slots",]) == (
            0,
            0,
            SLOTS,
        )
        assert found["capibara_time_to_first_token_seconds_count",] == len(answered) + 1
        assert found["capibara_generated_tokens_total",] > len(answered)
        assert running.service.texts == 0


@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "whole"])
def test_a_client_that_goes_frees_its_slot(running, served, slow, streamed):
    body = json.dumps(
        {"model": "tiny", "prompt": "The river", "max_tokens": 240, "n": 3, "temperature": 0, "stream": streamed}
    )
    connection = http.client.HTTPConnection(*running.address, timeout=30)
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    if streamed:
        assert b"data:" in connection.getresponse().read(20)
    until(lambda: served.engine.load == (1, SLOTS))
    connection.close()
    if streamed:
        connection.sock = None
    until(lambda: served.engine.load == (0, 0) and running.service.texts == 0, 3)
    assert running.client().completions.create(prompt="a", **GREEDY).choices


def test_a_text_that_takes_too_long_is_ended(served, slow):
    asked = dict(GREEDY, max_tokens=240)
    with Running(served, ServerConfig(timeout_s=0.5)) as running:
        with pytest.raises(openai.InternalServerError, match="took too long") as error:
            running.client().completions.create(prompt="The river", **asked)
        assert error.value.status_code == 504
        with pytest.raises(openai.APIError, match="took too long"):
            list(running.client().completions.create(prompt="The river", stream=True, **asked))
        until(lambda: served.engine.load == (0, 0))


def test_before_it_is_ready_it_says_so(served):
    with Running(None) as running:
        status, answer, headers = running.http("POST", "/v1/completions", b"{}")
        assert status == 503 and json.loads(answer)["error"]["code"] == "loading" and headers["Retry-After"]
        assert running.http("GET", "/ready")[0] == 503
        assert running.http("GET", "/health")[:2] == (200, b'{"status":"loading"}')
        assert running.http("GET", "/metrics")[0] == 200 and not list(running.client().models.list())
        running.service.ready(served, ServerConfig())
        assert running.http("GET", "/ready")[:2] == (200, b'{"status":"ready"}')


def test_it_ends_when_its_texts_have(served, slow):
    asked = dict(GREEDY, max_tokens=60)
    with Running(served) as running, ThreadPoolExecutor(1) as pool:
        stream = running.client().completions.create(prompt="The river", stream=True, **asked)
        whole = pool.submit(running.client().completions.create, prompt="The river", **asked)
        until(lambda: running.service.texts == 2)
        next(iter(stream))
        running.service.drain()
        with pytest.raises(openai.InternalServerError, match="shutting down") as error:
            running.client().completions.create(prompt="a", **GREEDY)
        assert error.value.status_code == 503 and running.http("GET", "/ready")[0] == 503
        text = "".join(chunk.choices[0].text for chunk in stream)
        assert whole.result().choices[0].text.endswith(text) and len(text) > 40
        running.thread.join(60)
        assert not running.thread.is_alive()


def test_what_does_not_end_in_the_grace_is_cancelled(served, slow):
    with Running(served, ServerConfig(grace_s=0.2)) as running:
        half = http.client.HTTPConnection(*running.address, timeout=30)
        half.putrequest("POST", "/v1/completions")
        half.putheader("Content-Type", "application/json")
        half.putheader("Content-Length", "100")
        half.endheaders(b"{")
        stream = running.client().completions.create(prompt="The river", stream=True, **dict(GREEDY, max_tokens=240))
        next(iter(stream))
        running.service.drain()
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        assert half.getresponse().status == 503  # who has not said yet what is wanted
        half.close()
        running.thread.join(60)
        assert not running.thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_fails_is_told(served, run, monkeypatch):
    engine = Engine(run.model, run.params, served.vocabulary, LENGTH, EngineConfig(slots=1))
    step = engine._loop.step

    def broken():
        if engine.load[0]:
            raise FloatingPointError("planted")
        return step()

    monkeypatch.setattr(engine._loop, "step", broken)
    monkeypatch.setattr(server, "FAILED_S", 600.0)
    with Running(dataclasses.replace(served, generator=engine.start())) as running:
        with pytest.raises(openai.InternalServerError, match="FloatingPointError") as error:
            running.client().completions.create(prompt="a", **GREEDY)
        assert error.value.status_code == 500
        assert running.http("GET", "/health")[:2] == (503, b'{"status":"failed"}')
        with pytest.raises(openai.InternalServerError, match="must be started again"):
            running.client().completions.create(prompt="a", **GREEDY)
    engine.close()


def test_a_fault_in_one_request_is_that_requests_alone(running, served, monkeypatch):
    with monkeypatch.context() as planted:
        planted.setattr(served.engine, "submit", lambda *_, **__: 1 / 0)
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="ZeroDivisionError"):
                running.client().completions.create(prompt="a", stream=stream, **GREEDY)
    with monkeypatch.context() as planted:
        planted.setattr(served.engine, "submit", lambda *_, **__: Sampling(max_new_tokens=0))
        with pytest.raises(openai.BadRequestError, match="Sampling.max_new_tokens is 0, must be at least 1"):
            running.client().completions.create(prompt="a", **GREEDY)
    assert running.client().completions.create(prompt="a", **GREEDY).choices and running.service.texts == 0


# What it is made of.


def test_programs_are_compiled_before_the_first_request(run, served, caplog):
    engine = Engine(run.model, run.params, served.vocabulary, 48, EngineConfig(slots=3, prefix_cache_mib=0))
    steps = []
    engine.warm_up(lambda *step: steps.append(step))
    assert steps == [(done, len(steps) - 1) for done in range(len(steps))]
    with jax.log_compiles(), caplog.at_level("WARNING"):
        engine.submit("x" * 40, Sampling(max_new_tokens=4)).result()
        engine.submit("x", Sampling(max_new_tokens=4)).result()
        engine.submit("x", Sampling(max_new_tokens=4), likeliest=3).result()
        assert not [record for record in caplog.records if "Compiling" in record.getMessage()]
        jax.jit(lambda x: x + 1)(np.ones(7, np.float32))
        assert [record for record in caplog.records if "Compiling" in record.getMessage()]


def test_a_configuration_that_makes_no_sense():
    with pytest.raises(UserError, match="ServerConfig.queue is -1, must be at least 0"):
        ServerConfig(queue=-1)
    with pytest.raises(UserError, match="ServerConfig.timeout_s is 0.0, must be above 0"):
        ServerConfig(timeout_s=0.0)
    with pytest.raises(UserError, match="has no key"):
        server.read_api_keys("/dev/null", "NONE")


def test_texts_of_a_process_that_is_gone_are_refused_with_503():
    """The engine only says what happened; what that is in HTTP is the server's."""
    stream = Stream(lambda: False)

    async def ask():
        answers = StreamedTexts([stream], time.monotonic() + 5, lambda answers, item: None)
        stream.fail(ProcessLost("gone"))
        return await answers.all()

    with pytest.raises(Refusal, match="another host is gone") as refused:
        asyncio.run(ask())
    assert refused.value.status == 503 and refused.value.code == "model_failed"
