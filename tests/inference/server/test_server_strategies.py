"""Thinking strategies of a server: which answer a chat gets, what it costs, and what is refused by name."""

from __future__ import annotations

import dataclasses
import json
import re
import threading

import pytest

import capibara as cb
from capibara.cli import serve
from capibara.core.types import UserError
from capibara.data.chat.formats import Conversation
from capibara.inference.engine.engine import Engine
from capibara.inference.sampling.sampling import Sampling
from capibara.inference.server.service.service import ServerConfig
from capibara.multihost import exits
from tests.inference.server.test_server import HELLO, Running, until

DRAWN = {"model": "tiny", "temperature": 1.5, "max_tokens": 6, "seed": 7}
VOTE = {"name": "self_consistency", "samples": 4}


@pytest.fixture(scope="module")
def running(served):
    with Running(served, ServerConfig(max_texts=5, max_rounds=3)) as running:
        yield running


@pytest.fixture
def submitted(monkeypatch):
    """Notes prompts, seeds and streams of all texts."""
    real, seen = Engine.submit, []

    def submit(self, prompt, sampling, **options):
        stream = real(self, prompt, sampling, **options)
        seen.append((list(prompt), sampling.seed, stream))
        return stream

    monkeypatch.setattr(Engine, "submit", submit)
    return seen


def texts(served, messages, seeds):
    """The engine's own texts, which the server's strategies choose from."""
    ids = served.chat.ids_after(Conversation(messages), "here")
    options = dict(temperature=1.5, max_new_tokens=6)
    results = [
        served.engine.submit(ids, Sampling(seed=seed, **options), ends=served.chat.ends).result() for seed in seeds
    ]
    return len(ids), results


def post(running, path="/v1/chat/completions", **body):
    status, answer, _ = running.http("POST", path, json.dumps({"messages": HELLO, **DRAWN, **body}))
    return status, json.loads(answer)


def content(answer):
    return answer["choices"][0]["message"]["content"]


class Last(cb.SelfConsistency):
    """Takes the last text."""

    def _elected(self, draws):
        return dataclasses.replace(super()._elected(draws), text=draws[-1].text)


def test_the_answer_is_the_strategys_and_usage_counts_all_texts(running, served):
    length, drawn = texts(served, HELLO, range(7, 11))
    status, answer = post(running, thinking_strategy=VOTE)
    votes = [" ".join(item.text.casefold().split()) for item in drawn]
    winner = next(item for item, vote in zip(drawn, votes) if votes.count(vote) == max(map(votes.count, votes)))
    assert status == 200 and content(answer) == winner.text and len(set(votes)) > 1
    written = sum(len(item.tokens) for item in drawn)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (length, written)
    assert usage["total_tokens"] == length + written and written > len(winner.tokens)
    report = answer["thinking_strategy"]
    assert {key: report[key] for key in ("name", "texts", "tokens", "tie")} == {
        "name": "self_consistency", "texts": 4, "tokens": written, "tie": True,
    }  # fmt: skip
    assert "thinking_strategy" not in post(running)[1]
    _, again = post(running, thinking_strategy=VOTE)  # its prompt is in the cache, and counts once
    assert 0 < again["usage"]["prompt_tokens_details"]["cached_tokens"] < length


def test_the_chosen_text_is_whole_with_its_own_tokens(served):
    _, drawn = texts(served, HELLO, range(7, 11))
    last = drawn[-1]
    assert last.text not in [item.text for item in drawn[:-1]]
    with Running(served, ServerConfig(thinking=Last(samples=4))) as running:
        _, answer = post(running, logprobs=True, return_token_ids=True)
    choice = answer["choices"][0]
    assert choice["message"]["content"] == last.text and choice["finish_reason"] == last.finish
    assert choice["token_ids"][: len(last.tokens)] == last.tokens
    assert len(choice["logprobs"]["content"]) >= len(last.tokens)
    assert answer["thinking_strategy"]["name"] == "Last"


def test_rounds_ask_again_with_the_previous_answer(running, served, submitted):
    again = cb.Rounds().again
    messages, prompts, results, written = HELLO, [], [], 0
    for _ in range(3):
        length, (result,) = texts(served, messages, [7])
        prompts.append(length)
        results.append(result)
        text = again.replace("{prompt}", HELLO[0]["content"]).replace("{answer}", result.text.strip())
        messages, written = [{"role": "user", "content": text}], written + len(result.tokens)
    submitted.clear()
    status, answer = post(running, thinking_strategy={"name": "rounds", "rounds": 3})
    assert status == 200 and content(answer) == results[-1].text
    assert [len(ids) for ids, *_ in submitted] == prompts and {seed for _, seed, _ in submitted} == {7}
    assert answer["usage"]["prompt_tokens"] == sum(prompts) and answer["usage"]["completion_tokens"] == written
    assert answer["thinking_strategy"]["answers"] == [result.text.strip() for result in results]
    submitted.clear()
    assert post(running, thinking_strategy={"name": "rounds", "rounds": 3}, seed=None)[0] == 200
    assert len(submitted) == 3 and len({seed for _, seed, _ in submitted}) == 1


def test_a_turn_of_text_parts_is_asked_again_as_text(running, served, submitted):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": parts}]
    status, answer = post(running, messages=messages, thinking_strategy={"name": "rounds", "rounds": 2})
    plain = [messages[0], {"role": "user", "content": "Hello"}]
    _, whole = post(running, messages=plain, thinking_strategy={"name": "rounds", "rounds": 2})
    assert status == 200 and content(answer) == content(whole)


class Judge:
    """Gives the highest reward to the second answer, and notes what it reads."""

    def __init__(self):
        self.read = []

    def scores(self, conversation, answers):
        self.read.append((conversation.messages, list(answers)))
        return [float(number == 1) for number, _ in enumerate(answers)]


def test_the_best_of_n_is_that_of_the_servers_reward_model(served):
    _, drawn = texts(served, HELLO, range(7, 10))
    judge = Judge()
    config = ServerConfig(thinking=cb.BestOfN(reward="judge", samples=2))
    with Running(dataclasses.replace(served, judge=judge), config) as running:
        _, default = post(running)
        _, three = post(running, thinking_strategy={"name": "best_of_n", "samples": 3})
        _, plain = post(running, thinking_strategy={"name": "none"})
        _, rounds = post(running, thinking_strategy={"name": "rounds", "rounds": 1})
    assert content(default) == content(three) == drawn[1].text != drawn[0].text
    assert default["thinking_strategy"]["rewards"] == [0.0, 1.0] and three["thinking_strategy"]["texts"] == 3
    assert content(plain) == content(rounds) == drawn[0].text and "thinking_strategy" not in plain
    assert judge.read[0] == (HELLO, [item.text.strip() for item in drawn[:2]])


def test_a_stream_has_the_chosen_text_alone(running):
    _, whole = post(running, thinking_strategy=VOTE)
    options = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": {"thinking_strategy": VOTE}}
    chunks = list(running.client().chat.completions.create(messages=HELLO, **DRAWN, **options))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == content(whole)
    ends = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert [end.thinking_strategy for end in ends] == [whole["thinking_strategy"]]
    usage = chunks[-1].usage
    assert (usage.completion_tokens, usage.prompt_tokens) == tuple(
        whole["usage"][name] for name in ("completion_tokens", "prompt_tokens")
    )


def test_the_other_apis_have_the_strategies_too(running):
    _, chat = post(running, thinking_strategy=VOTE)
    body = {"model": "tiny", "temperature": 1.5, "seed": 7, "thinking_strategy": VOTE}
    _, answer, _ = running.http("POST", "/v1/responses", json.dumps(body | {"input": "Hello", "max_output_tokens": 6}))
    response = json.loads(answer)
    assert response["output"][-1]["content"][0]["text"] == content(chat)
    assert response["thinking_strategy"] == chat["thinking_strategy"]
    assert response["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]
    body = {"model": "tiny", "temperature": 1, "messages": HELLO, "max_tokens": 6, "thinking_strategy": VOTE}
    _, answer, _ = running.http("POST", "/v1/messages", json.dumps(body))
    message = json.loads(answer)
    assert message["thinking_strategy"]["texts"] == 4
    assert message["usage"]["output_tokens"] == message["thinking_strategy"]["tokens"]
    _, events, _ = running.http("POST", "/v1/messages", json.dumps(body | {"stream": True}))
    (delta,) = [line for line in events.decode().splitlines() if '"message_delta"' in line and line.startswith("data")]
    assert json.loads(delta.removeprefix("data: "))["thinking_strategy"]["texts"] == 4


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
REFUSED = {
    "a name alone": ({"thinking_strategy": "rounds"}, "must be an object whose name is one of 'none', 'self_consistency'"),
    "no such strategy": ({"thinking_strategy": {"name": "tree"}}, "must be an object whose name is one of"),
    "no name": ({"thinking_strategy": {"samples": 3}}, "must be an object whose name is one of"),
    "a list": ({"thinking_strategy": {"name": ["rounds"]}}, "must be an object whose name is one of"),
    "none with options": ({"thinking_strategy": {"name": "none", "samples": 2}}, "must be an object whose name"),
    "too many samples": ({"thinking_strategy": VOTE | {"samples": 6}}, r"has samples 6, must be from 1 to 5 \(ServerConfig.max_texts\)"),
    "too many rounds": ({"thinking_strategy": {"name": "rounds", "rounds": 4}}, r"has rounds 4, must be from 1 to 3 \(ServerConfig.max_rounds\)"),
    "no samples": ({"thinking_strategy": VOTE | {"samples": 0}}, "has samples 0, must be from 1 to 5"),
    "a huge number": ({"thinking_strategy": {"name": "rounds", "rounds": 10**300}}, r"has rounds 10+\.\.\., must be from 1 to 3"),
    "the usual samples": ({"thinking_strategy": {"name": "self_consistency"}}, "has samples 8, must be at most 5"),
    "a truth": ({"thinking_strategy": VOTE | {"samples": True}}, "has samples True, must be of type int"),
    "a text for a number": ({"thinking_strategy": VOTE | {"samples": "4"}}, "has samples '4', must be of type int"),
    "a pattern": ({"thinking_strategy": VOTE | {"pattern": "(a+)+b"}}, "has 'pattern', a request has samples of self_consistency"),
    "a template": ({"thinking_strategy": {"name": "rounds", "again": "{prompt}{answer}"}}, "has 'again', a request has rounds of rounds"),
    "a path": ({"thinking_strategy": {"name": "best_of_n", "reward": "/etc"}}, "has 'reward', a request has samples and steps"),
    "no reward model": ({"thinking_strategy": {"name": "best_of_n"}}, "whose reward model is the server's"),
    "the greedy text": ({"thinking_strategy": VOTE, "temperature": 0}, "temperature is 0, and SelfConsistency needs texts that differ"),
    "several answers": ({"thinking_strategy": VOTE, "n": 2}, "n and a thinking strategy do not go together: leave one out"),
    "tools": ({"thinking_strategy": VOTE, "tools": [TOOL]}, "tools and a thinking strategy do not go together"),
    "an answer at the end": ({"thinking_strategy": VOTE, "messages": [*HELLO, {"role": "assistant", "content": "a"}]}, "must end with a user's text"),
    "a beginning": (
        {"thinking_strategy": VOTE, "messages": [*HELLO, {"role": "assistant", "content": "a"}], "continue_final_message": True, "add_generation_prompt": False},
        "continue_final_message and a thinking strategy do not go together",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_named(running, name):
    body, message = REFUSED[name]
    status, answer = post(running, **body)
    assert status == 400 and re.search(message, answer["error"]["message"]), answer
    assert answer["error"]["param"] in {*body, "thinking_strategy"}


def test_completions_have_no_strategies(running):
    status, answer, _ = running.http(
        "POST", "/v1/completions", json.dumps({"model": "tiny", "prompt": "a", "thinking_strategy": VOTE})
    )
    assert status == 400 and b"thinking_strategy is not a parameter" in answer


@pytest.fixture
def held(monkeypatch):
    """Holds texts that are drawn until it is set; greedy ones go on."""
    real, gate = Engine.submit, threading.Event()

    def submit(self, prompt, sampling, **options):
        stream = real(self, prompt, sampling, **options)
        if sampling.temperature:
            forward = stream.forward
            stream.forward = lambda to: threading.Thread(target=lambda: (gate.wait(30), forward(to))).start()
        return stream

    monkeypatch.setattr(Engine, "submit", submit)
    yield gate
    gate.set()


def asking(running, answers, **body):
    thread = threading.Thread(target=lambda: answers.append(post(running, **body)))
    thread.start()
    return thread


def test_others_are_answered_and_a_drain_waits_for_all_rounds(served, held):
    answers = []
    with Running(served) as running:
        thread = asking(running, answers, thinking_strategy={"name": "rounds", "rounds": 2})
        until(lambda: running.service.texts)
        status, _ = post(running, temperature=0)
        assert status == 200 and not answers
        running.service.drain()
        assert not running.service.drained() and post(running, temperature=0)[0] == 503
        held.set()
        thread.join(30)
        assert answers[0][0] == 200 and answers[0][1]["thinking_strategy"]["texts"] == 2
        assert running.service.drained()


def test_a_strategy_ends_with_its_time_or_the_server(served, held):
    answers = []
    for config, end, want in (
        (ServerConfig(timeout_s=0.5), lambda service: None, 504),
        (ServerConfig(grace_s=0), lambda service: (service.drain(), until(service.drained)), 503),
    ):
        held.clear()
        with Running(served, config) as running:
            thread = asking(running, answers, thinking_strategy={"name": "rounds", "rounds": 2})
            until(lambda: running.service.texts)
            end(running.service)
            if want == 503:
                held.set()
            thread.join(30)
            held.set()
            assert answers.pop()[0] == want


def test_samples_wait_for_room_as_other_texts(served, held):
    answers = []
    with Running(served, ServerConfig(queue=3)) as running:  # and two slots
        thread = asking(running, answers, thinking_strategy=VOTE)
        until(lambda: running.service.texts == 4)
        assert post(running, thinking_strategy=VOTE | {"samples": 2})[0] == 429
        status, answer = post(running, thinking_strategy=VOTE | {"samples": 6})
        assert status == 400 and "6 texts are requested, there is room for 5" in answer["error"]["message"]
        held.set()
        thread.join(30)
    assert answers[0][0] == 200


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            {"thinking": cb.SelfConsistency(samples=17)},
            r"ServerConfig.thinking is @SelfConsistency\(\) with samples 17",
        ),
        ({"thinking": cb.Rounds(rounds=9)}, r"rounds 9, must be at most 8 \(ServerConfig.max_rounds\)"),
        ({"max_rounds": 0}, "ServerConfig.max_rounds is 0, must be at least 1"),
    ],
)
def test_a_servers_strategy_has_bounds(options, error):
    with pytest.raises(UserError, match=error):
        ServerConfig(**options)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--gin.Sampling.temperature=0"], "Sampling.temperature is 0, and SelfConsistency needs texts that differ"),
        (["--index=data/docs"], "ServerConfig.thinking is @SelfConsistency() and --index=data/docs"),
        (["--gin.SelfConsistency.samples=30"], "samples 30, must be at most 16"),
    ],
)
def test_the_verb_checks_its_strategy_before_it_serves(folder, capfd, flags, error):
    common = [f"--model={folder}", "--port=0", "--gin.ServerConfig.thinking=@SelfConsistency()"]
    cb.config.reset()
    assert exits.run_verb(serve.main, [*common, *flags]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert error in lines[-1]
