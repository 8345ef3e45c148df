"""Reward models behind the server: scores as Python's, whole conversations, and what is refused by name."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import openai
import pytest

import capibara as cb
from capibara import config
from capibara.cli import serve
from capibara.cli.composition import models
from capibara.core.types import UserError
from capibara.data.chat.formats import Conversation
from capibara.data.chat.steps import StepsJsonlSource
from capibara.inference.interactive import chat
from capibara.inference.sampling.sampling import Sampling
from capibara.inference.server import server
from capibara.inference.server.service.service import Served, ServerConfig
from capibara.inference.thinking import reward_model
from capibara.interop import gin_of
from capibara.models import api
from capibara.multihost import exits
from capibara.training import run_folder
from tests.inference.server.test_server import HELLO, Running

QUERY, ANSWERS = "Who?", ["The river.", "Thou!", "the others, " * 9, "I"]


@pytest.fixture(scope="module")
def reward(run, folder, tmp_path_factory) -> str:
    """A reward model of random weights with the tokenizer and chat template of the tiny model."""
    path = tmp_path_factory.mktemp("reward")
    files = {}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        files[name] = open(f"{folder}/{name}", "rb").read()
        (path / name).write_bytes(files[name])
    scored = dataclasses.replace(run.model.config, head="score")
    params = jax.tree.map(lambda x: x * 3, jax.jit(api.build(scored).init)(jax.random.key(2)))
    run_folder.save(str(path), params, gin_of.run(scored, str(path), files))
    config.reset()
    return str(path)


@pytest.fixture(scope="module")
def model(reward):
    return cb.load(reward)


@pytest.fixture(scope="module")
def steps(reward, tmp_path_factory):
    """The same weights as a process reward model."""
    model = cb.load(reward)
    model.loaded = dataclasses.replace(
        model.loaded,
        dataset=dataclasses.replace(
            model.loaded.dataset,
            source=StepsJsonlSource(files=("x",), template=chat.of_run(model.loaded.dataset).template),
        ),
    )
    return model


def served_of(model) -> Served:
    data = model.loaded.dataset
    return Served(None, model.tokenizer, model._chat, data.length, None, "judge", Sampling(), scorer=model.scorer)


@pytest.fixture(scope="module")
def running(model):
    with Running(served_of(model), ServerConfig(max_embeddings=5)) as running:
        yield running


def ask(running, path="/v1/score", **body):
    status, answer, _ = running.http("POST", path, json.dumps(body))
    return status, json.loads(answer)


def values(running, **body):
    status, answer = ask(running, **body)
    assert status == 200, answer
    assert [item["index"] for item in answer["data"]] == [*range(len(answer["data"]))]
    return [item["score"] for item in answer["data"]]


def test_scores_are_those_of_python_bit_by_bit(running, model):
    want = model.scores(QUERY, ANSWERS)
    assert len(set(want)) == len(ANSWERS)
    assert values(running, model="judge", text_1=QUERY, text_2=ANSWERS) == want
    assert values(running, queries=[QUERY], documents=ANSWERS, use_activation=False, user="me") == want
    other = model.scores("Where?", ANSWERS[:1])
    pairs = values(running, text_1=[QUERY, "Where?", QUERY], text_2=[ANSWERS[2], ANSWERS[0], ANSWERS[0]])
    assert pairs == pytest.approx([want[2], *other, want[0]], abs=1e-6)  # products of other sizes round differently
    assert [model.scores(QUERY, [answer])[0] for answer in ANSWERS] == pytest.approx(want, abs=1e-6)
    one = model.scores(QUERY, ANSWERS[:1])[0]
    status, answer = ask(running, path="/score", text_1=QUERY, text_2=ANSWERS[0])
    assert (status, answer["data"]) == (200, [{"index": 0, "object": "score", "score": one}])
    assert answer["object"] == "list" and answer["model"] == "judge" and answer["id"].startswith("score-")


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_answers_are_sorted_by_their_scores(running, model, path):
    want = sorted(enumerate(model.scores(QUERY, ANSWERS)), key=lambda item: -item[1])
    status, answer = ask(running, path=path, model="judge", query=QUERY, documents=ANSWERS, return_documents=True)
    assert status == 200 and [(item["index"], item["relevance_score"]) for item in answer["results"]] == want
    assert [item["document"] for item in answer["results"]] == [{"text": ANSWERS[index]} for index, _ in want]
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > len(ANSWERS)
    for top_n, count in ((2, 2), (0, 4), (9, 4)):
        _, best = ask(running, path=path, query=QUERY, documents=ANSWERS, top_n=top_n, return_documents=False)
        assert [(item.pop("index"), item.pop("relevance_score")) for item in best["results"]] == want[:count]
        assert not any(best["results"])


@pytest.mark.parametrize(
    "options, param, message",
    [
        ({"documents": []}, "documents", "documents is [], must be a text or a list of texts"),
        ({"documents": ["a"] * 6}, "documents", "documents has 6 items: at most 5 texts in all"),
        ({"query": "a" * 10**5}, "query", "query has 100000 characters"),
        ({"query": ["a"]}, "query", "query is ['a']"),
        ({"query": "ab" * 300}, "query", "query has 600 tokens"),
        ({"documents": ["a", "ab" * 300]}, "documents", "documents has"),
        ({"top_n": -1}, "top_n", "top_n is -1"),
        ({"use_activation": True}, "use_activation", "use_activation is not supported"),
    ],
    ids=range(8),
)
def test_answers_that_cannot_be_sorted_are_refused(running, options, param, message):
    status, answer = ask(running, path="/v1/rerank", **{"query": QUERY, "documents": ANSWERS} | options)
    assert (status, answer["error"]["param"]) == (400, param) and message in answer["error"]["message"]


def test_conversations_are_scored_at_their_last_answer(running, model):
    before = [{"role": "system", "content": "Be kind."}, *HELLO]
    talks = [[*before, {"role": "assistant", "content": answer}] for answer in ANSWERS]
    want = model.scores(before, ANSWERS)
    assert values(running, messages=talks) == want != model.scores(HELLO, ANSWERS)
    assert values(running, messages=talks[1]) == model.scores(before, ANSWERS[1:2])
    parts = [{"type": "text", "text": ANSWERS[0]}]
    assert values(running, messages=[*before, {"role": "assistant", "content": parts}]) == model.scores(
        before, ANSWERS[:1]
    )


def test_a_process_reward_model_scores_each_step(steps, monkeypatch):
    answers = ["Two.\nThree.\nFour.", "One step"]
    want = steps.scores(QUERY, answers)
    assert [len(item) for item in want] == [3, 1]
    with Running(served_of(steps)) as running:
        assert values(running, text_1=QUERY, text_2=answers) == want
        read = running.metrics()["capibara_read_tokens_total",]
        monkeypatch.setattr(type(steps.scorer), "scores_of", None)  # it is refused before an answer is read
        status, answer = ask(running, path="/v1/rerank", query=QUERY, documents=answers)
        assert running.metrics()["capibara_read_tokens_total",] == read and answer["error"]["param"] == "model"
        assert status == 400 and "has a score for each step of an answer: ask /v1/score" in answer["error"]["message"]


def test_tokens_and_requests_are_counted(running, model):
    read = running.metrics()["capibara_read_tokens_total",]
    _, answer = ask(running, text_1=QUERY, text_2=ANSWERS[:2])
    asked = {"role": "user", "content": QUERY}
    talks = [Conversation([asked, {"role": "assistant", "content": answer}]) for answer in ANSWERS[:2]]
    prompts = [model.scorer.template.render(talk, "x").text for talk in talks]
    tokens = sum(len(model.tokenizer.encode_rendered(text)[0]) for text in prompts)
    assert answer["usage"] == {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
    after = running.metrics()
    assert after["capibara_read_tokens_total",] == read + tokens
    assert after["capibara_requests_total", "/v1/score", "200"] > 0 and after["capibara_slots",] == 0
    assert running.http("GET", "/ready")[0] == 200 and running.client().models.retrieve("judge").id == "judge"
    ids = running.http("POST", "/tokenize", json.dumps({"prompt": "The"}))[1]
    assert json.loads(ids)["tokens"] == model.tokenizer.prompt_ids("The")


ANSWER = {"role": "assistant", "content": "a"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
REFUSED = {
    "nothing": ({}, "text_1", "text_1 and queries are missing: set one, or messages"),
    "no answers": ({"text_1": "a"}, "text_2", "text_2 and documents are missing"),
    "two names": ({"text_1": "a", "queries": "a", "text_2": "b"}, "text_1", "are both set: leave one out"),
    "texts and messages": ({"text_1": "a", "text_2": "b", "messages": HELLO}, "text_1", "text_1 and messages are both set"),
    "a number": ({"text_1": 5, "text_2": "b"}, "text_1", "text_1 is 5, must be a text or a list of texts"),
    "a number inside": ({"text_1": "a", "text_2": ["b", 5]}, "text_2", "must be a text or a list of texts"),
    "an empty list": ({"text_1": "a", "text_2": []}, "text_2", "must be a text or a list of texts"),
    "other numbers of texts": ({"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_1", "text_1 has 2 texts and text_2 3"),
    "too many texts": ({"text_1": "a", "text_2": ["b"] * 6}, "text_2", "text_2 has 6 items: at most 5 texts in all"),
    "too many conversations": ({"messages": [[*HELLO, ANSWER]] * 6}, "messages", "6 conversations: at most 5 texts"),
    "a long answer": ({"text_1": "a", "text_2": "b" * 1000}, "text_2", "text_2 has 10.. tokens, must have at most"),
    "a very long answer": ({"text_1": "a", "text_2": "b" * 100_000}, "text_2", "text_2 has 100000 characters"),
    "no answer at the end": ({"messages": HELLO}, "messages", "^messages ends with .*, must end with an answer of the assistant"),
    "a call at the end": ({"messages": [*HELLO, ANSWER | {"tool_calls": [CALL]}]}, "messages", "of text alone"),
    "a call that the template leaves out": (
        {"messages": [*HELLO, ANSWER | {"tool_calls": [CALL]}, {"role": "tool", "content": "b", "tool_call_id": "c1"}, ANSWER]},
        "messages", "leaves out tool calls",
    ),
    "an empty answer": ({"messages": [*HELLO, ANSWER | {"content": ""}]}, "messages", "must end with an answer"),
    "an answer alone": ({"messages": [[ANSWER]]}, "messages", r"messages\[0\] has an answer alone"),
    "a number in the second": (
        {"messages": [[*HELLO, ANSWER], [{"role": "user", "content": 5}, ANSWER]]}, "messages", r"^messages\[1\]: messages\[0\]: the content",
    ),
    "a message beside a conversation": ({"messages": [[*HELLO, ANSWER], ANSWER]}, "messages", r"^messages: messages\[0\] must have role"),
    "no messages": ({"messages": []}, "messages", ""),
    "a role that is not known": ({"messages": [{"role": "judge", "content": "a"}, ANSWER]}, "messages", "judge"),
    "an unknown parameter": ({"text1": "a"}, "text1", "did you mean text_1"),
    "an activation": ({"text_1": "a", "text_2": "b", "use_activation": True}, "use_activation", "not supported"),
    "a cut": ({"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not supported"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_named(running, name):
    body, param, message = REFUSED[name]
    status, answer = ask(running, **body)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert re.search(message, answer["error"]["message"]), answer


def test_each_kind_of_model_refuses_what_the_other_answers(running, served):
    create = running.client().chat.completions.create
    with pytest.raises(openai.BadRequestError, match="judge is a reward model and generates no text: ask /v1/score"):
        create(model="judge", messages=HELLO)
    for path, body in (
        ("/v1/completions", {"model": "judge", "prompt": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/responses", {"model": "judge", "input": "a"}),
        ("/v1/messages", {"model": "judge", "messages": HELLO, "max_tokens": 5}),
    ):
        status, answer, _ = running.http("POST", path, json.dumps(body))
        assert status == 400 and b"is a reward model and generates no text" in answer, path
    assert running.http("POST", "/v1/score", json.dumps({"model": "x", "text_1": "a", "text_2": "b"}))[0] == 404
    with Running(served) as language_model:
        status, answer = ask(language_model, text_1="a", text_2="b")
    assert status == 400 and answer["error"]["code"] == "unsupported_model"
    assert "tiny is a language model and has no scores: serve a reward model" in answer["error"]["message"]


def test_a_diverged_model_is_named_without_its_path(model):
    served = served_of(model)
    params = model.params | {"score": model.params["score"] * float("inf")}
    scorer = models.scorer_of(dataclasses.replace(model.loaded, params=params), "judge", model.template)
    with Running(dataclasses.replace(served, scorer=scorer)) as running:
        status, answer = ask(running, text_1="a", text_2="b")
    assert status == 400 and "judge scores an answer as nan or infinity" in answer["error"]["message"]


def test_the_verb_serves_a_reward_model(reward, model, monkeypatch, capfd):
    seen = []

    def run(listening, keys, load, *_):
        seen.append(load())
        listening.close()
        return 0

    monkeypatch.setattr(server, "run", run)
    flags = [f"--model_dir={reward}", "--name=judge", "--port=0"]
    config.reset()
    assert exits.run_verb(serve.main, [*flags, "--gin.ServerConfig.max_embeddings=9"]) == 0, capfd.readouterr()
    ((served, takes),) = seen
    assert served.generator is None
    assert served.scorer.scores(Conversation(HELLO), ["a"]) == model.scores(HELLO, ["a"])
    assert (served.name, takes.max_embeddings) == ("judge", 9)
    for flag in ("--gin.EngineConfig.slots=4", "--gin.Sampling.temperature=0", "--gin.ServingMesh.tensor=1"):
        config.reset()
        assert exits.run_verb(serve.main, [*flags, flag]) == 2
        assert f"{flag.split('=')[0].removeprefix('--gin.')} is bound but nothing uses it" in capfd.readouterr().err


def test_a_template_that_cannot_be_used_is_refused_at_the_start(model, reward):
    """Its answers do not begin where its prompts end."""
    template = cb.ChatTemplate(
        tokenizer=reward,
        template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}Answer: {% endif %}",
    )
    with pytest.raises(UserError, match="the assistant's text of message 1 cannot be located"):
        models.scorer_of(model.loaded, "judge", template)


def test_python_serves_a_reward_model(model, monkeypatch):
    seen = []
    monkeypatch.setattr(server, "run", lambda listening, keys, load, *_: (listening.close(), seen.append(load()[0])))
    cb.serve(model, port=0, name="judge")
    assert seen[0].scorer is model.scorer and seen[0].generator is None and seen[0].adapters == ()


def test_many_answers_are_read_in_several_batches(model, monkeypatch):
    """As many rows as fit, in a power of two; each score goes to its own answer."""
    answers = [*ANSWERS, *(f"{number} {answer}" for number, answer in enumerate(ANSWERS))]
    want = model.scores(QUERY, answers)
    monkeypatch.setattr(reward_model, "BATCH_TOKENS", 3 * 64)
    shapes, real = [], model.scorer._score
    monkeypatch.setattr(
        model.scorer, "_score", lambda params, batch: shapes.append(batch["tokens"].shape) or real(params, batch)
    )
    assert model.scores(QUERY, answers) == pytest.approx(want, abs=1e-6) and len(set(want)) == len(answers)
    assert len(shapes) > 2 and all(rows * size <= 4 * 64 and rows & (rows - 1) == 0 for rows, size in shapes)
