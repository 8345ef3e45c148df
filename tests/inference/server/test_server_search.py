"""A model that searches the server's own index: what the client sees, what it costs, and what is refused by name."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import threading
import types

import anthropic
import openai
import pytest

import capibara as cb
from capibara.cli import serve
from capibara.cli.composition import retrieving
from capibara.core.types import UserError
from capibara.inference.calls.dialect import writes_calls
from capibara.inference.engine.engine import Engine
from capibara.inference.engine.requests.stream import Finish, Piece, Stream
from capibara.inference.sampling.text import TextStream
from capibara.inference.server import server
from capibara.inference.server.service.service import ServerConfig
from capibara.multihost import exits
from capibara.retrieval.index import Hit
from capibara.retrieval.tool import IndexSearch, SearchTool
from tests.inference.server.test_other_apis import TEMPLATE
from tests.inference.server.test_server import Running, until
from tests.inference.server.test_tool_calls import chat_of
from tests.inference.server.test_tool_choice import HOT, served_with

ASKED = [{"role": "user", "content": "How are files locked?"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
OPTIONS = {"model": "tiny", "messages": ASKED, "max_tokens": 900, "temperature": 0}


def called(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


SEARCH = called("search", query="lock files")
FIRST = f"<think>I look.</think>Let me see. {SEARCH}<|end|>"
LAST = "<think>Two chunks.</think>By flock.<|end|>"


def search(query, k):
    if not query.strip():
        raise UserError("a query is empty: give a text to search for")
    return [Hit(chunk=i, score=1.0 - i, path="a.md", document=1, start=i, end=9, text=f"{query} {i}") for i in range(k)]


TOOL = IndexSearch(types.SimpleNamespace(search=search), 2, 4000)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return chat_of(tmp_path_factory.mktemp("chat"), TEMPLATE, ["<|im_start|>"])


@pytest.fixture
def model(monkeypatch, chat):
    """Says texts, one a request; has the prompts that it read."""
    state = types.SimpleNamespace(says=[FIRST, LAST], prompts=[])

    def submit(self, prompt, sampling, *, ends, spelled, **_):
        state.prompts.append(
            "".join(chat.vocabulary.spelling(token) or chat.vocabulary.decode([token]) for token in prompt)
        )
        said = state.says[min(len(state.prompts), len(state.says)) - 1]
        names = {token: chat.vocabulary.spelling(token) for token in spelled}
        text, stream, finish = TextStream(chat.vocabulary, sampling.stop, names), Stream(lambda: False), Finish.LENGTH
        for token in chat.vocabulary.encode_rendered(said)[0].tolist()[: sampling.max_new_tokens]:
            if token in (*chat.vocabulary.end_ids, *ends):
                finish = Finish.STOP
                break
            stream.put(Piece(text.feed(token), token))
        stream.put(Piece(text.close(), None))
        stream.end(finish, len(prompt), 0)
        return stream

    monkeypatch.setattr(Engine, "submit", submit)
    return state


@pytest.fixture
def running(served, chat, model):
    searching = dataclasses.replace(served, vocabulary=chat.vocabulary, chat=chat, length=3000, tool=TOOL)
    with Running(searching, ServerConfig(search_rounds=2)) as running:
        yield running


def post(running, path="/v1/chat/completions", **body):
    status, answer, _ = running.http("POST", path, json.dumps({**OPTIONS, **body}))
    return status, json.loads(answer)


PLACES = [{"path": "a.md", "document": 1, "start": i, "end": 9, "score": 1.0 - i} for i in range(2)]
FOUND = {"query": "lock files", "results": PLACES}


def tokens(*texts):
    """Tokens of texts of ASCII, a byte each; the end token is none of theirs."""
    return sum(len(text.replace("<|end|>", "").replace("<|im_start|>", "!")) for text in texts)


def test_a_search_is_answered_within_the_request(running, model):
    status, answer = post(running)
    (choice,) = answer["choices"]
    assert status == 200 and choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
    assert choice["message"]["content"] == "Let me see.\n\nBy flock."
    assert choice["message"]["reasoning_content"] == "I look.\n\nTwo chunks."
    assert answer["searches"] == [FOUND]
    first, second = model.prompts
    assert '"name": "search"' in first and '"query"' in first, "the model is offered the tool"
    assert "[1] a.md:\nlock files 0\n\n[2] a.md:\nlock files 1" in second and "<tool_call>" in second
    usage = answer["usage"]
    assert usage["prompt_tokens"] == tokens(first, second) and usage["completion_tokens"] == tokens(FIRST, LAST)
    assert usage["total_tokens"] == tokens(first, second, FIRST, LAST)


def test_a_stream_shows_the_text_and_not_the_calls(running, model):
    _, whole = post(running)
    model.prompts.clear()
    options = {**OPTIONS, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(running.client().chat.completions.create(**options))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == whole["choices"][0]["message"]["content"]
    assert not any(delta.tool_calls for delta in deltas)
    assert sum(bool(delta.content) for delta in deltas) > 5, "it comes in pieces"
    (end,) = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert end.searches == [FOUND] and end.choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == whole["usage"]["completion_tokens"]
    assert chunks[-1].usage.prompt_tokens == whole["usage"]["prompt_tokens"]


def test_the_other_apis_search_too(running, model):
    body = {"model": "tiny", "input": "How are files locked?"}
    _, answer, _ = running.http("POST", "/v1/responses", json.dumps(body))
    response = json.loads(answer)
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    assert response["output"][-1]["content"][0]["text"] == "Let me see.\n\nBy flock."
    assert response["searches"] == [FOUND] and response["usage"]["input_tokens"] == tokens(*model.prompts)
    model.prompts.clear()
    claude = anthropic.Anthropic(base_url="http://{}:{}".format(*running.address), api_key="none", max_retries=0)
    message = claude.messages.create(model="tiny", max_tokens=900, messages=ASKED)
    assert message.content[-1].text == "Let me see.\n\nBy flock." and message.stop_reason == "end_turn"
    assert message.searches == [FOUND] and message.usage.output_tokens == tokens(FIRST, LAST)
    counted = claude.messages.count_tokens(model="tiny", messages=ASKED)
    assert counted.input_tokens == tokens(model.prompts[0])
    model.prompts.clear()
    with claude.messages.stream(model="tiny", max_tokens=900, messages=ASKED) as stream:
        assert "".join(stream.text_stream) == "Let me see.\n\nBy flock."


def test_other_tools_go_to_the_client(running, model):
    model.says = [SEARCH + "<|end|>", called("weather") + "<|end|>"]
    _, answer = post(running, tools=[WEATHER])
    (choice,) = answer["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
    assert choice["finish_reason"] == "tool_calls" and answer["searches"] == [FOUND]
    model.prompts.clear()
    model.says = [f"{SEARCH}\n{called('weather')}<|end|>"]
    _, answer = post(running, tools=[WEATHER])
    (choice,) = answer["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
    assert len(model.prompts) == 1 and choice["finish_reason"] == "tool_calls"
    assert answer["searches"] == [
        {"arguments": '{"query": "lock files"}', "error": "not answered: the message also calls tools of the client"}
    ]


def test_several_searches_of_a_message_are_answered_together(running, model):
    model.says = [f"{SEARCH}\n{called('search', query='why')}<|end|>", LAST]
    _, answer = post(running)
    assert [item["query"] for item in answer["searches"]] == ["lock files", "why"] and len(model.prompts) == 2
    assert "lock files 0" in model.prompts[1] and "why 1" in model.prompts[1]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (called("search", query=" "), "error: UserError: a query is empty"),
        (called("search", text="a"), "error: TypeError: "),
        (called("search"), "error: TypeError: "),
        (called("search", query=5), "error: AttributeError: "),
        (called("search", **{"\ud800": "a"}), "error: TypeError: "),
    ],
)
def test_a_search_that_fails_is_told_to_the_model(running, model, call, error):
    model.says = [call + "<|end|>", LAST]
    status, answer = post(running)
    (report,) = answer["searches"]
    assert status == 200 and report["error"].startswith(error) and json.loads(report["arguments"]) is not None
    assert error in model.prompts[1] and answer["choices"][0]["message"]["content"] == "By flock."


def test_searches_have_a_limit(running, model):
    model.says = [SEARCH + "<|end|>"]
    _, answer = post(running)
    (choice,) = answer["choices"]
    assert len(model.prompts) == 3 and choice["finish_reason"] == "length"
    assert answer["searches"][:2] == [FOUND, FOUND] and len(answer["searches"]) == 3
    assert "at most 2 rounds (ServerConfig.search_rounds)" in answer["searches"][2]["error"]
    assert "tool_calls" not in choice["message"] and choice["message"]["content"] == ""


def test_the_tokens_of_all_texts_have_the_limit_of_the_request(running, model):
    most = tokens(FIRST) + 10
    _, answer = post(running, max_tokens=most)
    assert answer["usage"]["completion_tokens"] == most and answer["choices"][0]["finish_reason"] == "length"
    model.prompts.clear()
    for limit in (900, 2700):  # more than the chunks leave: the prompts have 755 of 3000
        model.prompts.clear()
        status, answer = post(running, max_tokens=limit, ignore_eos=True)
        assert status == 200 and answer["choices"][0]["message"]["content"].endswith("By flock.")
    model.prompts.clear()
    _, answer = post(running, max_tokens=tokens(FIRST))
    assert len(model.prompts) == 1 and answer["searches"][0]["error"].startswith("not answered: at most 2 rounds")


def test_half_of_a_surrogate_pair_is_left_out_of_a_query(running, model):
    model.says = [called("search", query="lock\ud800 files") + "<|end|>", LAST]
    status, answer = post(running)
    assert status == 200 and answer["searches"] == [FOUND]


def test_a_malformed_search_is_content(running, model):
    model.says = ['Well <tool_call>\n{"name": "search", "arguments": {"query": "a<|end|>']
    _, answer = post(running)
    stream = running.client().chat.completions.create(**OPTIONS, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    whole = answer["choices"][0]["message"]["content"]
    assert whole == text == model.says[0].removesuffix("<|end|>") and answer["searches"] == []


def test_without_calls_nothing_is_searched(running, model):
    _, answer = post(running, tool_choice="none")
    assert "searches" not in answer and '"search"' not in model.prompts[0]
    model.prompts.clear()
    model.says = [LAST]
    _, answer = post(running, tool_choice="auto")
    assert answer["searches"] == [] and answer["choices"][0]["message"]["content"] == "By flock."
    assert [message["role"] for message in ASKED] == ["user"]


@pytest.mark.parametrize(("config", "status"), [(ServerConfig(), 200), (ServerConfig(grace_s=0), 503)])
def test_a_server_that_stops_waits_for_the_text_after_a_search(served, chat, model, config, status):
    begun, gate, answers = threading.Event(), threading.Event(), []

    def slow(query, k):
        begun.set()
        gate.wait(30)
        return search(query, k)

    tool = IndexSearch(types.SimpleNamespace(search=slow), 2, 4000)
    searching = dataclasses.replace(served, vocabulary=chat.vocabulary, chat=chat, length=3000, tool=tool)
    with Running(searching, config) as running:
        thread = threading.Thread(target=lambda: answers.append(post(running)[0]))
        thread.start()
        assert begun.wait(30)
        assert running.service.texts == 1 and running.http("GET", "/health")[0] == 200, "others go on meanwhile"
        running.service.drain()
        assert running.service.drained() == (status == 503)
        gate.set()
        thread.join(30)
    assert answers == [status] and len(model.prompts) == (2 if status == 200 else 1)


def test_a_chat_that_searches_keeps_its_place_in_the_queue(served, chat, model):
    searched, gate, answers = threading.Semaphore(0), threading.Event(), []

    def slow(query, k):
        searched.release()
        gate.wait(30)
        return search(query, k)

    model.says = [f"{SEARCH}\n{SEARCH}<|end|>", LAST]
    tool = IndexSearch(types.SimpleNamespace(search=slow), 2, 4000)
    searching = dataclasses.replace(served, vocabulary=chat.vocabulary, chat=chat, length=3000, tool=tool)
    with Running(searching, ServerConfig(queue=0)) as running:  # and two slots
        post_one = lambda: answers.append(post(running))  # noqa: E731
        threads = [threading.Thread(target=post_one) for _ in range(2)]
        for thread in threads:
            thread.start()
            assert searched.acquire(timeout=30)
            model.prompts.clear()
        status, answer = post(running)
        assert status == 429 and answer["error"]["message"] == "2 texts are in progress: try again"
        gate.set()
        for thread in threads:
            thread.join(30)
    assert [status for status, _ in answers] == [200, 200]


def test_a_client_that_leaves_ends_its_searches(served, chat, model):
    begun, gate, queries = threading.Event(), threading.Event(), []

    def slow(query, k):
        queries.append(query)
        begun.set()
        gate.wait(30)
        return search(query, k)

    model.says = [SEARCH * 5 + "<|end|>", LAST]
    tool = IndexSearch(types.SimpleNamespace(search=slow), 2, 4000)
    searching = dataclasses.replace(served, vocabulary=chat.vocabulary, chat=chat, length=3000, tool=tool)
    with Running(searching) as running:
        with pytest.raises(openai.APITimeoutError):
            running.client().with_options(timeout=0.5).chat.completions.create(**OPTIONS)
        assert begun.is_set()
        until(lambda: running.service.texts == 0)
        gate.set()
        assert post(running, tool_choice="none")[0] == 200
    assert queries == ["lock files"]


CLASH = {"type": "function", "function": {"name": "search", "parameters": {}}}
REFUSED = {
    "a tool of the same name": ({"tools": [CLASH]}, "tools", "tools has 'search', which this server calls itself"),
    "several answers": ({"n": 2}, "n", "n and the server's search do not go together: leave it out, or set tool_choice"),
    "log probabilities": ({"logprobs": True}, "logprobs", "logprobs and the server's search do not go together"),
    "ids": ({"return_token_ids": True}, "return_token_ids", "do not go together"),
    "a form": ({"response_format": {"type": "json_object"}}, "response_format", "do not go together"),
    "a strategy": ({"thinking_strategy": {"name": "rounds"}}, "tools", "tools and a thinking strategy do not go together"),
    "a beginning": (
        {"messages": [*ASKED, {"role": "assistant", "content": "a"}], "continue_final_message": True, "add_generation_prompt": False},
        "continue_final_message", "continue_final_message and the server's search",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_named(running, name):
    body, param, message = REFUSED[name]
    status, answer = post(running, **body)
    assert (status, answer["error"]["param"]) == (400, param) and message in answer["error"]["message"], answer
    assert post(running, **body, tool_choice="none")[0] in (200, 400)


def test_a_prompt_that_becomes_too_long_is_an_error(served, chat, model):
    length = 700  # of which the chunks leave nothing
    large = IndexSearch(TOOL.index, 40, 4000)
    searching = dataclasses.replace(served, vocabulary=chat.vocabulary, chat=chat, length=length, tool=large)
    with Running(searching) as running:
        status, answer = post(running, max_tokens=100)
        assert status == 200 and answer["choices"][0]["finish_reason"] == "length", "its call is cut off"
        model.prompts.clear()
        status, answer = post(running, max_tokens=None)
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
        body = json.dumps({**OPTIONS, "max_tokens": None, "stream": True})
        model.prompts.clear()
        _, events, _ = running.http("POST", "/v1/chat/completions", body)
        assert "context_length_exceeded" in events.decode().splitlines()[-4]


def test_a_model_that_is_made_to_search_goes_on(tmp_path):
    """A model of random weights: a grammar writes its first call, and then it says what it likes."""
    any_text = types.SimpleNamespace(search=lambda query, k: search(f"about {query}", k))
    served = dataclasses.replace(served_with(tmp_path, "hermes"), tool=IndexSearch(any_text, 2, 200))
    (quote,) = served.vocabulary.encode('"')
    options = {**HOT, "max_tokens": 250, "logit_bias": {str(quote): 8}}
    named = {"type": "function", "function": {"name": "search"}}
    with served.engine.start(), Running(served) as running:
        create = functools.partial(running.client().chat.completions.create, messages=ASKED, **options)
        answer = create(tool_choice=named)
        (report,) = answer.searches
        assert len(report["results"]) == 2 and answer.choices[0].message.tool_calls is None
        assert answer.usage.completion_tokens <= 250 and answer.choices[0].message.content
        chunks = list(create(tool_choice=named, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == answer.choices[0].message.content


@pytest.fixture
def calling(folder, tmp_path):
    """The tiny model with a template that writes calls."""
    path = tmp_path / "calling"
    shutil.copytree(folder, path)
    about = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(about | {"chat_template": TEMPLATE}))
    return str(path)


def test_the_verb_and_python_open_the_index(calling, monkeypatch):
    opened, seen = [], []
    monkeypatch.setattr(retrieving, "index", lambda *args: opened.append(args) or TOOL.index)
    monkeypatch.setattr(
        server, "run", lambda listening, keys, load, *_: (listening.close(), seen.append(load()))[1] or 0
    )
    flags = [f"--model={calling}", "--port=0", "--gin.SearchTool.k=3", "--gin.SearchTool.model=m"]
    flags += ["--gin.ServerConfig.warm_up=False", "--gin.ServerConfig.search_rounds=7"]
    for extra in (["--index=data/docs"], ["--gin.SearchTool.index=data/docs"]):
        cb.config.reset()
        assert exits.run_verb(serve.main, [*flags, *extra]) == 0
        served, takes = seen.pop()
        assert served.tool == IndexSearch(TOOL.index, 3, 4000) and takes.search_rounds == 7
        assert opened.pop() == ("data/docs", "m")
    cb.config.reset()
    cb.serve(cb.load(calling), port=0, search=cb.SearchTool(index="data/docs"))
    assert seen.pop()[0].tool == IndexSearch(TOOL.index, 4, 4000) and opened == [("data/docs", None)]


def test_the_tool_has_bounds():
    for options, error in (
        ({"k": 0}, "SearchTool.k is 0, must be at least 1: try 4"),
        ({"result_chars": 0}, "SearchTool.result_chars is 0, must be at least 1: try 4000"),
    ):
        with pytest.raises(UserError, match=error):
            SearchTool(index="data/docs", **options)
    assert len(IndexSearch(TOOL.index, 9, 50).answer('{"query": "a"}').text) == 50


def test_a_template_that_writes_no_calls_is_refused_at_the_start(tmp_path, chat, folder, capfd):
    assert writes_calls(chat, TOOL.schema)
    for number, template in enumerate(
        (
            TEMPLATE.replace("tool_call>", "call>"),  # a form that is not known
            TEMPLATE.replace("{% if tools %}{{ tools | tojson }}{% endif %}", ""),
            TEMPLATE.replace(
                "{{ m.content }}", "{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}"
            ),
        )  # fmt: skip
    ):
        (tmp_path / str(number)).mkdir()
        other = chat_of(tmp_path / str(number), template, ["<|im_start|>"])
        assert not writes_calls(other, TOOL.schema)
        with pytest.raises(UserError, match="--index=data/docs needs a model that calls tools"):
            retrieving.search_of(SearchTool(index="data/docs"), other)
    cb.config.reset()
    assert exits.run_verb(serve.main, [f"--model={folder}", "--port=0", "--index=data/docs"]) == 2
    assert "--index=data/docs needs a model that calls tools" in capfd.readouterr().err.splitlines()[-1]
    cb.config.reset()
    assert exits.run_verb(serve.main, [f"--model={folder}", "--port=0", "--gin.SearchTool.k=2"]) == 2
    assert "SearchTool.k is bound but nothing uses it" in capfd.readouterr().err.splitlines()[-1]
